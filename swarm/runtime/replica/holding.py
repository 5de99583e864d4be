"""Which blocks of the model a member holds: all of them, or those of a shard."""

import numpy as np
from numpy.typing import NDArray

from codec import ChunkHeader, Layered, Layout, Replica
from codec.shards import Shard

__all__ = ["Holding"]


class Holding:
    """What one member holds. `shard` None: all blocks."""

    def __init__(self, shard: Shard | None = None) -> None:
        self.shard = shard
        self._known: tuple[bytes, NDArray[np.bool_]] | None = None
        """The hash of the layout last asked about, and its blocks."""

    def blocks(self, layout: Layout) -> NDArray[np.bool_] | None:
        """For each block, whether it is held; None: all are."""
        if self.shard is None:
            return None
        if self._known is None or self._known[0] != layout.hash:
            held = self.shard.blocks(layout)
            held.flags.writeable = False
            self._known = layout.hash, held
        return self._known[1]

    def all(self, layout: Layout) -> tuple[int, ...]:
        """The numbers of the blocks held."""
        held = self.blocks(layout)
        return tuple(range(layout.n_blocks)) if held is None else tuple(map(int, np.flatnonzero(held)))

    def differing(self, replica: Replica | Layered, hashes: NDArray[np.uint8]) -> tuple[int, ...]:
        """The blocks, of those that are held, whose hash is not the one in this list, uint8 (n_blocks, 32)."""
        differs = (replica.hashes != hashes).any(axis=1)
        if (held := self.blocks(replica.layout)) is not None:
            differs &= held
        return tuple(map(int, np.flatnonzero(differs)))

    def nbytes(self, layout: Layout) -> int:
        """Bytes of memory of the base's blocks that are held, about. Unused parts beyond the base take none."""
        if self.shard is None:
            return layout.base_nbytes
        return sum(layout.block(block).nbytes for block in self.all(layout) if block < layout.base_blocks)

    def needs(self, header: ChunkHeader, layout: Layout | None) -> bool:
        """Whether a chunk changes a block that is held. True also while that is not known, and for a chunk of another
        model, which is refused when it is decoded."""
        held = None if layout is None or header.layout_hash != layout.hash else self.blocks(layout)
        return held is None or any(entry.block >= held.size or held[entry.block] for entry in header.blocks)
