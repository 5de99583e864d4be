"""Admission at the authority: joins, returning members, and leaves."""

import pytest
from authority_kit import (
    TICKET,
    an_authority,
    connect_peer,
    join,
    make_durable,
    members,
    notices_of,
    reconnect,
    renewal,
)
from msgspec.structs import replace
from protocol_kit import (
    AUTHORITY,
    SWARM,
    TUNING,
    capability,
    grant,
    header,
    join_message,
    key_of,
    manifest,
    only,
    say,
    sends,
)  # fmt: skip

from swarm.protocol.authority import Authority
from swarm.protocol.core.documents import open_grant, open_heartbeat, seal
from swarm.protocol.core.events import (  # fmt: skip
    Close,
    Effect,
    LocalAbandon,
    LocalChunk,
    LocalSeal,
    PeerDown,
    Persist,
    Persisted,
    Timer,
    VersionId,
)
from swarm.protocol.core.wire import (  # fmt: skip
    Attach,
    Bye,
    Credit,
    Detach,
    HeartbeatNews,
    Hello,
    Lacks,
    LacksChunk,
    ManifestNews,
    Message,
    Refused,
    Reports,
    RosterNews,
    RosterStep,
    WantBlob,
    WantBlock,
    WantChunk,
    WantManifest,
    Welcome,
    Work,
)
from swarm.protocol.membership.enrolment import Enrolment, open_record
from swarm.protocol.membership.roster import AUTHORITY as TRAINER
from swarm.protocol.membership.roster import open_whole

# ---------------------------------------------------------------- joining


def test_a_welcome_waits_for_the_disk() -> None:
    core = an_authority()
    connect_peer(core, 0, 1.0)
    effects = say(core, 0, join_message(TICKET), 1.0)
    assert sends(effects, Message) == []
    bound, wish = only(effects, Persist)
    assert bound.name.startswith("ticket/")
    core.apply(Timer("tick"), 2.0)
    (welcome,) = sends(core.apply(Persisted(wish.token), 3.0), Welcome, to=0)
    sealed, enrolment = open_record(wish.record)
    assert welcome.grant == sealed
    assert enrolment == Enrolment(join_message(TICKET), "/ip4/9.9.9.9/tcp/1")
    assert open_grant(welcome.grant, SWARM).peer == key_of(0).public
    assert open_whole(welcome.roster, SWARM)[0].member(0) is not None
    assert open_heartbeat(welcome.heartbeat, SWARM).live == b"\x01"


def test_a_newcomer_is_a_leaf_until_it_has_held_a_version() -> None:
    core = members(an_authority(), 2)
    assert core.state.roster is not None
    assert all(m.leaf for m in core.state.roster.members)
    say(core, 0, Reports(0, (renewal(core, 0, 1),)), 3.0)
    say(core, 1, Reports(0, (renewal(core, 1, 1, catching_up=0.5),)), 3.0)
    core.apply(Timer("tick"), 3.0 + TUNING.tick_s + 0.01)
    assert [m.leaf for m in core.state.roster.members] == [False, True]


def _whole(core: Authority, slots: range, counter: int, now: float) -> list[bool]:
    """These members report that they hold a version; which are leaves then."""
    for slot in slots:
        say(core, slot, Reports(0, (renewal(core, slot, counter),)), now)
    core.apply(Timer("tick"), now + TUNING.tick_s + 0.01)
    assert core.state.roster is not None
    return [m.leaf for m in core.state.roster.members]


@pytest.mark.parametrize(
    ("links", "leaves"),
    [
        ([(200, 1000), (200, 1000), (200, 50)], [False, False, True]),  # the others could give each 133 Mbit/s
        ([(200, 1000), (200, 1000), (200, 150)], [False, False, False]),
        ([(200, 1000), (200, 50), (200, 40)], [False, True, True]),
        ([(400, 50), (0, 1000), (0, 1000)], [False, True, True]),  # no other member has uplink
        ([(400, 100), (400, 100), (400, 100)], [False, False, False]),
    ],
)
def test_a_downlink_that_holds_up_others_makes_a_leaf(links: list[tuple[float, float]], leaves: list[bool]) -> None:
    core = an_authority()
    for slot, (up, down) in enumerate(links):
        join(core, slot, 1.0 + slot, replace(join_message(TICKET, up_mbit=up), down_mbit=down))
    assert _whole(core, range(len(links)), 1, 4.0) == leaves


@pytest.mark.parametrize("says_it_is_whole", [False, True])
def test_a_claim_of_a_huge_link_makes_no_leaf_of_anybody_else(says_it_is_whole: bool) -> None:
    """Otherwise one unproven claim would make the trainer send a copy of each version to every member."""
    core = an_authority()
    for slot in range(8):
        join(core, slot, 1.0 + 0.3 * slot, replace(join_message(TICKET, up_mbit=100.0), down_mbit=100.0))
    assert _whole(core, range(8), 1, 4.0) == [False] * 8
    join(core, 8, 4.5, replace(join_message(TICKET, up_mbit=1e7), down_mbit=1e7))
    assert _whole(core, range(8 + says_it_is_whole), 2, 5.0)[:8] == [False] * 8
    roster = core.state.roster
    assert roster is not None
    assert [len(roster.children(stripe, TRAINER)) for stripe in range(roster.stripes)] == [1] * roster.stripes


def test_a_member_that_joins_during_a_version_is_a_leaf_until_it_has_arrived() -> None:
    core = members(an_authority(), 3)
    assert _whole(core, range(3), 1, 4.0) == [False] * 3
    core.apply(LocalChunk(header(1, 0, stripe=None)), 4.6)
    join(core, 3, 4.7)
    assert _whole(core, range(4), 2, 5.2) == [False, False, False, True]
    core.apply(LocalSeal(manifest(1, 1)), 5.6)
    assert _whole(core, range(4), 3, 5.7) == [False, False, False, True]
    for late in (6.5, 7.4, 8.3):
        leaves = _whole(core, range(4), round(10 * late), late)
        assert leaves == [False, False, False, True]
    core.apply(Timer("tick"), 8.7)  # a member that never reports the version is not waited for any longer
    assert _whole(core, range(4), 99, 8.8) == [False] * 4


def test_a_member_that_joined_during_one_version_is_interior_for_the_next_or_where_interior_nodes_are_few() -> None:
    core = members(an_authority(), 1)
    assert _whole(core, range(1), 1, 2.0) == [False]
    core.apply(LocalChunk(header(1, 0, stripe=None)), 2.3)
    for slot in range(1, 4):
        join(core, slot, 2.3 + slot / 2)
    assert _whole(core, range(4), 2, 5.0) == [False, True, True, True]
    join(core, 4, 5.3)
    assert _whole(core, range(5), 3, 5.8) == [False] * 5  # one interior node is too few for four
    core = members(an_authority(), 2)
    assert _whole(core, range(2), 1, 3.0) == [False] * 2
    core.apply(LocalChunk(header(1, 0, stripe=None)), 3.3)
    join(core, 2, 3.4)
    assert _whole(core, range(3), 2, 3.8) == [False, False, True]
    core.apply(LocalSeal(manifest(1, 1)), 4.2)
    core.apply(LocalChunk(header(2, 0, stripe=None)), 4.3)
    assert _whole(core, range(3), 3, 4.4) == [False] * 3


def test_an_abandoned_attempt_delays_no_newcomer() -> None:
    core = members(an_authority(), 2)
    assert _whole(core, range(2), 1, 3.0) == [False] * 2
    chunk = header(1, 0, stripe=None)
    core.apply(LocalChunk(chunk), 3.3)
    join(core, 2, 3.4)
    assert _whole(core, range(3), 2, 3.8) == [False, False, True]
    core.apply(LocalAbandon(VersionId(chunk.key.epoch, chunk.key.version), chunk.key.attempt), 4.1)
    core.apply(Timer("tick"), 4.2)
    assert _whole(core, range(3), 3, 4.5) == [False] * 3


@pytest.mark.parametrize(
    ("ticket", "code"),
    [
        (seal(capability(), key_of("mallory")), "capability"),
        (b"", "capability"),
        (seal(capability(expires=10.0), AUTHORITY), "ticket"),
        (seal(capability(nodes=0), AUTHORITY), "ticket"),
    ],
    ids=["forged", "none", "expired", "used up"],
)
def test_an_invalid_ticket_is_refused(ticket: bytes, code: str) -> None:
    core = an_authority()
    effects = join(core, 0, message=join_message(ticket))
    (refused,) = sends(effects, Refused, to=0)
    assert refused.code == code
    assert only(effects, Persist) == []
    assert not core.book.leases


def test_a_flood_of_joins_gets_one_answer_a_heartbeat() -> None:
    core = an_authority()
    connect_peer(core, 0, 1.0)
    effects = [e for n in range(500) for e in say(core, 0, join_message(TICKET), 1.0 + n * 0.0001)]
    assert [p.name.split("/")[0] for p in only(effects, Persist)] == ["ticket", "grant"]
    effects = [e for n in range(500) for e in say(core, 1, join_message(b""), 1.0)]
    assert effects == []
    connect_peer(core, 1, 1.0)
    effects = [e for n in range(500) for e in say(core, 1, join_message(b""), 1.0)]
    assert len(sends(effects, Refused)) == 1


def test_joining_again_when_the_welcome_was_lost_gives_the_same_lease() -> None:
    core = members(an_authority(), 1)
    before = core.book.leases[0].sealed
    effects = say(core, 0, join_message(TICKET), 20.0)
    assert [w.grant for w in sends(effects, Welcome, to=0)] == [before]
    assert only(effects, Persist) == []


def test_a_crowd_is_planned_for_together() -> None:
    core = an_authority()
    effects: list[Effect] = []
    for slot in range(50):
        connect_peer(core, slot, 1.0)
        effects += say(core, slot, join_message(TICKET), 1.0)
    effects = make_durable(core, effects, 1.0) + core.apply(Timer("tick"), 1.0 + TUNING.tick_s + 0.01)
    assert len(sends(effects, Welcome)) == 50
    assert len(notices_of(effects, "planned")) <= 2


def test_a_peer_that_leaves_before_its_grant_is_durable() -> None:
    core = an_authority()
    connect_peer(core, 0, 1.0)
    effects = say(core, 0, join_message(TICKET), 1.0)
    core.apply(PeerDown(key_of(0).public), 1.1)
    assert sends(make_durable(core, effects, 1.2) + core.apply(Timer("tick"), 2.0), Welcome) == []


# ---------------------------------------------------------------- hello


@pytest.mark.parametrize(
    "message",
    [
        Reports(0, ()), Attach(0, 0, 0, 1, ()), Detach(0), Credit(0, 1), WantChunk(0, 1, 0, 0, b""),
        WantBlob(1, 1, bytes(32), 0), WantBlock(1, 0), WantManifest(0, 0), Work(b"x"), Bye(b""), HeartbeatNews(b""),
        RosterNews(b""), ManifestNews(b""), LacksChunk(0, 0, 0, 0), Lacks(0),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_messages_before_hello_are_refused(message: Message) -> None:
    core = members(an_authority(), 1)
    connect_peer(core, 7, 5.0)
    effects = say(core, 7, message, 5.0)
    assert [(c.peer, c.ban_s > 0) for c in only(effects, Close)] == [(key_of(7).public, True)]
    assert [e for e in effects if not isinstance(e, Close)] == []


@pytest.mark.parametrize("message", [Welcome(b"", b"", b"", b""), Refused("a", "b"), Lacks(1), LacksChunk(0, 0, 0, 0)])
def test_messages_that_no_member_sends_to_an_authority(message: Message) -> None:
    core = members(an_authority(), 1)
    assert only(say(core, 0, message, 5.0), Close)[0].ban_s > 0


def test_hello_with_a_good_grant_brings_what_is_new() -> None:
    core = members(an_authority(), 1)
    effects = reconnect(core, 0, core.book.leases[0].sealed)
    assert [type(m) for m in sends(effects, Message, to=0)] == [Hello, RosterStep, HeartbeatNews]


@pytest.mark.parametrize(
    "shown", [grant(0, key_of(0).public, key=key_of("mallory")), grant(0, key_of(1).public)], ids=["forged", "stolen"]
)
def test_hello_with_a_grant_that_is_not_its_own(shown: bytes) -> None:
    core = members(an_authority(), 2)
    effects = reconnect(core, 0, shown)
    assert only(effects, Close)[0].ban_s > 0
    assert not core.state.sessions.ready(key_of(0).public)


@pytest.mark.parametrize("shown", [b"", grant(0, key_of(0).public, serial=1)], ids=["none", "an old serial"])
def test_hello_with_a_lease_that_is_over_is_asked_to_join_again(shown: bytes) -> None:
    core = members(an_authority(), 1)
    effects = reconnect(core, 0, shown)
    assert [r.code for r in sends(effects, Refused, to=0)] == ["unknown"]
    assert only(effects, Close) == []
    assert not core.state.sessions.ready(key_of(0).public)


@pytest.mark.parametrize(("over", "kept"), [(False, []), (True, ["ticket", "grant"])])
def test_a_join_request_that_comes_with_a_hello_counts_only_when_the_lease_is_over(over: bool, kept: list[str]) -> None:
    core = members(an_authority(), 1)
    reconnect(core, 0, grant(0, key_of(0).public, serial=1) if over else core.book.leases[0].sealed)
    effects = say(core, 0, join_message(TICKET), 5.0)
    assert [p.name.split("/")[0] for p in only(effects, Persist)] == kept
    assert sends(effects, Message, to=0) == []


def test_a_grant_for_a_slot_that_another_peer_holds_now() -> None:
    """Even if the serial is the same."""
    core = members(an_authority(), 1)
    serial = core.book.leases[0].grant.serial
    connect_peer(core, 1, 5.0)
    effects = say(core, 1, Hello(grant(0, key_of(1).public, serial=serial), 0, 0, 0, 0), 5.0)
    assert len(sends(effects, Refused)) == 1
    assert not core.state.sessions.ready(key_of(1).public)
