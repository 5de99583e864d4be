"""When a member counts its parents, or the authority, as silent."""

from typing import Final

from swarm.protocol.state import State

__all__ = ["is_late", "silent_parents"]

_LATE_BEATS: Final = 2
"""A heartbeat is late when the last one came so many heartbeats ago."""
_SILENT_BEATS: Final = 3
"""A parent is silent when nothing has come from it for so many heartbeats."""


def is_late(state: State, now: float) -> bool:
    """Whether the next heartbeat is late: the authority is gone, or the way from it is cut."""
    return now - state.leases.heard_at > _LATE_BEATS * state.tuning.heartbeat_s


def silent_parents(state: State, now: float) -> list[bytes]:
    """The parents with a session that are silent, in order. None while the authority itself is: then no parent has
    anything to send."""
    limit_s = _SILENT_BEATS * state.tuning.heartbeat_s
    if now - state.leases.heard_at > limit_s:
        return []
    return sorted(peer for peer, heard_at in _heard_at(state).items() if now - heard_at > limit_s)


def _heard_at(state: State) -> dict[bytes, float]:
    """For each parent with a session, when its silence began.

    A failover parent had no reason to send before we attached to it, so its silence counts from then on.
    """
    attached_at: dict[bytes, float] = {}
    for edge in state.exchange.parents.edges.values():
        attached_at[edge.peer] = min(edge.since, attached_at.get(edge.peer, edge.since))
    sessions = ((peer, since, state.sessions.get(peer)) for peer, since in attached_at.items())
    return {peer: max(session.heard_at, since) for peer, since, session in sessions if session is not None}
