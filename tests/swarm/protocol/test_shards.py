"""Members that hold a shard, in the core: what is said of it, how chunks come, and who is asked."""

import msgspec
import pytest
from authority_kit import TICKET, an_authority, connect_peer, join, make_durable, members, reconnect
from protocol_kit import (
    AUTHORITY,
    SWARM,
    TUNING,
    admit,
    book_with,
    fresh,
    grant,
    header,
    join_message,
    key_of,
    manifest,
    meet,
    new_peer,
    only,
    say,
    sends,
    version,
)  # fmt: skip

from codec.errors import PeerError
from codec.shards import Shard
from swarm.protocol.core.documents import Grant, open_grant, seal
from swarm.protocol.core.events import (
    Close,
    Heard,
    JobDone,
    JobKind,
    LocalChunk,
    Opened,
    PartsDone,
    PeerUp,
    PieceStored,
    Run,
    SendHeader,
    SendPiece,
    Timer,
    VersionApplied,
)
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.wire import (
    Attach,
    Hello,
    Join,
    LacksChunk,
    ManifestNews,
    Refused,
    WantBlob,
    WantChunk,
    Welcome,
    encode,
)
from swarm.protocol.member import Peer
from swarm.protocol.transfer.chunks import NO_PIECES
from swarm.protocol.transfer.exchange import HEADER, Exchange
from swarm.protocol.transfer.exchange_context import ExchangeContext
from swarm.protocol.transfer.sources import block_sources

MINE, OTHER, MORE = Shard(4, (1,)), Shard(4, (2,)), Shard(4, (1, 2))
ANNA, BEN = (key_of(name).public for name in ("anna", "ben"))
MUCH = 1 << 40
TREES = ((-1, 0, 0), (1, -1, 1))
"""Two stripes of three members: slot 2 is a leaf in both."""


# ---------------------------------------------------------------- what is said of a shard


def test_without_a_shard_bytes_are_those_of_the_first_releases() -> None:
    """A grant and a join request end with the fields that they always had; with a shard two follow."""
    key, body = key_of(1), (SWARM, key_of(1).public, 3, 7, 1000.0, bytes(16))
    plain = seal(Grant(*body), AUTHORITY)
    assert plain[64:] == msgspec.msgpack.encode(body)
    assert open_grant(plain, SWARM).shard is None
    sealed = seal(Grant(*body, 4, (1,)), AUTHORITY)
    assert sealed[64:] == msgspec.msgpack.encode((*body, 4, (1,)))
    assert open_grant(sealed, SWARM).shard == MINE
    assert key.public == open_grant(sealed, SWARM).peer

    message = join_message(b"x")
    fields = (1, b"x", ("/sim/me",), "me", "", 100.0, 1000.0, False)
    assert encode(message)[1:] == msgspec.msgpack.encode(fields)
    assert encode(join_message(b"x", shard=MINE))[1:] == msgspec.msgpack.encode((*fields, 4, (1,)))


@pytest.mark.parametrize(("shards", "ranks"), [(4, (4,)), (4, (2, 1)), (4, (1, 1)), (4, ()), (0, (1,)), (1, (0,))])
def test_a_grant_of_ranks_that_cannot_be_is_refused(shards: int, ranks: tuple[int, ...]) -> None:
    fields = (SWARM, ANNA, 0, 1, 0.0, bytes(16), shards, ranks)
    with pytest.raises(PeerError, match="grant"):
        open_grant(AUTHORITY.seal(b"swarm-node grant 1", msgspec.msgpack.encode(fields)), SWARM)


@pytest.mark.parametrize(
    ("shards", "message", "why"),
    [
        (0, join_message(TICKET, shard=MINE), "does not deal"),
        (8, join_message(TICKET, shard=MINE), "over 8 ranks"),
        (4, msgspec.structs.replace(join_message(TICKET), shards=4, ranks=(4,)), "0 to 3"),
        (4, msgspec.structs.replace(join_message(TICKET), shards=4, ranks=(1, 0)), "0 to 3"),
        (4, msgspec.structs.replace(join_message(TICKET), shards=4), "0 to 3"),
        (4, msgspec.structs.replace(join_message(TICKET), ranks=(1,)), "not over 0"),
    ],
)
def test_a_shard_that_the_swarm_does_not_have_is_refused(shards: int, message: Join, why: str) -> None:
    core = an_authority(shards=shards)
    connect_peer(core, 1)
    (refusal,) = sends(say(core, 1, message, 1.0), Refused)
    assert refusal.code == "shard"
    assert why in refusal.why
    assert not core.book.leases


def test_a_member_with_a_shard_is_granted_it_and_planned_without_uplink() -> None:
    core = members(an_authority(shards=4), 2)
    (welcome,) = sends(join(core, 2, 4.0, join_message(TICKET, shard=MINE)), Welcome)
    assert open_grant(welcome.grant, SWARM).shard == MINE
    member = core.state.roster.member_of(key_of(2).public)
    assert (member.leaf, member.up_mbit) == (True, 0.0)
    assert core.state.sessions.shard_of(key_of(2).public) == MINE
    assert core.state.sessions.shard_of(key_of(1).public) is None


def test_a_grant_outlives_a_seed_that_comes_back_with_another_rule() -> None:
    """The member goes on with the blocks that it holds: which those are does not depend on how chunks are cut."""
    core = an_authority(shards=4)
    (welcome,) = sends(join(core, 0, 1.0, join_message(TICKET, shard=MINE)), Welcome)
    again = an_authority(boot=2, shards=8)
    join(again, 0, 1.0)
    again.book.restore([welcome.grant], again._time(2.0))
    effects = reconnect(again, 0, welcome.grant, 3.0)
    assert sends(effects, Hello)
    assert again.state.sessions.shard_of(key_of(0).public) == MINE


def test_a_member_may_change_its_shard() -> None:
    """While its lease lives: it gets another grant for the same slot."""
    core = an_authority(shards=4)
    join(core, 0, 1.0, join_message(TICKET, shard=MINE))
    now = 1.0 + 2 * TUNING.heartbeat_s
    effects = say(core, 0, join_message(TICKET, shard=OTHER), now)
    effects += make_durable(core, effects, now) + core.apply(Timer("tick"), now + TUNING.tick_s + 0.01)
    (welcome,) = sends(effects, Welcome)
    assert open_grant(welcome.grant, SWARM).shard == OTHER
    assert list(core.book.leases) == [0]


def test_a_welcome_for_another_shard_is_not_taken() -> None:
    peer = new_peer(2, shard=MINE)
    peer.state.shard = OTHER  # what `admit` will grant
    admit(peer, TREES, slot=2)
    assert peer.state.grant is None


# ---------------------------------------------------------------- a parent


def a_parent(*, gives: bool = True) -> tuple[Exchange, list, list]:
    """(exchange, its effects, three chunks that it holds). Anna holds a shard, Ben does not."""
    book, chunks = book_with([header(1, seq) for seq in range(3)])
    exchange = Exchange(book, TUNING, Outbox(), ExchangeContext(chooses=lambda peer: peer == ANNA), gives=gives)
    return exchange, fresh(exchange), chunks


def parts(effects: list, peer: bytes) -> list[tuple[int, int]]:
    """(sequence number, index) of what is sent to this peer; -1: the header."""
    return [
        (e.key.seq, e.index if isinstance(e, SendPiece) else HEADER)
        for e in effects
        if isinstance(e, SendHeader | SendPiece) and e.peer == peer
    ]


def test_a_child_with_a_shard_gets_headers_and_what_it_asks_for() -> None:
    exchange, effects, chunks = a_parent()
    exchange.attached(ANNA, Attach(0, 0, 0, MUCH, ()), 0.0)
    exchange.attached(BEN, Attach(0, 0, 0, MUCH, ()), 0.0)
    assert parts(effects, ANNA) == [(0, HEADER), (1, HEADER), (2, HEADER)]
    assert len(parts(effects, BEN)) == 15
    effects.clear()
    assert [exchange.is_choice(ANNA, chunk.key) for chunk in chunks] == [True] * 3
    assert not exchange.is_choice(BEN, chunks[1].key)
    assert exchange.take_back(ANNA, chunks[1], chunks[1].full, 0.0)
    assert parts(effects, ANNA) == [(1, index) for index in range(4)]
    assert not exchange.is_choice(ANNA, chunks[1].key)


def test_pieces_that_come_after_the_choice_are_pushed_and_no_others() -> None:
    """Cut-through: the parent has only the headers when the child asks."""
    book, chunks = book_with([header(1, 0), header(1, 1)], held=False)
    exchange = Exchange(book, TUNING, Outbox(), ExchangeContext(chooses=lambda peer: True))
    effects = fresh(exchange)
    exchange.attached(ANNA, Attach(0, 0, 0, MUCH, ()), 0.0)
    for chunk in chunks:
        exchange.push(chunk, HEADER, None, 0.0)
    exchange.take_back(ANNA, chunks[1], 0, 0.0)
    effects.clear()
    for chunk in chunks:
        for index in range(4):
            book.piece(chunk.key, index, 0.0)
            exchange.push(chunk, index, None, 0.0)
    assert parts(effects, ANNA) == [(1, index) for index in range(4)]


def test_a_child_that_comes_back_gets_what_it_had_begun() -> None:
    """It lists the chunks that it does not need as held, so that they do not come; one that it has in part goes on."""
    exchange, effects, _ = a_parent()
    peer = a_part()
    feed(peer, 0, wanted=False)
    feed(peer, 1, pieces=(0, 2))
    feed(peer, 2)
    haves = peer.state.chunks.haves(version(0))
    assert [(have.seq, have.pieces) for have in haves] == [(0, b""), (1, b"\x05")]
    exchange.attached(ANNA, Attach(0, 0, 0, MUCH, haves), 0.0)
    assert parts(effects, ANNA) == [(2, HEADER), (1, 1), (1, 3)]


def test_a_late_joiner_may_choose() -> None:
    """The pull of a late joiner waits for other children; its choice only queues what its parent would push."""
    peer = new_peer(0)
    admit(peer, ((-1, 0, 0),))
    meet(peer, 2, shard=MINE)
    for seq in (0, 1):
        feed(peer, seq, peer_of=None, pieces=range(4))
    peer.state.exchange.has_time = lambda now: False  # type: ignore[method-assign]
    peer.state.late_joiners.has = lambda other: True  # type: ignore[method-assign]
    effects = say(peer, 2, Attach(0, 0, 0, MUCH, ()))
    assert parts(effects, key_of(2).public) == [(0, HEADER), (1, HEADER)]
    assert say(peer, 2, WantChunk(0, 1, 0, 1, b"")) == []
    del peer.state.exchange.has_time
    peer.state.exchange.serve_late_joiners(0.0)
    assert parts(peer.state.outbox.take(), key_of(2).public) == [(1, index) for index in range(4)]


# ---------------------------------------------------------------- a member with a shard


def a_part(*, attached: bool = True) -> Peer:
    """Slot 2, which holds version 0 of rank 1; its parents are slots 0 and 1."""
    peer = new_peer(2, shard=MINE)
    admit(peer, TREES, slot=2)
    for slot in (0, 1) if attached else ():
        meet(peer, slot)
    return peer


def feed(
    peer: Peer,
    seq: int,
    *,
    wanted: bool = True,
    pieces: tuple[int, ...] | range = (),
    stripe: int = 0,
    peer_of: int | None = 0,
    now: float = 0.0,
) -> list:
    """A header comes from the holder of a slot (None: it was on disk), and these pieces."""
    source = None if peer_of is None else key_of(peer_of).public
    event = header(1, seq, stripe=stripe, peer=source, wanted=wanted)
    effects = peer.apply(event, now)
    for index in pieces:
        effects += peer.apply(PieceStored(source, stripe, event.key, index, 1000), now)
    return effects


def test_it_asks_its_parent_for_the_chunks_that_it_needs() -> None:
    peer = a_part()
    assert sends(feed(peer, 0, wanted=False), WantChunk) == []
    assert sends(feed(peer, 1), WantChunk, to=0) == [WantChunk(0, 1, 0, 1, b"")]
    assert sends(feed(peer, 1, pieces=(0,)), WantChunk, to=0) == [WantChunk(0, 1, 0, 1, b"")]  # the same header again
    assert sends(feed(peer, 1), WantChunk) == []  # its pieces come


def test_a_version_is_complete_with_all_headers_and_its_own_bodies() -> None:
    peer = a_part()
    assert sends(feed(peer, 0, wanted=False), WantChunk) == []
    effects = feed(peer, 1, pieces=range(4), stripe=1, peer_of=1)
    assert [(run.job.kind, run.job.key.seq) for run in only(effects, Run)] == [(JobKind.STAGE, 1)]
    (stage,) = only(effects, Run)
    effects = peer.apply(JobDone(stage.job, True), 0.0)
    assert only(effects, Run) == []
    effects = say(peer, 0, ManifestNews(manifest(1, 3)))
    assert only(effects, Run) == []  # the header of the third is missing
    (apply,) = only(feed(peer, 2, wanted=False), Run)
    assert apply.job.kind == JobKind.APPLY
    assert only(peer.apply(JobDone(apply.job, True), 0.0), VersionApplied)
    assert peer.state.held == version(1)


def test_pieces_that_it_does_not_need_change_nothing() -> None:
    """A liar pushes them, though nobody asked."""
    peer = a_part()
    feed(peer, 0, wanted=False, pieces=range(4))
    found = peer.state.chunks.version(version(1))
    assert found is not None
    assert (found.done_chunks, found.chunks[0].have, found.unstaged) == (1, 0, {})


def test_what_it_does_not_hold_it_lacks() -> None:
    """It still gives the header."""
    peer = a_part()
    feed(peer, 0, wanted=False)
    assert sends(say(peer, 1, WantChunk(0, 1, 0, 0, b"")), LacksChunk, to=1) == [LacksChunk(0, 1, 0, 0)]
    assert parts(say(peer, 1, WantChunk(0, 1, 0, 0, NO_PIECES)), key_of(1).public) == [(0, HEADER)]


def test_a_parent_that_sends_headers_and_no_bodies_is_passed_by() -> None:
    """The chunk is pulled from others when its stripe makes no progress."""
    peer = a_part()
    feed(peer, 0)
    asked = set()
    for beat in range(1, 80):
        now = beat * TUNING.tick_s
        effects = peer.apply(Timer("tick"), now)
        asked |= {e.peer for e in effects if getattr(e, "message", None) == WantChunk(0, 1, 0, 0, b"")}
    assert {key_of(1).public, SWARM} <= asked


def test_a_header_that_is_missing_is_pulled_alone() -> None:
    """Its pieces may not be needed; if they are, the source of the header is asked at once."""
    peer = a_part()
    say(peer, 0, ManifestNews(manifest(1, 1)))
    pulled = []
    for beat in range(1, 80):
        pulled += sends(peer.apply(Timer("tick"), beat * TUNING.tick_s), WantChunk)
    assert set(pulled) == {WantChunk(0, 1, 0, 0, NO_PIECES)}
    assert sends(feed(peer, 0, peer_of=1, now=9.0), WantChunk, to=1) == [WantChunk(0, 1, 0, 0, b"")]


def test_it_attaches_when_it_has_the_layout() -> None:
    """By the layout it knows which chunks it needs: before, it would have to take all of them."""
    peer = new_peer(2, held=None, shard=MINE)
    effects = admit(peer, TREES, slot=2) + meet(peer, 0) + meet(peer, 1)
    assert sends(effects, Attach) == []
    effects = peer.apply(Timer("tick"), 1.0)
    assert sends(effects, Attach) == []
    (want,) = sends(effects, WantBlob)
    source = next(e.peer for e in effects if getattr(e, "message", None) == want)
    (open_job,) = only(peer.apply(PartsDone(source, want.request, version(0)), 1.0), Run)
    effects = peer.apply(JobDone(open_job.job, True, Opened(bytes(32), True)), 1.0)
    assert {attach.stripe for attach in sends(effects, Attach)} == {0, 1}


def test_a_whole_member_attaches_at_once() -> None:
    peer = new_peer(2, held=None)
    effects = admit(peer, TREES, slot=2) + meet(peer, 0) + meet(peer, 1)
    assert {attach.stripe for attach in sends(effects, Attach)} == {0, 1}


# ---------------------------------------------------------------- whom to ask


@pytest.mark.parametrize(
    ("own", "asked"),
    [(None, {0}), (MINE, {0, 1, 3}), (OTHER, {0, 3, 4}), (MORE, {0, 3}), (Shard(8, (1,)), {0})],
)
def test_only_members_that_hold_what_we_need_are_asked(own: Shard | None, asked: set[int]) -> None:
    peer = new_peer(2, shard=own)
    admit(peer, ((-1,) * 5,), slot=2)
    for slot, shard in ((0, None), (1, MINE), (3, MORE), (4, OTHER)):
        meet(peer, slot, shard=shard)
    assert set(block_sources(peer.state)) == {*(key_of(slot).public for slot in asked), SWARM}


def test_a_forged_shard_ends_the_session() -> None:
    peer = new_peer(0)
    admit(peer, ((-1, 0, 0),))
    forged = grant(1, key_of(1).public, shard=MINE, key=key_of("liar"))
    peer.apply(PeerUp(key_of(1).public, False), 0.0)
    effects = peer.apply(Heard(key_of(1).public, Hello(forged, 0, 0, 0, 0)), 0.0)
    assert only(effects, Close)
    assert peer.state.sessions.shard_of(key_of(1).public) is None


def test_the_authority_takes_the_choice_of_a_child() -> None:
    core = an_authority(shards=4)
    join(core, 0, 1.0, join_message(TICKET, shard=MINE))
    say(core, 0, Attach(0, 0, 0, MUCH, ()), 2.0)
    effects = core.apply(LocalChunk(header(1, 0, stripe=None)), 2.0)
    effects += core.apply(LocalChunk(header(1, 1, stripe=None)), 2.0)
    anna = key_of(0).public
    assert parts(effects, anna) == [(0, HEADER), (1, HEADER)]
    assert parts(say(core, 0, WantChunk(0, 1, 0, 1, b""), 2.0), anna) == [(1, index) for index in range(4)]
