"""A member's part of membership: which peers it trusts, its parents, and its reports."""

import random
from itertools import pairwise
from statistics import fmean

import pytest
from member_kit import CHAIN, a_member, dialed, parents, reports_in, tick
from protocol_kit import (
    SWARM,
    TUNING,
    admit,
    grant,
    header,
    heartbeat,
    key_of,
    manifest,
    meet,
    member,
    new_peer,
    only,
    roster,
    say,
    sends,
)  # fmt: skip

from swarm.protocol.core.documents import open_heartbeat, open_report
from swarm.protocol.core.events import Close, Effect, LocalLeave, Notify, PeerDown, PeerUp, PieceStored, Send
from swarm.protocol.core.notices import JoinRefused
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import (  # fmt: skip
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
    Pong,
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
from swarm.protocol.member import Peer
from swarm.protocol.membership.lease import Standing
from swarm.protocol.membership.membership import DOUBT_S
from swarm.protocol.membership.session import Sessions
from swarm.protocol.transfer.sources import block_sources

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


def test_a_refusal_is_reported_and_not_repeated_at_once() -> None:
    peer = new_peer(0)
    peer.apply(PeerUp(SWARM, True), 0.0)
    effects = say(peer, SWARM, Refused("ticket", "expired"))
    assert [e.notice for e in only(effects, Notify)] == [JoinRefused("ticket", "expired")]
    assert sends(tick(peer, 1.0), Join) == []
    assert len(sends(tick(peer, 16 * TUNING.dial_retry_s + 0.1), Join)) == 1


def test_a_refusal_by_a_member_is_ignored() -> None:
    peer = a_member()
    meet(peer, 1)
    say(peer, 1, Refused("unknown", "go away"))
    assert peer.state.grant is not None


def test_a_lease_that_the_authority_does_not_know_is_asked_for_anew() -> None:
    peer = a_member()
    effects = say(peer, SWARM, Refused("unknown", "join again"), 1.0)
    assert peer.state.grant is None
    assert len(sends(effects, Join, to=SWARM)) == 1
    assert sends(tick(peer, 1.1), Join, to=SWARM) == []


def test_an_authority_that_hung_up_with_its_refusal_is_dialed_and_asked_at_once() -> None:
    """It closes the session in which a report came that renews nothing."""
    peer = a_member()
    say(peer, SWARM, Refused("unknown", "join again"), 1.0)
    assert SWARM in dialed(peer.apply(PeerDown(SWARM), 1.1) + tick(peer, 1.2))
    assert len(sends(peer.apply(PeerUp(SWARM, True), 1.3), Join, to=SWARM)) == 1


@pytest.mark.parametrize(("silent_s", "sent"), [(0.9, [Hello]), (1.1, [Hello, Join])])
def test_a_member_that_heard_nothing_for_longer_than_a_lease_asks_to_join_with_its_hello(
    silent_s: float, sent: list[type]
) -> None:
    """`silent_s`: in leases."""
    peer = a_member()
    peer.apply(PeerDown(SWARM), 1.0)
    effects = peer.apply(PeerUp(SWARM, True), silent_s * TUNING.hard_ttl_s)
    assert [type(m) for m in sends(effects, Message, to=SWARM)] == sent


@pytest.mark.parametrize(
    "welcome",
    [
        pytest.param(Welcome(grant(0, key_of(5).public), b"", heartbeat(1), b""), id="a grant for another peer"),
        pytest.param(Welcome(grant(0, key_of(0).public, key=key_of(9)), b"", heartbeat(1), b""), id="a forged grant"),
        pytest.param(Welcome(b"", b"", b"", b""), id="nothing"),
    ],
)
def test_an_invalid_welcome(welcome: Welcome) -> None:
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


def test_neighbours_that_came_before_our_grant_are_greeted_with_it() -> None:
    """Otherwise it would not know us, and would refuse our next message."""
    peer = new_peer(0)
    early = key_of(1).public
    assert sends(peer.apply(PeerUp(early, False), 0.0), Hello) == []
    peer.apply(PeerUp(SWARM, True), 0.0)
    effects = admit(peer, CHAIN)
    assert len(sends(effects, Hello, to=1)) == 1


# ---------------------------------------------------------------- hello


def test_messages_before_hello_are_refused() -> None:
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


def test_a_neighbour_that_greets_before_we_have_a_grant_gets_nothing_before_our_own_hello() -> None:
    """A restarted node is dialed by its old neighbours before the authority has admitted it again. They would ban it
    for ten minutes for any message that comes before its hello."""
    peer, other = new_peer(0), key_of(1).public
    assert not [effect for effect in only(meet(peer, 1), Send) if effect.peer == other]
    sent = [effect.message for effect in only(admit(peer, CHAIN), Send) if effect.peer == other]
    assert isinstance(sent[0], Hello)
    assert Ping(0) in sent


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
    """It was suspended; a minute later it returns with a new grant."""
    peer = a_member()
    say(peer, SWARM, HeartbeatNews(heartbeat(2, live=[0, 2])))
    effects = meet(peer, 1)
    assert [(c.peer, c.ban_s) for c in only(effects, Close)] == [(key_of(1).public, 0.0)]
    assert not peer.state.sessions.ready(key_of(1).public)
    assert say(peer, 1, Attach(0, 0, 0, 1, ())) == []  # sent before it could know, so not punished


def test_a_grant_younger_than_the_heartbeat_is_believed() -> None:
    peer = a_member()
    other = key_of(9).public
    peer.apply(PeerUp(other, False), 0.0)
    say(peer, 9, Hello(grant(200, other, issued=5000.0), 0, 0, 0, 0))
    assert peer.state.sessions.ready(other)


def test_a_neighbour_whose_slot_has_another_holder_is_turned_away() -> None:
    """Its slot has a live lease, but of another peer."""
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


def test_news_goes_to_neighbours_that_are_behind() -> None:
    peer = a_member()
    effects = meet(peer, 2)
    kinds = [type(m) for m in sends(effects, Message, to=2) if not isinstance(m, Ping)]
    assert kinds == [Hello, RosterStep, HeartbeatNews]


def test_a_greeting_names_boot_and_serial() -> None:
    """Serials restart with each boot, so a member that knows the old boot is behind, whatever its serials."""
    peer = a_member()
    other = key_of(2).public
    peer.apply(PeerUp(other, False), 0.0)
    stamp = open_heartbeat(heartbeat(1), SWARM).stamp
    old_boot = Hello(grant(2, other), stamp - 1, stamp - 1, 0, 0)
    kinds = [type(m) for m in sends(say(peer, 2, old_boot), Message) if not isinstance(m, Ping)]
    assert kinds == [RosterStep, HeartbeatNews]
    again = sends(say(peer, 2, Hello(grant(2, other), stamp, stamp, 0, 0)), Message)
    assert [m for m in again if not isinstance(m, Ping)] == []


# ---------------------------------------------------------------- parents


def test_it_dials_and_attaches_to_the_planned_parent() -> None:
    peer = new_peer(0)
    assert dialed(admit(peer, CHAIN)) == {key_of(1).public}
    effects = meet(peer, 1)
    assert [m.stripe for m in sends(effects, Attach, to=1)] == [0]
    assert parents(peer) == {0: key_of(1).public}


def test_a_dial_that_fails_leads_to_a_failover_parent() -> None:
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


def test_a_lost_slot_is_not_lost_for_its_next_holder() -> None:
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


def test_a_failover_parent_without_reason_to_send_is_not_a_silent_parent() -> None:
    """It was connected all the time; its silence counts from our attaching."""
    peer = a_member([(1, 2, -1, -1)])
    meet(peer, 1)
    meet(peer, 2)
    for beat in range(2, 12):
        say(peer, 1, HeartbeatNews(heartbeat(beat)), (beat - 1) * TUNING.heartbeat_s)
    at = 10 * TUNING.heartbeat_s
    peer.apply(PeerDown(key_of(1).public), at)
    assert parents(peer) == {0: key_of(2).public}
    assert only(tick(peer, at + 0.1), Close) == []
    assert parents(peer) == {0: key_of(2).public}
    meet(peer, 3, at)
    effects: list[Effect] = []
    for beat in range(12, 17):
        say(peer, 3, HeartbeatNews(heartbeat(beat)), (beat - 1) * TUNING.heartbeat_s)
        effects += tick(peer, (beat - 1) * TUNING.heartbeat_s + 0.1)
    assert {c.peer for c in only(effects, Close)} == {key_of(2).public}


def expecting_chunks() -> Peer:
    """A chunk of version 1 has begun to come from slot 1, our parent; slot 2 is connected too."""
    peer = a_member()
    meet(peer, 2)
    meet(peer, 1)
    say(peer, 1, Pong(0), 0.1)
    say(peer, 2, Pong(0), 0.1)
    peer.apply(header(1, 0, peer=key_of(1).public), 1.0)
    return peer


def ticks(peer: Peer, begin: float, end: float) -> list[Effect]:
    return [e for n in range(round((end - begin) / TUNING.tick_s)) for e in tick(peer, begin + n * TUNING.tick_s)]


def test_a_parent_that_is_stuck_is_asked_and_then_replaced_until_it_answers() -> None:
    peer = expecting_chunks()
    assert only(ticks(peer, 1.0, 1.0 + DOUBT_S), Close) == []
    assert parents(peer) == {0: key_of(1).public}
    effects = ticks(peer, 1.0 + DOUBT_S, 2.5 + 2 * DOUBT_S)
    assert len(sends(effects, Ping, to=1)) == 1
    assert parents(peer) == {0: key_of(2).public}
    assert len(sends(effects, Detach, to=1)) == 1
    assert only(effects, Close) == []
    assert key_of(1).public not in block_sources(peer.state)
    say(peer, 1, Pong(0), 4.0)
    assert parents(peer) == {0: key_of(1).public}


def test_a_source_that_does_not_answer_is_replaced_by_the_next() -> None:
    peer = expecting_chunks()
    meet(peer, 3)
    say(peer, 3, Pong(0), 0.2)
    now, asked = 1.0, list[tuple[float, bytes]]()
    while now < 8.0 and len(asked) < 2:
        say(peer, 1, Pong(0), now)  # its parent answers, but sends nothing
        effects = tick(peer, now)
        asked += [(now, e.peer) for e in only(effects, Send) if isinstance(e.message, WantChunk)]
        now += TUNING.tick_s
    (first_at, first), (second_at, second) = asked
    assert first != second
    assert second_at - first_at < 2 * DOUBT_S + 4 * TUNING.tick_s < TUNING.pull_deadline_s
    assert first not in block_sources(peer.state)


def test_a_parent_that_answers_or_owes_nothing_is_not_stuck() -> None:
    peer = expecting_chunks()
    for n in range(12):
        tick(peer, 1.0 + n * TUNING.tick_s)
        say(peer, 1, Pong(0), 1.1 + n * TUNING.tick_s)
    assert parents(peer) == {0: key_of(1).public}
    idle = a_member()
    meet(idle, 2)
    meet(idle, 1)
    ticks(idle, 1.0, 4.0)
    assert parents(idle) == {0: key_of(1).public}


def test_nobody_is_asked_while_the_trainer_pauses() -> None:
    peer = expecting_chunks()
    for index in range(4):
        peer.apply(PieceStored(key_of(1).public, 0, header(1, 0).key, index, 1000), 1.0)
    ticks(peer, 1.0, 1.0 + 2 * DOUBT_S)
    assert sends(ticks(peer, 1.1 + 2 * DOUBT_S, 6.0), Ping, to=1) == []
    assert parents(peer) == {0: key_of(1).public}


def test_nobody_is_silent_while_the_authority_is() -> None:
    peer = a_member()
    meet(peer, 1)
    assert only(tick(peer, 30.0), Close) == []


def test_the_authority_is_the_parent_when_all_others_are_gone() -> None:
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


@pytest.mark.parametrize(("members", "longest_s"), [(6, 0.5), (12, 0.6), (200, 10.0), (10_000, 32.0)])
def test_the_authority_is_dialed_again_sooner_in_a_small_swarm(members: int, longest_s: float) -> None:
    """All members together dial it `returns_s` times a second, but each waits no longer than for another peer."""
    tuning = Tuning.wan()
    sessions, now, pauses = Sessions(tuning, random.Random(1), Outbox()), 0.0, []
    sessions.limit_back_off(SWARM, members / tuning.returns_s)
    for _ in range(50):
        sessions.reach(SWARM, ("/sim/0",), now)
        sessions.down(SWARM, True, now)
        pauses.append(sessions._attempts[SWARM].next_at - now)
        now += pauses[-1]
    assert min(pauses) >= 0.75 * min(longest_s, tuning.dial_retry_s)
    assert 0.9 * longest_s <= fmean(pauses[10:]) <= 1.1 * longest_s
    assert max(pauses) <= 1.25 * longest_s


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.0, 0.6), (0.2, 0.4), (5.0, 0.0)])
def test_the_pause_between_dials_to_the_authority_counts_from_the_beginning(took_s: float, pause_s: float) -> None:
    """A cut network is noticed by a dial that is on its way, and by none that is not made yet."""
    tuning, now = Tuning.wan(), 0.0
    sessions = Sessions(tuning, random.Random(1), Outbox())
    sessions.limit_back_off(SWARM, 0.6)
    for _ in range(50):
        pauses = []
        for peer in (SWARM, key_of(1).public):
            sessions.reach(peer, ("/sim/0",), now)
            sessions.down(peer, True, now + took_s)
            pauses.append(sessions._attempts[peer].next_at - (now + took_s))
        assert pause_s - 0.15 <= pauses[0] <= pause_s + 0.15
        assert pauses[1] >= 0.75 * tuning.dial_retry_s, "to a member, from the end"
        now = max(attempt.next_at for attempt in sessions._attempts.values())


def test_a_member_knows_from_its_roster_how_often_to_dial_the_authority() -> None:
    peer, now, pauses = a_member(), 0.0, []
    peer.apply(PeerDown(SWARM), now)
    for _ in range(10):
        peer.state.sessions.reach(SWARM, ("/sim/0",), now)
        peer.apply(PeerDown(SWARM, dial_failed=True), now)
        pauses.append(peer.state.sessions._attempts[SWARM].next_at - now)
        now += pauses[-1]
    assert max(pauses) <= 1.25 * TUNING.dial_retry_s


def test_a_heartbeat_after_a_silence_ends_the_back_off() -> None:
    """A member that was cut off hears a heartbeat again: it waits for no failed dial any longer."""
    peer, now = a_member(), 0.0
    effects = peer.apply(PeerDown(SWARM), now) + peer.apply(PeerDown(key_of(1).public, dial_failed=True), now)
    while now < 200.0:  # every dial fails
        effects += tick(peer, now)
        while gone := dialed(effects):
            effects = [effect for each in gone for effect in peer.apply(PeerDown(each, dial_failed=True), now)]
        now += 0.25
    meet(peer, 2, now=now)
    assert key_of(1).public not in dialed(tick(peer, now + 0.1))
    effects = say(peer, 2, HeartbeatNews(heartbeat(5)), now + 0.2) + tick(peer, now + 0.3)
    assert key_of(1).public in dialed(effects), "its planned parent"


def test_those_who_were_cut_off_return_to_the_authority_by_turns() -> None:
    first: list[float] = []
    for seed in range(20):
        sessions = Sessions(TUNING, random.Random(seed), Outbox())
        for _ in range(6):
            sessions.reach(SWARM, ("/sim/0",), 0.0)
            sessions.down(SWARM, True, 99.0)
        sessions.retry(100.0, {SWARM: 3.0})
        assert not sessions.failing(SWARM, 100.0)
        first.append(next(tenth for tenth in range(200) if _dials(sessions, 100.0 + tenth / 10)) / 10)
    assert max(first) <= 3.1
    assert max(first) - min(first) > 2.0


def _dials(sessions: Sessions, now: float) -> bool:
    sessions.reach(SWARM, ("/sim/0",), now)
    return sessions._attempts[SWARM].dialing


def test_a_session_that_never_becomes_ready_counts_as_a_failed_dial() -> None:
    """Otherwise two peers that refuse each other would dial and hang up all day."""
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


def test_a_forged_roster_expels_its_sender_and_moves_no_member() -> None:
    peer = a_member()
    meet(peer, 1)
    forged = roster([(2, -1, -1)], [member(s) for s in range(3)], serial=9, key=key_of("mallory"))
    assert only(say(peer, 1, RosterNews(forged)), Close)[0].ban_s > 0
    assert parents(peer) == {0: key_of(1).public}


# ---------------------------------------------------------------- leaving


def test_leaving_tells_all_neighbours_and_attaches_to_none() -> None:
    peer = a_member()
    meet(peer, 1)
    effects = peer.apply(LocalLeave(), 1.0)
    for to in (SWARM, 1):
        (bye,) = sends(effects, Bye, to=to)
        assert open_report(bye.release, SWARM).leaving
    effects = peer.apply(PeerDown(key_of(1).public), 1.1) + tick(peer, 1.2) + meet(peer, 2, 1.3)
    assert dialed(effects) == set()
    assert sends(effects, Attach) == []


def test_a_mute_session_is_closed() -> None:
    peer = a_member()
    peer.apply(PeerUp(key_of(7).public, False), 1.0)
    assert only(tick(peer, TUNING.hello_deadline_s), Close) == []
    assert [c.peer for c in only(tick(peer, 1.1 + TUNING.hello_deadline_s), Close)] == [key_of(7).public]


def test_messages_of_a_session_that_is_gone_are_not_heard() -> None:
    peer = a_member()
    assert say(peer, 5, Attach(0, 0, 0, 1, ())) == []
    assert peer.state.exchange.children == {}
