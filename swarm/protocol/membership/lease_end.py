"""Whether a lease is over, by the newest heartbeat and roster that a member has."""

from swarm.protocol.core.documents import Grant, Heartbeat
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.membership.session import Session
from swarm.protocol.state import State

__all__ = ["close_expired_sessions", "ended_in_silence", "is_over", "is_own_lease_over", "is_session_over"]


def is_over(state: State, peer: bytes, slot: int, issued: float, now: float) -> bool:
    """Whether the lease of `peer` has expired, or its slot has another holder. `issued`: its grant's authority time.

    A grant younger than the newest heartbeat has no bit in it yet, so it counts as valid.
    """
    heartbeat, roster = state.leases.heartbeat, state.roster
    if heartbeat is None or issued >= heartbeat.time:
        return False
    if not state.leases.standing(slot, now).rights.content:
        return True
    holder = roster.member(slot) if roster is not None else None
    current = roster is not None and (roster.boot, roster.serial) >= (heartbeat.boot, heartbeat.roster)
    return current and (holder is None or holder.peer != peer)


def is_own_lease_over(state: State, now: float) -> bool:
    """Whether this member has no lease: none yet, or it is over."""
    grant = state.grant
    return grant is None or is_over(state, state.key.public, grant.slot, grant.issued, now)


def is_session_over(state: State, session: Session, now: float) -> bool:
    """Whether the lease that this neighbour showed is over."""
    return session.slot is not None and is_over(state, session.peer, session.slot, session.issued, now)


def close_expired_sessions(state: State, now: float) -> None:
    """Close the sessions of members past hard expiry, which get no content."""
    for session in state.sessions:
        if session.ready and is_session_over(state, session, now):
            state.close(session.peer, "its lease is over")


def ended_in_silence(grant: Grant | None, before: Heartbeat | None, after: Heartbeat | None, tuning: Tuning) -> bool:
    """Whether our lease ended between two heartbeats that we heard one after the other.

    We renew our lease only over heartbeats that we hear, and a boot of the authority ends a lease `hard_ttl_s` after
    the heartbeat over which it was last renewed. The bits of `after` do not always show that: our slot may have another
    holder. A later boot begins with all leases renewed, so then the lease may not have ended.
    """
    if grant is None or before is None or after is None or before.boot != after.boot:
        return False
    return after.time - max(grant.issued, before.time) > tuning.hard_ttl_s
