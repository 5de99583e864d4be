"""A member's place: whom it believes, on whom it hangs, what it says of itself."""

from itertools import pairwise

import pytest
from protocol_kit import (
    SWARM,
    TUNING,
    admit,
    grant,
    heartbeat,
    key_of,
    manifest,
    meet,
    member,
    new_peer,
    only,
    report,
    roster,
    say,
    sends,
)  # fmt: skip

from swarm.protocol.documents import heartbeat_hash, open_heartbeat, open_report, seal
from swarm.protocol.events import Close, Dial, Effect, LocalLeave, PeerDown, PeerUp, Timer
from swarm.protocol.lease import Standing
from swarm.protocol.peer import Peer
from swarm.protocol.renewals import REPORTS_A_MESSAGE
from swarm.protocol.wire import (
    Attach,
    Bye,
    Credit,
    Detach,
    HeartbeatNews,
    Hello,
    Join,
    ManifestNews,
    Message,
    Ping,
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
)  # fmt: skip

CHAIN = ((1, 2, -1),)
"""One stripe: we (slot 0) hang on 1, 1 on 2, 2 on the authority."""


def a_member(parents=CHAIN, **more) -> Peer:
    peer = new_peer(0)
    admit(peer, parents, **more)
    return peer


def tick(peer: Peer, now: float) -> list[Effect]:
    return peer.apply(Timer("tick"), now)


def parents(peer: Peer) -> dict[int, bytes]:
    return {stripe: edge.peer for stripe, edge in peer.state.exchange.parents.items()}


def dialed(effects: list[Effect]) -> set[bytes]:
    return {e.peer for e in only(effects, Dial)}


def reports_in(effects: list[Effect]) -> list:
    return [open_report(sealed, SWARM) for message in sends(effects, Reports) for sealed in message.reports]


# ---------------------------------------------------------------- joining


def test_a_newcomer_dials_the_authority_asks_and_is_let_in() -> None:
    peer = new_peer(0)
    effects = peer.apply(PeerUp(SWARM, True), 0.0)
    assert [type(m) for m in sends(effects, Message, to=SWARM)] == [Join]
    admit(peer)
    assert peer.standing(0.0) is Standing.FRESH


def test_a_welcome_that_does_not_come_is_asked_for_again() -> None:
    peer = new_peer(0)
    peer.apply(PeerUp(SWARM, True), 0.0)
    assert sends(tick(peer, TUNING.hello_deadline_s - 0.1), Join) == []
    assert len(sends(tick(peer, TUNING.hello_deadline_s + 0.1), Join)) == 1


def test_a_refusal_is_told_and_not_argued_with() -> None:
    peer = new_peer(0)
    peer.apply(PeerUp(SWARM, True), 0.0)
    effects = say(peer, SWARM, Refused("ticket", "expired"))
    assert [e.info for e in effects if getattr(e, "what", "") == "refused"] == [{"code": "ticket", "why": "expired"}]
    assert sends(tick(peer, 1.0), Join) == []
    assert len(sends(tick(peer, 16 * TUNING.dial_retry_s + 0.1), Join)) == 1


def test_a_refusal_by_a_member_is_nothing() -> None:
    peer = a_member()
    meet(peer, 1)
    say(peer, 1, Refused("unknown", "go away"))
    assert peer.state.grant is not None


def test_a_lease_that_the_authority_does_not_know_is_asked_for_anew() -> None:
    peer = a_member()
    say(peer, SWARM, Refused("unknown", "join again"), 1.0)
    assert peer.state.grant is None
    assert len(sends(tick(peer, 1.1), Join, to=SWARM)) == 1


@pytest.mark.parametrize(
    "welcome",
    [
        pytest.param(Welcome(grant(0, key_of(5).public), b"", heartbeat(1), b""), id="a grant for somebody else"),
        pytest.param(Welcome(grant(0, key_of(0).public, key=key_of(9)), b"", heartbeat(1), b""), id="a forged grant"),
        pytest.param(Welcome(b"", b"", b"", b""), id="nothing"),
    ],
)
def test_a_welcome_that_is_none(welcome: Welcome) -> None:
    peer = new_peer(0)
    peer.apply(PeerUp(SWARM, True), 0.0)
    effects = say(peer, SWARM, welcome)
    assert peer.state.grant is None
    assert [(c.peer, c.ban_s) for c in only(effects, Close)] == [(SWARM, 0.0)]


def test_a_welcome_from_a_member_is_none() -> None:
    peer = new_peer(0)
    peer.apply(PeerUp(key_of(1).public, False), 0.0)
    effects = say(
        peer, 1, Welcome(grant(0, key_of(0).public), roster(CHAIN, [member(s) for s in range(3)]), heartbeat(1), b"")
    )
    assert peer.state.grant is None
    assert only(effects, Close)[0].ban_s > 0


def test_who_came_before_our_grant_is_greeted_when_we_have_it() -> None:
    """Else it would never hear who we are, and refuse what we say next."""
    peer = new_peer(0)
    early = key_of(1).public
    assert sends(peer.apply(PeerUp(early, False), 0.0), Hello) == []
    peer.apply(PeerUp(SWARM, True), 0.0)
    effects = admit(peer, CHAIN)
    assert len(sends(effects, Hello, to=1)) == 1


# ---------------------------------------------------------------- hello


def test_before_hello_nothing_is_heard() -> None:
    everything = [
        Attach(0, 0, 0, 1, ()), Detach(0), Credit(0, 1), WantChunk(0, 1, 0, 0, b""), WantBlob(1, 1, bytes(32), 0),
        WantBlock(1, 0), WantManifest(0, 0), HeartbeatNews(heartbeat(2)), RosterNews(b""), ManifestNews(manifest(1, 0)),
        Reports(0, ()), Work(b""), Bye(b""),
    ]  # fmt: skip
    for message in everything:
        peer = a_member()
        peer.apply(PeerUp(key_of(1).public, False), 0.0)
        effects = say(peer, 1, message)
        assert [(type(e), e.peer) for e in effects] == [(Close, key_of(1).public)], message
        assert peer.state.exchange.children == {}


@pytest.mark.parametrize(
    "shown",
    [b"", grant(1, key_of(1).public, key=key_of(9)), grant(2, key_of(2).public)],
    ids=["none", "forged", "stolen"],
)
def test_hello_with_a_grant_that_is_not_its_own(shown: bytes) -> None:
    peer = a_member()
    peer.apply(PeerUp(key_of(1).public, False), 0.0)
    effects = say(peer, 1, Hello(shown, 0, 0, 0, 0))
    assert [c.ban_s > 0 for c in only(effects, Close)] == [True]
    assert not peer.state.sessions.ready(key_of(1).public)


def test_hello_with_a_lease_that_is_over_is_turned_away_but_not_banned() -> None:
    """It slept; a minute later it will be back with a new one."""
    peer = a_member()
    say(peer, SWARM, HeartbeatNews(heartbeat(2, live=[0, 2])))
    effects = meet(peer, 1)
    assert [(c.peer, c.ban_s) for c in only(effects, Close)] == [(key_of(1).public, 0.0)]
    assert not peer.state.sessions.ready(key_of(1).public)
    assert say(peer, 1, Attach(0, 0, 0, 1, ())) == []  # sent before it could know: not held against it


def test_a_grant_younger_than_the_heartbeat_is_believed() -> None:
    peer = a_member()
    other = key_of(9).public
    peer.apply(PeerUp(other, False), 0.0)
    say(peer, 9, Hello(grant(200, other, issued=5000.0), 0, 0, 0, 0))
    assert peer.state.sessions.ready(other)


def test_whose_slot_is_anothers_by_now_is_turned_away() -> None:
    """Its slot lives, but not for it."""
    peer = a_member()
    ghost = key_of("ghost").public
    peer.apply(PeerUp(ghost, False), 0.0)
    say(peer, ghost, Hello(grant(1, ghost), 0, 0, 0, 0))
    assert not peer.state.sessions.ready(ghost)
    meet(peer, 1)
    assert peer.state.sessions.ready(key_of(1).public)


def test_a_lease_that_ends_ends_the_session() -> None:
    peer = a_member()
    meet(peer, 1)
    meet(peer, 2)
    effects = say(peer, SWARM, HeartbeatNews(heartbeat(2, live=[0, 2])))
    assert [c.peer for c in only(effects, Close)] == [key_of(1).public]


def test_a_slot_that_is_leased_to_another_ends_the_session_of_the_old_holder() -> None:
    peer = a_member()
    meet(peer, 1)
    others = [member(0), member(1, peer=key_of("new").public), member(2)]
    say(peer, SWARM, RosterNews(roster(CHAIN, others, serial=2)))
    effects = say(peer, SWARM, HeartbeatNews(heartbeat(2, roster=2)))
    assert [c.peer for c in only(effects, Close)] == [key_of(1).public]


def test_news_goes_to_whoever_is_behind() -> None:
    peer = a_member()
    effects = meet(peer, 2)
    said = [type(m) for m in sends(effects, Message, to=2) if not isinstance(m, Ping)]
    assert said == [Hello, RosterStep, HeartbeatNews]


def test_a_greeting_names_boot_and_serial() -> None:
    """After a restart serials begin anew: one who heard the old boot is behind, however large its serials were."""
    peer = a_member()
    other = key_of(2).public
    peer.apply(PeerUp(other, False), 0.0)
    stamp = open_heartbeat(heartbeat(1), SWARM).stamp
    old_boot = Hello(grant(2, other), stamp - 1, stamp - 1, 0, 0)
    said = [type(m) for m in sends(say(peer, 2, old_boot), Message) if not isinstance(m, Ping)]
    assert said == [RosterStep, HeartbeatNews]
    again = sends(say(peer, 2, Hello(grant(2, other), stamp, stamp, 0, 0)), Message)
    assert [m for m in again if not isinstance(m, Ping)] == []


# ---------------------------------------------------------------- parents


def test_it_dials_and_hangs_on_the_planned_parent() -> None:
    peer = new_peer(0)
    assert dialed(admit(peer, CHAIN)) == {key_of(1).public}
    effects = meet(peer, 1)
    assert [m.stripe for m in sends(effects, Attach, to=1)] == [0]
    assert parents(peer) == {0: key_of(1).public}


def test_a_dial_that_fails_leads_to_a_backup() -> None:
    peer = a_member()
    effects = peer.apply(PeerDown(key_of(1).public, dial_failed=True), 0.1)
    assert dialed(effects) == {key_of(2).public}
    meet(peer, 2, 0.2)
    assert parents(peer) == {0: key_of(2).public}


def test_a_lost_parent_is_replaced_at_once_and_reported() -> None:
    peer = a_member()
    meet(peer, 2)
    meet(peer, 1)
    effects = peer.apply(PeerDown(key_of(1).public), 1.0)
    assert len(sends(effects, Attach, to=2)) == 1
    effects = say(peer, SWARM, HeartbeatNews(heartbeat(2)), 1.1) + tick(peer, 1.2)
    assert [r.lost for r in reports_in(effects)] == [(1,)]


def test_a_parent_that_comes_back_is_taken_back() -> None:
    peer = a_member()
    meet(peer, 2)
    meet(peer, 1)
    peer.apply(PeerDown(key_of(1).public), 1.0)
    assert parents(peer) == {0: key_of(2).public}
    effects = meet(peer, 1, 2.0)
    assert parents(peer) == {0: key_of(1).public}
    assert len(sends(effects, Detach, to=2)) == 1


def test_what_is_known_of_a_lost_slot_does_not_stick_to_its_next_holder() -> None:
    peer = a_member()
    meet(peer, 2)
    meet(peer, 1)
    peer.apply(PeerDown(key_of(1).public), 1.0)
    new = key_of("new")
    say(peer, SWARM, RosterNews(roster(CHAIN, [member(0), member(1, peer=new.public), member(2)], serial=2)), 1.1)
    meet(peer, 1, 1.2, key=new)
    assert parents(peer) == {0: new.public}


def test_a_parent_that_is_silent_while_others_are_not() -> None:
    peer = a_member()
    meet(peer, 1)
    meet(peer, 2)
    effects: list[Effect] = []
    for beat in range(2, 6):
        now = (beat - 1) * TUNING.heartbeat_s
        say(peer, 2, HeartbeatNews(heartbeat(beat)), now)
        effects += tick(peer, now + 0.1)
    assert [c.peer for c in only(effects, Close)] == [key_of(1).public]


def test_nobody_is_silent_while_the_authority_is() -> None:
    peer = a_member()
    meet(peer, 1)
    assert only(tick(peer, 30.0), Close) == []


def test_everyone_gone_the_authority_is_the_last_parent() -> None:
    peer = a_member()
    peer.apply(PeerDown(key_of(1).public, dial_failed=True), 0.1)
    peer.apply(PeerDown(key_of(2).public, dial_failed=True), 0.1)
    say(peer, SWARM, Hello(b"", 0, 0, 0, 0), 0.1)
    assert parents(peer) == {0: SWARM}


def test_a_failed_dial_is_tried_again_later_with_growing_pauses() -> None:
    peer = a_member([(1, -1)])
    say(peer, SWARM, Hello(b"", 0, 0, 0, 0))
    tries, now = [], 0.0
    peer.apply(PeerDown(key_of(1).public, dial_failed=True), now)
    while now < 20:
        now += 0.1
        if key_of(1).public in dialed(tick(peer, now)):
            tries.append(now)
            peer.apply(PeerDown(key_of(1).public, dial_failed=True), now)
    pauses = [b - a for a, b in pairwise(tries)]
    assert len(tries) >= 5
    assert max(pauses) <= 16 * TUNING.dial_retry_s * 1.25 + 0.2
    assert pauses[-1] > 3 * pauses[0]


def test_a_session_that_comes_to_nothing_counts_as_a_failed_dial() -> None:
    """Else two who will not have one another would dial and hang up all day."""
    peer = a_member([(1, -1)])
    attempts = 0
    for tenth in range(100):
        if dialed(tick(peer, tenth / 10)) or tenth == 0:
            attempts += 1
            peer.apply(PeerUp(key_of(1).public, True), tenth / 10)
            peer.apply(PeerDown(key_of(1).public), tenth / 10)
    assert 3 <= attempts <= 12


def test_two_that_cannot_be_dialed_do_not_wait_for_one_another() -> None:
    members = [member(0, dialable=False), member(1, dialable=False), member(2)]
    peer = a_member(members=members)
    meet(peer, 2)
    assert parents(peer) == {0: key_of(2).public}


def test_a_parent_that_cannot_be_dialed_dials_its_children() -> None:
    peer = new_peer(0)
    effects = admit(peer, [(-1, 0, 0)], members=[member(0, dialable=False), member(1), member(2, dialable=False)])
    assert dialed(effects) == {key_of(1).public}


def test_a_newer_roster_moves_it() -> None:
    peer = a_member()
    meet(peer, 1)
    meet(peer, 2)
    everyone = [member(s) for s in range(3)]
    say(peer, 1, RosterNews(roster([(2, 2, -1)], everyone, serial=2)))
    assert parents(peer) == {0: key_of(2).public}
    for old in (roster([(1, 2, -1)], everyone, serial=1), roster([(1, 2, -1)], everyone, serial=2)):
        say(peer, 1, RosterNews(old))
        assert parents(peer) == {0: key_of(2).public}
    say(peer, 1, RosterNews(roster([(1, 2, -1)], everyone, serial=1, boot=2)))
    assert parents(peer) == {0: key_of(1).public}


def test_a_forged_roster_expels_its_bearer_and_moves_nobody() -> None:
    peer = a_member()
    meet(peer, 1)
    forged = roster([(2, -1, -1)], [member(s) for s in range(3)], serial=9, key=key_of("mallory"))
    assert only(say(peer, 1, RosterNews(forged)), Close)[0].ban_s > 0
    assert parents(peer) == {0: key_of(1).public}


# ---------------------------------------------------------------- heartbeats and reports


def test_a_heartbeat_goes_on_to_every_child_once_and_is_answered() -> None:
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


def test_a_forged_heartbeat_expels_its_bearer() -> None:
    peer = a_member()
    meet(peer, 1)
    effects = say(peer, 1, HeartbeatNews(heartbeat(2, live=[], key=key_of("mallory"))))
    assert only(effects, Close)[0].ban_s > 0
    assert peer.standing(0.0) is Standing.FRESH


def test_reports_climb_two_trees_that_rotate() -> None:
    everyone = [member(s) for s in range(5)]
    peer = a_member([(1, -1, 1, 1, 1), (2, 2, -1, 2, 2), (3, 3, 3, -1, 3), (4, 4, 4, 4, -1)], members=everyone)
    for slot in range(1, 5):
        meet(peer, slot)
    tick(peer, 0.1)
    ways = []
    for beat in range(2, 6):
        say(peer, 1, HeartbeatNews(heartbeat(beat)), beat / 10)
        effects = tick(peer, beat / 10 + 0.05)
        ways.append({slot for slot in range(1, 5) if sends(effects, Reports, to=slot)})
    assert [len(way) for way in ways] == [2, 2, 2, 2]
    assert set().union(*ways) == {1, 2, 3, 4}


def climbed(peer: Peer, sealed: bytes, now: float = 1.0, stripe: int = 0) -> list:
    say(peer, 2, Reports(stripe, (sealed,)), now)
    return [r for r in reports_in(tick(peer, now + 0.05)) if r.slot != 0]


def a_report(slot: int = 2, counter: int = 1, **more) -> bytes:
    key = more.pop("key", key_of(slot))
    return seal(report(slot, bytes(32), counter, key=key, **more), key)


def a_forwarder() -> Peer:
    peer = a_member()
    meet(peer, 1)
    meet(peer, 2)
    tick(peer, 0.5)
    return peer


def test_a_childs_report_climbs_once() -> None:
    peer = a_forwarder()
    assert len(climbed(peer, a_report())) == 1
    assert climbed(peer, a_report(), 1.1) == []
    assert len(climbed(peer, a_report(counter=2), 1.2)) == 1
    assert climbed(peer, a_report(counter=1), 1.3) == []


def test_a_report_of_a_new_grant_begins_counting_anew() -> None:
    """Its relays remember the counter of the old grant."""
    peer = a_forwarder()
    assert len(climbed(peer, a_report(counter=500))) == 1
    assert len(climbed(peer, a_report(counter=1, serial=2), 1.1)) == 1
    assert climbed(peer, a_report(counter=501), 1.2) == []


def test_a_forged_report_expels_and_a_strangers_is_dropped() -> None:
    peer = a_forwarder()
    assert climbed(peer, a_report(key=key_of("mallory"), counter=1 << 60)) == []
    assert len(climbed(peer, a_report(), 1.1)) == 1  # the stranger's huge counter stands in nobody's way
    forged = seal(report(1, bytes(32), 1), key_of("mallory"))
    assert only(say(peer, 2, Reports(0, (forged,)), 1.2), Close)[0].ban_s > 0


@pytest.mark.parametrize(("slot", "stripe"), [(900, 0), (2, 63)])
def test_reports_of_no_slot_or_stripe_cost_no_memory(slot: int, stripe: int) -> None:
    peer = a_forwarder()
    before = dict(peer.membership.renewals._climbed)
    for counter in range(1, 20):
        assert climbed(peer, a_report(slot, counter), 1.0 + counter, stripe) == []
    assert peer.membership.renewals._climbed == before


def test_many_reports_are_split_into_messages_that_may_be_read() -> None:
    count = 2 * REPORTS_A_MESSAGE + 5
    keys = [key_of(slot) for slot in range(count)]
    everyone = [member(slot, peer=keys[slot].public) for slot in range(count)]
    peer = new_peer(0)
    admit(peer, [(-1, *[0] * (count - 1))], members=everyone)
    say(peer, SWARM, Hello(b"", 1 << 40, 1 << 40, 0, 0))
    tick(peer, 0.5)
    meet(peer, 1)
    sealed = tuple(a_report(slot, key=keys[slot]) for slot in range(1, count))
    say(peer, 1, Reports(0, sealed), 1.0)
    messages = sends(tick(peer, 1.1), Reports)
    assert [len(m.reports) for m in messages] == [REPORTS_A_MESSAGE, REPORTS_A_MESSAGE, 4]


def test_one_that_is_late_talks_to_the_authority_itself() -> None:
    peer = a_member()
    meet(peer, 1)
    say(peer, 1, HeartbeatNews(heartbeat(2, fresh=[1, 2])), 12.0)
    say(peer, SWARM, Hello(b"", 1 << 40, 1 << 40, 0, 0), 12.0)
    effects = tick(peer, 12.1)
    assert [r.slot for m in sends(effects, Reports, to=SWARM) for r in [open_report(m.reports[0], SWARM)]] == [0]
    assert sends(tick(peer, 12.2), Reports, to=SWARM) == []


def test_a_silent_authority_is_looked_for_at_once_by_those_that_hang_on_it() -> None:
    head = a_member([(-1, 0, 0)], members=[member(0, peer=key_of(0).public), member(1), member(2)])
    effects = head.apply(PeerDown(SWARM), 1.0) + tick(head, 1.1 + 2 * TUNING.heartbeat_s)
    assert SWARM in dialed(effects)


def test_the_others_wait_their_turn() -> None:
    """Ten thousand that hear nothing do not come together: so many a second, whoever they are."""
    everyone = [member(s, peer=s.to_bytes(32, "big")) for s in range(1, 4000)]
    came: list[float] = []
    for slot in range(4000, 4040):
        peer = new_peer(slot)
        me = member(slot, peer=peer.state.key.public)
        parents = (-1, *(1 for _ in everyone))
        admit(peer, [parents], members=[*everyone, me], slot=slot)
        say(peer, SWARM, HeartbeatNews(heartbeat(2, live=range(5000))), 0.1)
        peer.apply(PeerDown(SWARM), 1.0)
        now = 1.0
        while SWARM not in dialed(tick(peer, now)):
            now += 1.0
        came.append(now)
    assert max(came) < 4000 / TUNING.returns_s + 5
    assert sum(at < 20 for at in came) < 10


def test_one_that_was_let_go_comes_back_later_for_work() -> None:
    peer = a_member()
    meet(peer, 1)
    peer.membership.renewals.account.engine = "numpy"
    effects = say(peer, SWARM, Bye(b""), 1.0)
    assert [c.peer for c in only(effects, Close)] == [SWARM]
    peer.apply(PeerDown(SWARM), 1.1)
    came = None
    for tenth in range(11, 200):
        say(peer, 1, HeartbeatNews(heartbeat(tenth)), tenth / 10)
        if SWARM in dialed(tick(peer, tenth / 10)):
            came = tenth / 10
            break
    rest_s = TUNING.rest_beats * TUNING.heartbeat_s
    assert came is not None
    assert 1.0 + rest_s / 2 <= came <= 1.2 + 1.5 * rest_s


# ---------------------------------------------------------------- leaving


def test_leaving_tells_everybody_and_hangs_on_nobody_anew() -> None:
    peer = a_member()
    meet(peer, 1)
    effects = peer.apply(LocalLeave(), 1.0)
    for to in (SWARM, 1):
        (bye,) = sends(effects, Bye, to=to)
        assert open_report(bye.release, SWARM).leaving
    effects = peer.apply(PeerDown(key_of(1).public), 1.1) + tick(peer, 1.2) + meet(peer, 2, 1.3)
    assert dialed(effects) == set()
    assert sends(effects, Attach) == []


def test_a_neighbours_farewell_climbs() -> None:
    peer = a_forwarder()
    effects = say(peer, 2, Bye(a_report(leaving=True)), 1.0)
    assert [c.peer for c in only(effects, Close)] == [key_of(2).public]
    assert [r.leaving for r in reports_in(tick(peer, 1.1)) if r.slot == 2] == [True]


@pytest.mark.parametrize(
    "release", [a_report(slot=1, leaving=True), a_report(leaving=False)], ids=["anothers", "no leave"]
)
def test_a_farewell_that_is_none(release: bytes) -> None:
    peer = a_forwarder()
    assert only(say(peer, 2, Bye(release), 1.0), Close)[0].ban_s > 0


def test_a_mute_session_is_closed() -> None:
    peer = a_member()
    peer.apply(PeerUp(key_of(7).public, False), 1.0)
    assert only(tick(peer, TUNING.hello_deadline_s), Close) == []
    assert [c.peer for c in only(tick(peer, 1.1 + TUNING.hello_deadline_s), Close)] == [key_of(7).public]


def test_messages_of_a_session_that_is_gone_are_not_heard() -> None:
    peer = a_member()
    assert say(peer, 5, Attach(0, 0, 0, 1, ())) == []
    assert peer.state.exchange.children == {}
