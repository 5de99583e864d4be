"""How far the newest version has arrived in this process, as the status shows it."""

from typing import Final

from node.status.schema import PieceMap
from swarm.protocol.membership.roster import AUTHORITY, Roster
from swarm.protocol.state import State
from swarm.protocol.transfer.chunks import Chunk

__all__ = ["MOST_CELLS", "NOBODY", "piece_map"]

MOST_CELLS: Final = 512
"""More cannot be told apart on a screen, and a status is sent every second."""
NOBODY: Final = -2
"""No piece of the cell has come."""


def piece_map(state: State, *, is_seed: bool) -> PieceMap:
    """The newest version that `state` knows chunks of. At the seed a chunk counts as here once it is assigned to a
    stripe, and its giver is that stripe's root child."""
    if not state.chunks.versions:
        return PieceMap()
    version = state.chunks.versions[max(state.chunks.versions)]
    manifest = version.manifest
    count = len(manifest.chunk_ids) if manifest is not None else max(version.chunks, default=-1) + 1
    result = PieceMap(version=version.id, sealed=manifest is not None, chunks=count)
    if not count:
        return result
    width = -(-count // MOST_CELLS)
    giver_of = _root_child if is_seed else _sender
    for first in range(0, count, width):
        here = total = 0
        giver = NOBODY
        for seq in range(first, min(first + width, count)):
            chunk = version.chunks.get(seq)
            size = 1 if chunk is None else sum(chunk.sizes) if chunk.wanted else chunk.header_bytes
            total += size
            if chunk is None or (is_seed and chunk.stripe is None):
                continue
            here += size if chunk.done else size * chunk.have.bit_count() // len(chunk.sizes)
            giver = giver_of(chunk, state, state.roster)
        result.have.append(round(here / max(1, total), 3))
        result.giver.append(giver)
    return result


def _root_child(chunk: Chunk, state: State, roster: Roster | None) -> int:
    if roster is None or chunk.stripe is None or chunk.stripe >= roster.stripes:
        return NOBODY
    return next(iter(roster.root_children(chunk.stripe)), NOBODY)


def _sender(chunk: Chunk, state: State, roster: Roster | None) -> int:
    if chunk.source is None:
        return NOBODY
    if chunk.source == state.swarm:
        return AUTHORITY
    member = roster.member_of(chunk.source) if roster is not None else None
    return NOBODY if member is None else member.slot
