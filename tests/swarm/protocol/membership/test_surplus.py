"""Surplus sessions: which a member closes, when, and what neither end concludes from that."""

from dataclasses import replace
from functools import partial

import pytest
from protocol_kit import SWARM, TUNING, admit, heartbeat, key_of, manifest, meet, new_peer, only, say, sends

from scenarios.sim.simulator import Node, World
from swarm.protocol.core.events import Close, Dial, Effect, PeerDown, Timer
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import Attach, Bye, HeartbeatNews, Ping, WantBlock
from swarm.protocol.member import Peer

QUIET_S = 2 * TUNING.request_deadline_s
OTHERS = 12
PARENTS = ((1, -1, 0, *[1] * OTHERS, -1),)
"""Our parent is 1, our child 2. Slots 3 to 14 are nobody's of ours."""
LATER = QUIET_S + OTHERS + 3.0


def a_member() -> Peer:
    peer = new_peer(0)
    admit(peer, PARENTS)
    for slot in range(1, 3 + OTHERS):
        meet(peer, slot, float(slot))
    return peer


def beat(peer: Peer, now: float, serial: int = 2) -> list[Effect]:
    return say(peer, 1, HeartbeatNews(heartbeat(serial)), now)


def closed(effects: list[Effect]) -> list[int]:
    """The slots whose sessions were closed, each after a `Bye` that tells nothing."""
    slots = {key_of(slot).public: slot for slot in range(3 + OTHERS)}
    closing = [slots[close.peer] for close in only(effects, Close)]
    assert [bye.release for slot in closing for bye in sends(effects, Bye, to=slot)] == [b""] * len(closing)
    return closing


def test_a_member_closes_the_longest_silent_of_the_sessions_that_it_has_no_use_for() -> None:
    peer = a_member()
    say(peer, 3, Ping(0), QUIET_S)
    assert closed(beat(peer, LATER)) == [4, 5, 6], "of twelve, 3 was heard lately, and eight of the others stay"
    assert closed(beat(peer, LATER + 1, 3)) == [], "those that are being closed do not count again"


def test_what_was_used_lately_stays() -> None:
    peer = a_member()
    assert closed(beat(peer, QUIET_S)) == []


def test_only_a_heartbeat_closes_sessions() -> None:
    """Without one the authority is gone, and every neighbour may be needed."""
    peer = a_member()
    assert closed(peer.apply(Timer("tick"), LATER)) == []
    assert closed(say(peer, 1, HeartbeatNews(heartbeat(1)), LATER)) == [], "one that is known is none"


def test_the_sessions_of_attached_children_stay_though_no_roster_names_them() -> None:
    peer = a_member()
    say(peer, 4, Attach(0, 0, 0, 1 << 20, ()), 5.0)
    assert closed(beat(peer, LATER)) == [3, 5, 6]


def test_no_session_is_closed_during_a_catch_up() -> None:
    peer = new_peer(0, held=None)
    admit(peer, PARENTS, head=manifest(9, 0))
    assert peer.catchup.active
    for slot in range(1, 3 + OTHERS):
        meet(peer, slot, float(slot))
    assert closed(beat(peer, LATER)) == []


def test_who_fetches_the_model_from_us_is_heard_with_each_request() -> None:
    peer = a_member()
    for slot in range(3, 3 + OTHERS):
        say(peer, slot, WantBlock(1, 0), LATER - TUNING.request_deadline_s)
    assert closed(beat(peer, LATER)) == []


def test_a_member_that_parted_is_not_lost_and_may_be_dialed_again() -> None:
    """Its children are not orphans: we do not take their parent for dead."""
    peer = a_member()
    (close,) = only(say(peer, 3, Bye(b""), 20.0), Close)
    assert (close.peer, close.ban_s) == (key_of(3).public, 0.0)
    peer.apply(PeerDown(key_of(3).public), 20.1)
    assert not peer.state.lost_peers.is_gone(key_of(3).public)
    peer.apply(PeerDown(key_of(5).public), 20.2)
    assert peer.state.lost_peers.is_gone(key_of(5).public), "which the end of any other session means"
    assert not peer.state.sessions.reach(key_of(3).public, ("/sim/3",), 20.3)
    assert [dial.peer for dial in only(peer.state.outbox.take(), Dial)] == [key_of(3).public]


def test_our_own_closing_makes_nobody_an_orphan_either() -> None:
    peer = a_member()
    (gone, *_) = closed(beat(peer, LATER))
    peer.apply(PeerDown(key_of(gone).public), LATER)
    assert not peer.state.lost_peers.is_gone(key_of(gone).public)


def test_a_member_that_ended_its_session_is_forgotten_after_the_time_of_a_lease() -> None:
    peer = a_member()
    peer.apply(PeerDown(key_of(5).public), 20.0)
    lost = peer.state.lost_peers
    lost.forget_old(20.0 + TUNING.hard_ttl_s)
    assert lost.is_gone(key_of(5).public)
    lost.forget_old(20.1 + TUNING.hard_ttl_s)
    assert not lost.is_gone(key_of(5).public)


def test_the_session_with_the_authority_is_the_authoritys_to_close() -> None:
    peer = a_member()
    assert peer.state.sessions.ready(SWARM)
    assert SWARM not in {close.peer for close in only(beat(peer, LATER + QUIET_S), Close)}


# ---------------------------------------------------------------- a swarm


def _sessions(node: Node) -> set[bytes]:
    return {session.peer for session in node.core.state.sessions}


@pytest.mark.slow
def test_former_neighbours_are_let_go_and_nobody_dials_them_again() -> None:
    """Some members are killed and others join, so the plan changes all the time."""
    tuning = replace(Tuning.loopback(), request_deadline_s=2.0)
    quiet_s = 2 * tuning.request_deadline_s
    world = World(tuning)
    for _ in range(30):
        world.join(held=world.base)
    world.run(world.now + 3)
    for _ in range(10):
        for node in world.members()[:2]:
            world.kill(node)
            world.join(held=world.base)
        version = world.publish(chunks=8).id
        assert world.run_until(partial(world.all_hold, version), 30)
        world.run(world.now + 2)
    world.run(world.now + 2 * quiet_s)
    before = {node.key.public: _sessions(node) for node in world.members()}
    for node in world.members():
        spare = _sessions(node) - node.core.state.neighbours() - {world.authority.key.public}
        assert len(spare) <= tuning.spare_sessions
    world.run(world.now + 2 * quiet_s)
    for node in world.members():
        assert _sessions(node) <= before[node.key.public], "nobody dials a member that it has no use for"
