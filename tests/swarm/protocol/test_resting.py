"""When a member ticks: often while something is in flight, seldom while it rests, and never too late for a deadline."""

from member_kit import a_member, a_report, tick
from protocol_kit import TUNING, header, heartbeat, key_of, manifest, meet, only, say

from swarm.protocol.core.events import Effect, PeerDown, SetTimer
from swarm.protocol.core.wire import Attach, HeartbeatNews, ManifestNews, Reports
from swarm.protocol.member import Peer
from swarm.protocol.membership.silence import silent_at

REST_S = TUNING.heartbeat_s / 2


def next_tick(effects: list[Effect]) -> float | None:
    timers = [timer.at for timer in only(effects, SetTimer) if timer.name == "tick"]
    return timers[-1] if timers else None


def at_rest(now: float = 1.0) -> Peer:
    """A member with its parent, slot 1, at this time."""
    peer = a_member()
    meet(peer, 1)
    meet(peer, 2)
    tick(peer, 0.5)
    say(peer, 1, HeartbeatNews(heartbeat(2)), now)
    tick(peer, now + TUNING.report_batch_s)
    return peer


def test_a_member_at_rest_ticks_twice_a_heartbeat() -> None:
    peer = at_rest()
    assert next_tick(tick(peer, 1.1)) == 1.1 + REST_S


def test_a_seal_ends_the_rest() -> None:
    peer = at_rest()
    tick(peer, 1.1)
    assert next_tick(say(peer, 1, ManifestNews(manifest(1, 1)), 1.12)) == 1.12 + TUNING.tick_s
    assert next_tick(tick(peer, 1.2)) == 1.2 + TUNING.tick_s


def test_a_chunk_ends_the_rest() -> None:
    peer = at_rest()
    tick(peer, 1.1)
    assert next_tick(peer.apply(header(1, 0), 1.12)) == 1.12 + TUNING.tick_s


def test_reports_are_forwarded_when_they_are_due() -> None:
    peer = at_rest()
    tick(peer, 1.1)
    say(peer, 2, Attach(0, 0, 0, 1 << 20, ()), 1.12)
    assert next_tick(say(peer, 2, Reports(0, (a_report(),)), 1.13)) == 1.13 + TUNING.report_batch_s


def test_a_lost_parent_ends_the_rest() -> None:
    peer = at_rest()
    tick(peer, 1.1)
    assert next_tick(peer.apply(PeerDown(key_of(1).public, "gone"), 1.12)) == 1.12 + TUNING.tick_s


def test_a_late_heartbeat_is_noticed_at_its_deadline() -> None:
    peer = at_rest()
    now, late_at = 1.1, silent_at(peer.state)
    assert late_at == 1.0 + 2 * TUNING.heartbeat_s
    while now < late_at:
        at = next_tick(tick(peer, now))
        assert at is not None
        assert now < at <= max(late_at, now + TUNING.tick_s)
        now = at
    assert next_tick(tick(peer, now)) == now + TUNING.tick_s


def test_a_member_without_a_lease_or_a_parent_does_not_rest() -> None:
    peer = a_member()
    assert next_tick(tick(peer, 0.5)) == 0.5 + TUNING.tick_s
