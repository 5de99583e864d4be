"""When a member's next tick is due: every `tick_s` while something is in flight, and otherwise much less often.

Between versions a member only waits. What can become due then is counted in heartbeats, so a member that is at rest
ticks twice a heartbeat, and earlier where a deadline is known: reports to forward, a dial to repeat, a parent or the
authority that has been silent for too long. Any event that puts something in flight ends the rest.
"""

from swarm.protocol.membership.lease import Standing
from swarm.protocol.membership.membership import Membership
from swarm.protocol.membership.silence import silent_at
from swarm.protocol.state import State

__all__ = ["next_tick_at"]

REST_BEATS = 0.5
"""Heartbeats between two ticks at rest. They bound how late anything is that no event and no deadline below shows."""


def next_tick_at(state: State, membership: Membership, now: float) -> float:
    """The local time of the next tick of a member that is not catching up."""
    tuning = state.tuning
    if not _is_at_rest(state, membership, now):
        return now + tuning.tick_s
    due = [
        now + REST_BEATS * tuning.heartbeat_s,
        membership.reports_due_at,
        state.sessions.next_dial_at(now),
        silent_at(state),
    ]
    return min(due)


def _is_at_rest(state: State, membership: Membership, now: float) -> bool:
    heartbeat, grant = state.leases.heartbeat, state.grant
    if grant is None or heartbeat is None or state.held is None or not membership.is_settled(now):
        return False
    if heartbeat.head > state.floor or any(version > state.floor for version in state.chunks.versions):
        return False
    if state.leases.standing(grant.slot, now) is not Standing.FRESH or silent_at(state) <= now:
        return False
    if state.lost_peers.any_lost:
        return False
    if state.rosters.is_behind or any(not session.ready for session in state.sessions):
        return False
    return not any(edge.backlog for edges in state.exchange.children.values() for edge in edges.values())
