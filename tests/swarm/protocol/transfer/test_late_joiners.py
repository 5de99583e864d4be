"""Late joiners get the version in flight while little is queued for the other children."""

import random

import pytest
from member_kit import a_member
from protocol_kit import SWARM, TUNING, fresh, grant, header, heartbeat, key_of, member, only, say, version

from codec import ChunkKey
from swarm.protocol.core.events import Effect, Heard, PeerUp, SendPiece
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.wire import Attach, Credit, Hello, LateChunkWants, WantChunk
from swarm.protocol.member import Peer
from swarm.protocol.state import OwnUplink, State
from swarm.protocol.transfer.exchange import HEADER, Exchange
from swarm.protocol.transfer.repair.offers import Offers

ANNA, BEN, CLEO = (key_of(name).public for name in ("anna", "ben", "cleo"))
MUCH = 1 << 40
PIECE_BYTES = 1000
LITTLE_BYTES = 2 * PIECE_BYTES
UP_BYTES_S = LITTLE_BYTES / TUNING.idle_s


class Parent:
    """A member with children, whose uplink carries `UP_BYTES_S`. Its chunks have a header of 100 bytes and four pieces
    of `PIECE_BYTES`. Two pieces are the limit below which late joiners are served."""

    def __init__(self, *late_joiners: bytes) -> None:
        self.up_bytes_s = UP_BYTES_S
        uplink = OwnUplink(bytes_s=lambda: self.up_bytes_s)
        self.state = State.new(key_of("house"), SWARM, TUNING, random.Random(0), uplink)
        self.exchange = self.state.exchange
        self.state.leases.hear(heartbeat(1, time=1000.0), SWARM, 0.0)
        for peer in (ANNA, BEN, CLEO):
            self.state.sessions.up(peer, False, 0.0)
            session = self.state.sessions.get(peer)
            assert session is not None
            session.issued = 1010.0 if peer in late_joiners else 990.0

    def open_version(self, number: int, now: float, chunks: int = 1) -> list[Effect]:
        effects = fresh(self.exchange)
        for seq in range(chunks):
            taken = self.state.chunks.header(header(number, seq, piece_bytes=PIECE_BYTES), now)
            assert taken is not None
            self.exchange.push(taken[0], HEADER, None, now)
            for index in range(4):
                self.state.chunks.piece(taken[0].key, index, now)
                self.exchange.push(taken[0], index, None, now)
        return effects

    def attach(self, peer: bytes, credit: int = MUCH, now: float = 6.0) -> list[Effect]:
        effects = fresh(self.exchange)
        self.exchange.attached(peer, Attach(0, 0, 0, credit, ()), now)
        return effects

    def credit(self, peer: bytes, total: int, now: float = 7.0) -> list[Effect]:
        effects = fresh(self.exchange)
        self.exchange.credited(peer, Credit(0, total, 0), now)
        return effects

    def look(self, now: float) -> list[Effect]:
        effects = fresh(self.exchange)
        self.exchange.tick(now)
        return effects

    def socket_accepts(self, peer: bytes, *indexes: int, now: float, number: int = 1) -> list[Effect]:
        """Its socket accepted these pieces."""
        effects = fresh(self.exchange)
        for index in indexes:
            self.exchange.sent(peer, 0, ChunkKey(0, number, 0, 0), index, now)
        return effects


def pieces_sent(effects: list[Effect], peer: bytes) -> list[int]:
    return [e.index for e in only(effects, SendPiece) if e.peer == peer]


# ---------------------------------------------------------------- which members are late joiners


@pytest.mark.parametrize(("opened_at", "is_late_joiner"), [(9.0, True), (11.0, False)])
def test_a_late_joiner_has_a_grant_younger_than_the_version(opened_at: float, is_late_joiner: bool) -> None:
    """By the authority's clock, which advances between heartbeats: BEN joined at 1010, 10 s after the last one."""
    parent = Parent(BEN)
    parent.open_version(1, opened_at)
    assert parent.state.late_joiners.has(BEN) == is_late_joiner
    assert not parent.state.late_joiners.has(ANNA)
    assert not parent.state.late_joiners.has(key_of("nobody").public)


def test_before_any_version_there_are_no_late_joiners() -> None:
    assert not Parent(BEN).state.late_joiners.has(BEN)


def test_with_the_next_version_a_late_joiner_is_an_ordinary_child() -> None:
    parent = Parent(BEN)
    parent.open_version(1, 5.0)
    parent.attach(ANNA, credit=0)
    assert pieces_sent(parent.attach(BEN), BEN) == []
    assert pieces_sent(parent.open_version(2, 20.0), BEN) != [], "it is served like any other child"
    assert not parent.state.late_joiners.has(BEN)
    assert not parent.state.late_joiners.opened(version(1), 30.0), "an older version changes nothing"
    assert not parent.state.late_joiners.has(BEN)


# ---------------------------------------------------------------- what a late joiner is sent


def test_a_late_joiner_waits_while_more_than_little_waits_for_another() -> None:
    parent = Parent(BEN)
    parent.open_version(1, 5.0)
    parent.attach(ANNA, credit=0)
    assert pieces_sent(parent.attach(BEN), BEN) == []
    parent.credit(ANNA, 100 + 2 * PIECE_BYTES, 6.1)
    assert pieces_sent(parent.look(6.2), BEN) == [], "two pieces wait for ANNA, which is not below the limit"
    parent.credit(ANNA, 100 + 3 * PIECE_BYTES, 6.3)
    assert pieces_sent(parent.look(6.4), BEN) != []


def test_a_late_joiner_waits_until_handed_over_parts_are_sent() -> None:
    """Regardless of sockets: at three quarters of the rate, all of both headers and of ANNA's pieces has left except
    less than the limit."""
    parent = Parent(BEN)
    parent.open_version(1, 5.0)
    parent.attach(ANNA, now=6.0)
    parent.socket_accepts(ANNA, HEADER, 0, 1, 2, 3, now=6.0)
    assert pieces_sent(parent.attach(BEN, now=6.0), BEN) == []
    left_s = (2 * 100 + 4 * PIECE_BYTES - LITTLE_BYTES) / (0.75 * UP_BYTES_S)
    assert pieces_sent(parent.look(6.0 + 0.99 * left_s), BEN) == []
    assert pieces_sent(parent.look(6.0 + 1.01 * left_s), BEN) == [0]


def test_pulls_of_others_count_too() -> None:
    parent = Parent(BEN)
    parent.open_version(1, 5.0)
    chunk = parent.state.chunks.versions[version(1)].chunks[0]
    parent.exchange.gave(CLEO, chunk, [0, 1, 2, 3], 6.0)
    assert pieces_sent(parent.attach(BEN, now=6.0), BEN) == []
    assert pieces_sent(parent.look(7.0), BEN) == [0, 1]


@pytest.mark.parametrize(("held", "left"), [(False, 0.75), (True, 1.0)])
def test_once_the_version_is_complete_late_joiners_get_the_whole_uplink(held: bool, left: float) -> None:
    parent = Parent(BEN)
    parent.open_version(1, 5.0)
    if held:
        parent.state.late_joiners.version_held(version(1))
    parent.exchange.gave(CLEO, parent.state.chunks.versions[version(1)].chunks[0], [0, 1, 2, 3], 6.0)
    parent.attach(BEN, now=6.0)
    queued_before = parent.state.uplink.queued_bytes(6.0)
    assert queued_before - parent.state.uplink.queued_bytes(6.001) == pytest.approx(left * UP_BYTES_S * 0.001)


def test_late_joiners_are_given_little_at_a_time_least_given_first() -> None:
    parent = Parent(BEN, CLEO)
    parent.open_version(1, 5.0)
    assert pieces_sent(parent.attach(BEN, now=6.0), BEN) == [0, 1], "little"
    assert pieces_sent(parent.attach(CLEO, now=6.0), CLEO) == []
    after = parent.socket_accepts(BEN, HEADER, 0, now=7.0)
    assert (pieces_sent(after, CLEO), pieces_sent(after, BEN)) == ([0, 1], []), "CLEO was sent less"


def test_a_late_joiner_that_takes_nothing_does_not_block_the_others() -> None:
    parent = Parent(BEN, CLEO)
    parent.open_version(1, 5.0)
    assert pieces_sent(parent.attach(BEN, now=6.0), BEN) == [0, 1], "BEN's socket never accepts them"
    assert pieces_sent(parent.attach(CLEO, now=7.0), CLEO) == [0, 1]


def test_a_child_that_lags_is_not_waited_for() -> None:
    parent = Parent(BEN)
    parent.open_version(1, 5.0)
    parent.attach(ANNA, credit=0)
    assert pieces_sent(parent.attach(BEN), BEN) == []
    assert pieces_sent(parent.look(6.0 + TUNING.lag_after_s + 0.1), BEN) == [0, 1]


def test_parts_queued_for_late_joiners_do_not_count() -> None:
    parent = Parent(BEN)
    parent.open_version(1, 5.0)
    parent.attach(ANNA, credit=0)
    before = parent.exchange.waiting_bytes
    parent.attach(BEN, credit=0)
    assert parent.exchange.waiting_bytes == before
    assert parent.exchange._behind(0) == parent.exchange.children[0][ANNA].backlog


def test_a_late_joiner_that_goes_leaves_nothing_behind() -> None:
    parent = Parent(BEN)
    parent.open_version(1, 5.0)
    parent.attach(ANNA, credit=0)
    parent.attach(BEN)
    parent.exchange.detached(BEN, None)
    assert pieces_sent(parent.credit(ANNA, MUCH), BEN) == []


def test_without_late_joiners_set_there_are_none() -> None:
    parent = Parent(BEN)
    parent.open_version(1, 5.0)
    plain = Exchange(parent.state.chunks, TUNING, Outbox())
    effects = fresh(plain)
    plain.attached(ANNA, Attach(0, 0, 0, 0, ()), 6.0)
    plain.attached(BEN, Attach(0, 0, 0, MUCH, ()), 6.0)
    assert pieces_sent(effects, BEN) == [0, 1, 2, 3]


# ---------------------------------------------------------------- what a late joiner requests


def test_a_late_joiners_wants_are_granted_once_the_version_is_here() -> None:
    parent = Parent(BEN)
    parent.open_version(1, 5.0)
    parent.up_bytes_s = 25e6
    offers = Offers(parent.state)
    offers.heard(BEN, LateChunkWants(0, 1, 0, (0,)), 6.0)
    assert parent.state.outbox.take() == []
    parent.state.late_joiners.version_held(version(1))
    offers.heard(BEN, LateChunkWants(0, 1, 0, (0,)), 7.0)
    assert len(parent.state.outbox.take()) == 1


def _came(peer: Peer, name: str, issued: float) -> bytes:
    other = key_of(name).public
    peer.apply(PeerUp(other, False), 0.5)
    peer.apply(Heard(other, Hello(grant({"anna": 1, "ben": 2}[name], other, issued=issued), 0, 0, 0, 0)), 0.5)
    return other


def test_a_late_joiners_pull_is_answered_when_nobody_else_waits() -> None:
    peer = a_member(members=[member(slot, up_mbit=UP_BYTES_S / 125_000) for slot in range(3)])
    anna, ben = _came(peer, "anna", 1002.0), _came(peer, "ben", 1010.0)
    peer.apply(header(1, 0), 1.0)
    for index in range(4):
        assert peer.state.chunks.piece(ChunkKey(0, 1, 0, 0), index, 1.0)
    peer.state.exchange.push(peer.state.chunks.versions[version(1)].chunks[0], HEADER, None, 1.0)
    want = WantChunk(0, 1, 0, 0, b"")
    assert pieces_sent(say(peer, anna, want, 2.0), anna) == [0, 1, 2, 3]
    assert pieces_sent(say(peer, ben, want, 2.0), ben) == [], "the answer to its last request is still being sent"
    assert pieces_sent(say(peer, ben, want, 3.0), ben) == [0, 1, 2, 3]
