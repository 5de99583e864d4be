"""When a member counts its parents, or the authority, as silent, and when it expects data of them."""

from typing import Final

from swarm.protocol.state import State

__all__ = ["DOUBT_S", "expects_data", "has_outlasted_leases", "is_late", "silent_parents"]

DOUBT_S: Final = 0.5
"""Ping a parent, or a peer that was asked for a chunk, that has been silent for this long while a version is in flight.
It must answer within the same time, or four round trips if that is longer. A busy event loop or a full uplink delays
an answer by less."""

_LATE_BEATS: Final = 2
"""A heartbeat is late when the last one came so many heartbeats ago."""
_SILENT_BEATS: Final = 3
"""A parent is silent when nothing has come from it for so many heartbeats."""


def is_late(state: State, now: float) -> bool:
    """Whether the next heartbeat is late: the authority is gone, or the way from it is cut."""
    return now - state.leases.heard_at > _LATE_BEATS * state.tuning.heartbeat_s


def has_outlasted_leases(state: State, now: float) -> bool:
    """Whether no heartbeat came for longer than a lease lasts, so that ours is over, unless the authority was away."""
    return now - state.leases.heard_at > state.tuning.hard_ttl_s


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


def expects_data(state: State, now: float) -> bool:
    """Whether data should arrive: a known version is incomplete, or a stripe made progress lately."""
    begun = [v for v in state.chunks.versions.values() if v.id > state.floor and not v.complete]
    known = any(v.manifest is not None or v.done_chunks < len(v.chunks) for v in begun)
    newest = max(state.exchange.parents.progress_at.values(), default=float("-inf"))
    return known or (bool(begun) and now - newest < 2 * DOUBT_S)
