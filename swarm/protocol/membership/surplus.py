"""Surplus sessions: those that a peer closes because it has no use for them.

The authority keeps the sessions of its children, and those heard last up to a number. A member keeps those of its
parents and children, those of the peers that it awaits chunks from, and a few spare ones: with former neighbours, and
with newcomers that fetched the model from it. Spare sessions lead to failover parents without a dial, and bring late
chunks. Whoever has a use for a session that was closed dials again.
"""

from collections.abc import Container

from swarm.protocol.membership.session import Session
from swarm.protocol.state import State

__all__ = ["close_spare_sessions", "close_surplus_sessions"]


def close_surplus_sessions(state: State, now: float) -> None:
    """The authority: keep `sessions_kept` sessions, or those of the children and of members heard lately if more."""
    surplus = sum(1 for _ in state.sessions) - state.tuning.sessions_kept
    if surplus > 0:
        _close(state, _unused(state, set(state.children()), 2 * state.tuning.heartbeat_s, now)[:surplus])


def close_spare_sessions(state: State, awaited: Container[bytes], now: float) -> None:
    """A member: keep `spare_sessions` of the sessions that it has no use for. `awaited`: who was asked for a chunk.

    One that was used lately is none of them: a neighbour with an older roster may be about to attach, and a member that
    catches up here waits up to `request_deadline_s` for an answer.
    """
    tuning = state.tuning
    if sum(1 for _ in state.sessions) <= tuning.spare_sessions:
        return
    used = {state.swarm, *state.neighbours()}
    quiet_s = 2 * max(tuning.heartbeat_s, tuning.request_deadline_s)
    unused = [session for session in _unused(state, used, quiet_s, now) if session.peer not in awaited]
    _close(state, unused[: -tuning.spare_sessions])


def _unused(state: State, used: Container[bytes], quiet_s: float, now: float) -> list[Session]:
    """The sessions with peers outside of `used` of which nothing was heard for `quiet_s`, the longest silent first."""
    quiet = (s for s in state.sessions if s.ready and not s.closing and now - max(s.heard_at, s.since) > quiet_s)
    return sorted((s for s in quiet if s.peer not in used), key=lambda s: (s.heard_at, s.peer))


def _close(state: State, sessions: list[Session]) -> None:
    for session in sessions:
        state.part(session.peer, "surplus session with nothing to send")
