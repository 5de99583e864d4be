"""Heartbeats down, reports up: what a member forwards, and when it contacts the authority itself."""

from collections.abc import Iterator

import pytest
from member_kit import a_forwarder, a_member, a_report, dialed, reports_in, tick
from protocol_kit import (
    SWARM,
    TUNING,
    admit,
    heartbeat,
    key_of,
    meet,
    member,
    new_peer,
    only,
    report,
    say,
    sends,
)  # fmt: skip

from swarm.protocol.core.documents import heartbeat_hash, open_report, seal
from swarm.protocol.core.events import Close, PeerDown
from swarm.protocol.core.wire import Attach, Bye, HeartbeatNews, Hello, Reports  # fmt: skip
from swarm.protocol.member import Peer
from swarm.protocol.membership.lease import Standing
from swarm.protocol.membership.renewals import REPORTS_A_MESSAGE


def test_a_heartbeat_is_forwarded_to_every_child_once_and_answered() -> None:
    peer = a_member()
    for slot in (1, 2):
        meet(peer, slot)
    for stripe in range(3):
        say(peer, 2, Attach(stripe, 0, 0, 1, ()))
    effects = say(peer, 1, HeartbeatNews(heartbeat(2)), 1.0)
    assert len(sends(effects, HeartbeatNews, to=2)) == 1
    assert sends(say(peer, 2, HeartbeatNews(heartbeat(2)), 1.0), HeartbeatNews) == []
    (mine,) = reports_in(tick(peer, 1.0 + TUNING.report_batch_s))
    assert (mine.slot, mine.heartbeat) == (0, heartbeat_hash(heartbeat(2)))


def test_a_forged_heartbeat_expels_its_sender() -> None:
    peer = a_member()
    meet(peer, 1)
    effects = say(peer, 1, HeartbeatNews(heartbeat(2, live=[], key=key_of("mallory"))))
    assert only(effects, Close)[0].ban_s > 0
    assert peer.standing(0.0) is Standing.FRESH


def test_reports_go_up_two_trees_that_rotate() -> None:
    everyone = [member(s) for s in range(5)]
    peer = a_member([(1, -1, 1, 1, 1), (2, 2, -1, 2, 2), (3, 3, 3, -1, 3), (4, 4, 4, 4, -1)], members=everyone)
    for slot in range(1, 5):
        meet(peer, slot)
    tick(peer, 0.1)
    receivers = []
    for beat in range(2, 6):
        say(peer, 1, HeartbeatNews(heartbeat(beat)), beat / 10)
        effects = tick(peer, beat / 10 + 0.05)
        receivers.append({slot for slot in range(1, 5) if sends(effects, Reports, to=slot)})
    assert [len(slots) for slots in receivers] == [2, 2, 2, 2]
    assert set().union(*receivers) == {1, 2, 3, 4}


def forwarded(peer: Peer, sealed: bytes, now: float = 1.0, stripe: int = 0) -> list:
    say(peer, 2, Reports(stripe, (sealed,)), now)
    return [r for r in reports_in(tick(peer, now + 0.05)) if r.slot != 0]


def test_a_childs_report_is_forwarded_once() -> None:
    peer = a_forwarder()
    assert len(forwarded(peer, a_report())) == 1
    assert forwarded(peer, a_report(), 1.1) == []
    assert len(forwarded(peer, a_report(counter=2), 1.2)) == 1
    assert forwarded(peer, a_report(counter=1), 1.3) == []


def test_the_counter_restarts_with_a_new_grant() -> None:
    """Its relays remember the counter of the old grant."""
    peer = a_forwarder()
    assert len(forwarded(peer, a_report(counter=500))) == 1
    assert len(forwarded(peer, a_report(counter=1, serial=2), 1.1)) == 1
    assert forwarded(peer, a_report(counter=501), 1.2) == []


def test_a_forged_report_expels_and_a_strangers_is_dropped() -> None:
    peer = a_forwarder()
    say(peer, 2, Attach(0, 0, 0, 0, ()))
    assert forwarded(peer, a_report(key=key_of("mallory"), counter=1 << 60)) == []
    assert len(forwarded(peer, a_report(), 1.1)) == 1  # the stranger's huge counter does not block it
    forged = seal(report(1, bytes(32), 1), key_of("mallory"))
    assert only(say(peer, 2, Reports(0, (forged,)), 1.2), Close)[0].ban_s > 0


@pytest.mark.parametrize(("slot", "stripe"), [(900, 0), (2, 63)])
def test_reports_of_no_slot_or_stripe_cost_no_memory(slot: int, stripe: int) -> None:
    peer = a_forwarder()
    before = dict(peer.membership.renewals._queued)
    for counter in range(1, 20):
        assert forwarded(peer, a_report(slot, counter), 1.0 + counter, stripe) == []
    assert peer.membership.renewals._queued == before


def test_many_reports_are_split_into_messages_within_the_limit() -> None:
    count = 2 * REPORTS_A_MESSAGE + 5
    keys = [key_of(slot) for slot in range(count)]
    everyone = [member(slot, peer=keys[slot].public) for slot in range(count)]
    peer = new_peer(0)
    admit(peer, [(-1, *[0] * (count - 1))], members=everyone)
    say(peer, SWARM, Hello(b"", 1 << 40, 1 << 40, 0, 0))
    tick(peer, 0.5)
    meet(peer, 1)
    sealed = tuple(a_report(slot, key=keys[slot]) for slot in range(1, count))
    say(peer, 1, Reports(0, sealed), 0.9)
    assert len(sends(tick(peer, 0.95), Reports)) == 1, (
        "of a neighbour that is not our child, only its own report counts"
    )
    say(peer, 1, Attach(0, 0, 0, 0, ()), 1.0)
    say(peer, 1, Reports(0, sealed), 1.0)
    messages = sends(tick(peer, 1.1), Reports)
    assert [len(m.reports) for m in messages] == [REPORTS_A_MESSAGE, REPORTS_A_MESSAGE, 3], (
        "its own report was forwarded before"
    )


def test_a_member_whose_reports_are_late_contacts_the_authority() -> None:
    peer = a_member()
    meet(peer, 1)
    say(peer, 1, HeartbeatNews(heartbeat(2, fresh=[1, 2])), 12.0)
    say(peer, SWARM, Hello(b"", 1 << 40, 1 << 40, 0, 0), 12.0)
    effects = tick(peer, 12.1)
    assert [r.slot for m in sends(effects, Reports, to=SWARM) for r in [open_report(m.reports[0], SWARM)]] == [0]
    assert sends(tick(peer, 12.2), Reports, to=SWARM) == []


def test_a_silent_authority_is_contacted_at_once_by_its_children() -> None:
    head = a_member([(-1, 0, 0)], members=[member(0, peer=key_of(0).public), member(1), member(2)])
    effects = head.apply(PeerDown(SWARM), 1.0) + tick(head, 1.1 + 2 * TUNING.heartbeat_s)
    assert SWARM in dialed(effects)


def forty_of_thousands() -> Iterator[Peer]:
    """Children of one root child, like 4000 others."""
    everyone = [member(s, peer=s.to_bytes(32, "big")) for s in range(1, 4000)]
    for slot in range(4000, 4040):
        peer = new_peer(slot)
        peer.state.rng.seed(slot)
        me = member(slot, peer=peer.state.key.public)
        admit(peer, [(-1, *(1 for _ in everyone))], members=[*everyone, me], slot=slot)
        yield peer


def test_the_others_wait_their_turn() -> None:
    """Ten thousand members without heartbeat do not connect at once, but at a bounded rate."""
    came: list[float] = []
    for peer in forty_of_thousands():
        say(peer, SWARM, HeartbeatNews(heartbeat(2, live=range(5000))), 0.1)
        peer.apply(PeerDown(SWARM), 1.0)
        now = 1.0
        while SWARM not in dialed(tick(peer, now)):
            now += 1.0
        came.append(now)
    assert max(came) < 4000 / TUNING.returns_s + 5
    assert sum(at < 20 for at in came) < 10


def test_a_member_whose_session_was_surplus_returns_later_for_work() -> None:
    peer = a_member()
    meet(peer, 1)
    peer.membership.renewals.account.engine = "numpy"
    effects = say(peer, SWARM, Bye(b""), 1.0)
    assert [c.peer for c in only(effects, Close)] == [SWARM]
    peer.apply(PeerDown(SWARM), 1.1)
    came = None
    for tenth in range(11, 200):
        say(peer, 1, HeartbeatNews(heartbeat(tenth, time=1000 + tenth / 10)), tenth / 10)
        if SWARM in dialed(tick(peer, tenth / 10)):
            came = tenth / 10
            break
    rest_s = TUNING.rest_beats * TUNING.heartbeat_s
    assert came is not None
    assert 1.0 + rest_s / 2 <= came <= 1.2 + 1.5 * rest_s


# ---------------------------------------------------------------- releases


def test_a_neighbours_farewell_is_forwarded() -> None:
    peer = a_forwarder()
    effects = say(peer, 2, Bye(a_report(leaving=True)), 1.0)
    assert [c.peer for c in only(effects, Close)] == [key_of(2).public]
    assert [r.leaving for r in reports_in(tick(peer, 1.1)) if r.slot == 2] == [True]


@pytest.mark.parametrize(
    "release", [a_report(slot=1, leaving=True), a_report(leaving=False)], ids=["anothers", "no leave"]
)
def test_an_invalid_release(release: bytes) -> None:
    peer = a_forwarder()
    assert only(say(peer, 2, Bye(release), 1.0), Close)[0].ban_s > 0


# ---------------------------------------------------------------- direct contact with the authority


def test_members_whose_reports_do_not_arrive_do_not_come_together() -> None:
    """Four thousand members that lost one root child spread over a part of the time that their leases have left."""
    came: list[float] = []
    for peer in forty_of_thousands():
        peer.apply(PeerDown(SWARM), 0.1)
        now, serial, effects = 1.0, 2, []
        while SWARM not in dialed(effects):
            now, serial = now + 0.1, serial + 1
            peer.membership.heartbeat(heartbeat(serial, live=range(5000), fresh=range(4000)), now)
            effects = tick(peer, now)
        came.append(now)
    spread_s = (TUNING.hard_ttl_s - TUNING.soft_ttl_s) / 3
    assert max(came) < 1.5 + spread_s
    assert max(came) - min(came) > spread_s / 2


def test_a_member_whose_session_was_surplus_returns_at_once_with_news() -> None:
    peer = a_member()
    meet(peer, 1)
    peer.membership.renewals.account.engine = "numpy"
    say(peer, SWARM, Bye(b""), 1.0)
    peer.apply(PeerDown(SWARM), 1.1)
    assert dialed(tick(peer, 1.2)) == set()
    peer.membership.come_back()
    assert SWARM in dialed(tick(peer, 1.3))


def test_reports_of_members_that_are_no_longer_below_us_are_forgotten_after_two_leases() -> None:
    renewals, lease_s = a_forwarder().membership.renewals, TUNING.hard_ttl_s
    renewals._queue_report(0, 2, (1, 5), b"", 1.0)
    renewals._queue_report(0, 1, (1, 5), b"", 1.5 + lease_s)
    renewals._queue_report(0, 2, (1, 5), b"", 1.6 + lease_s)
    assert (0, 2) not in renewals._queued, "it is still known: the same report is not forwarded again"
    renewals._queue_report(0, 1, (1, 6), b"", 2.0 + 2 * lease_s)
    assert (0, 2) not in renewals._queued | renewals._queued_before
    assert (0, 1) in renewals._queued
