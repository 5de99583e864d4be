"""The neighbours that a member asks for data outside the trees, in order, and those that it tells its late chunks."""

from swarm.protocol.membership.session import Session
from swarm.protocol.state import State

__all__ = ["block_sources", "chunk_sources", "near_neighbours"]

FEW_NEAR = 6
"""Tell only neighbours in our own region if there are at least this many: chunks from another region would arrive even
later."""
MOST_NEAR = 24
"""Upper bound of the neighbours that are told."""


def _has_what_we_hold(state: State, session: Session) -> bool:
    """Whether this member has every block, and every chunk, that we need."""
    return session.shard is None or (state.shard is not None and session.shard.covers(state.shard))


def block_sources(state: State) -> list[bytes]:
    """Peers to ask for blocks, lists, files and manifests: members with a session, the authority last. None that holds
    less of the model than we need."""
    lost = state.lost_peers.is_lost
    ready = sorted(
        s.peer
        for s in state.sessions
        if s.ready and s.slot is not None and not lost(s.slot) and _has_what_we_hold(state, s)
    )
    turn = state.grant.slot % len(ready) if ready and state.grant is not None else 0
    authority = [state.swarm] if state.sessions.ready(state.swarm) else []
    return ready[turn:] + ready[:turn] + authority


def chunk_sources(state: State, stripe: int | None) -> list[bytes]:
    """Peers to ask for a chunk: for a known stripe the roster's failover parents first, and our parent in it after
    them."""
    sources = block_sources(state)
    if stripe is None or state.roster is None or state.grant is None:
        return sources
    slots = [m.slot for p in sources if (m := state.roster.member_of(p)) is not None]
    order = state.roster.failover_parents(stripe, state.grant.slot, among=slots)
    rank = {state.peer_of(slot): i for i, slot in enumerate(order)}
    last = len(rank)
    return sorted(sources, key=lambda p: (p == state.swarm, rank.get(p, last)))


def near_neighbours(state: State) -> list[bytes]:
    """Peers to tell which chunks are late: neighbours of our region, or of any if few; never the authority."""
    roster, grant = state.roster, state.grant
    me = roster.member(grant.slot) if roster is not None and grant is not None else None
    if roster is None or me is None:
        return []
    known = sorted((m.region != me.region, m.slot, s.peer) for s in state.sessions
                   if s.ready and (m := roster.member_of(s.peer)) is not None)  # fmt: skip
    near = sum(not far for far, _, _ in known)
    return [peer for _, _, peer in known[: max(near, FEW_NEAR)]][:MOST_NEAR]
