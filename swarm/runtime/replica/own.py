"""What the seed's own publisher says of a chunk that it encoded, so that the seed need not decode it.

The trainer's process compares the new bits with the seed's replica, and from this one pass come the coded form, the
hash of the new block and the list of changes. The seed signs the coded form and, when the version is sealed, writes the
list into its replica. It hashes nothing then: those blocks count as unproven (`Model`), so each is hashed before it is
given to a peer or written into a checkpoint. That is the one proof that the replica has the bits whose hashes were
signed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from codec import Layered, Replica, StagedBlock, StagedChunk, Torn
from codec.chunk import CODER_RAW
from codec.staging import all_positions, block_hash, raw_bits
from codec.zeros import are_zeros
from swarm.store import ChunkStore, StoredChunk

__all__ = ["BELIEVED", "NO_HASH", "OWN", "PROVEN", "OwnChunk", "actual_hash", "hashes_after", "write_known"]

NO_HASH: Final = bytes(32)
"""Of a block that cannot be read."""

PROVEN: Final = 0
"""The block's bits were hashed since they were written, or before they were."""
OWN: Final = 1
"""This seed's own publisher has changed the block since it was hashed."""
BELIEVED: Final = 2
"""The block was taken from disk unhashed, as a clean shutdown left it."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnChunk:
    """What a chunk of this seed changes. `blocks`: without the raw ones, whose payload has their new bits."""

    blocks: tuple[StagedBlock, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return StagedChunk(self.blocks).nbytes


def actual_hash(replica: Replica | Layered, block: int) -> bytes:
    """The hash of the bits that a block has now; `NO_HASH` if they cannot be read. Zeros beyond the base have theirs
    without being read."""
    listed = replica.hashes[block].tobytes()
    if are_zeros(replica.layout, block, listed):
        return listed
    try:
        return block_hash(replica.block(block))
    except Torn:
        return NO_HASH


def hashes_after(before: NDArray[np.uint8], chunks: Iterable[StoredChunk]) -> NDArray[np.uint8]:
    """The block hashes, uint8 (n_blocks, 32), that a version of these chunks will have. `before`: its parent's."""
    hashes = before.copy()
    for chunk in chunks:
        for entry in chunk.header.blocks:
            hashes[entry.block] = np.frombuffer(entry.new_hash, np.uint8)
    return hashes


def write_known(
    replica: Replica | Layered, chunk: StoredChunk, known: StagedChunk | OwnChunk, store: ChunkStore
) -> bool:
    """Write what a chunk changes into the replica. Returns whether its blocks are proven. Raises `Torn` for blocks that
    are not the version before."""
    if isinstance(known, StagedChunk):
        replica.scatter([known])
        return True
    replica.scatter([StagedChunk(known.blocks)])
    for entry in chunk.header.blocks:
        if entry.coder != CODER_RAW:
            continue
        found = store.payload(chunk.key, entry.block)
        if found is None:
            raise RuntimeError(f"block {entry.block} of a chunk that was sealed is not in the store")
        spec, old_hash = replica.layout.block(entry.block), replica.hashes[entry.block].tobytes()
        bits = raw_bits(found[1], replica.block(entry.block), spec.dtype)
        positions = all_positions()[: bits.size]
        replica.scatter([StagedChunk((StagedBlock(entry.block, positions, bits, old_hash, entry.new_hash),))])
    return False
