"""How often a member looks at its deadlines: seldom while nothing is under way."""

import pytest
from member_kit import a_member, tick
from protocol_kit import TUNING, header, heartbeat, key_of, meet, only, say

from swarm.protocol.core.events import Effect, SetTimer
from swarm.protocol.core.wire import HeartbeatNews
from swarm.protocol.member import REST_TICKS, Peer

REST_S = REST_TICKS * TUNING.tick_s


def tick_at(effects: list[Effect]) -> float:
    """The time for which these effects set the tick."""
    return [effect.at for effect in only(effects, SetTimer) if effect.name == "tick"][-1]


def at_rest(now: float) -> Peer:
    """A member that has nothing to do, after its tick at `now`."""
    peer = a_member()
    for slot in (1, 2):
        meet(peer, slot)
    tick(peer, now - TUNING.tick_s)  # forwards the reports of the beginning
    assert tick_at(tick(peer, now)) == pytest.approx(now + REST_S)
    return peer


def test_a_member_with_nothing_to_do_looks_at_its_deadlines_seldom() -> None:
    peer = at_rest(0.3)
    assert tick_at(tick(peer, 0.3 + REST_S)) == pytest.approx(0.3 + 2 * REST_S)


def test_a_piece_of_a_new_version_brings_the_ticks_back_to_where_they_were() -> None:
    peer = at_rest(0.3)
    effects = peer.apply(header(1, 0, peer=key_of(1).public), 0.3 + 1.5 * TUNING.tick_s)
    assert tick_at(effects) == pytest.approx(0.3 + 2 * TUNING.tick_s)
    assert tick_at(tick(peer, 0.3 + 2 * TUNING.tick_s)) == pytest.approx(0.3 + 3 * TUNING.tick_s)


def test_a_report_that_waits_is_sent_as_soon_as_without_the_rest() -> None:
    peer = at_rest(0.3)
    effects = say(peer, 1, HeartbeatNews(heartbeat(2)), 0.3 + 0.5 * TUNING.tick_s)
    assert tick_at(effects) == pytest.approx(0.3 + TUNING.tick_s)
    assert tick_at(tick(peer, 0.3 + TUNING.tick_s)) == pytest.approx(0.3 + TUNING.tick_s + REST_S)


def test_a_member_that_has_not_joined_does_not_rest() -> None:
    peer = at_rest(0.3)
    peer.state.own_lease.grant = None
    assert tick_at(tick(peer, 0.7)) == pytest.approx(0.7 + TUNING.tick_s)
