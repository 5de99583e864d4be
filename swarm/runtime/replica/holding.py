"""Which blocks of the model a member holds: all of them, all but those of formats, or those of a share."""

import numpy as np
from numpy.typing import NDArray

from codec import ChunkHeader, Layered, Layout, Replica
from codec.errors import UsageError
from codec.formats.share import Share, format_prefix

__all__ = ["Holding", "has_formats"]


class Holding:
    """What one member holds. `shard` None: the model, without the blocks of formats, which it can compute. `formats`:
    with these blocks too, as a seed."""

    def __init__(self, shard: Share | None = None, *, formats: bool = False) -> None:
        self.shard = shard
        self._formats = formats
        self._known: tuple[bytes, NDArray[np.bool_]] | None = None
        """The hash of the layout last asked about, and its blocks."""

    def blocks(self, layout: Layout) -> NDArray[np.bool_] | None:
        """For each block, whether it is held; None: all are."""
        if self.shard is None and (self._formats or not has_formats(layout)):
            return None
        if self._known is None or self._known[0] != layout.hash:
            held = _without_formats(layout) if self.shard is None else self.shard.blocks(layout)
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
        """Bytes of memory of the blocks held, about. Beyond the base only formats count: unused slots take none."""
        if self.shard is None and not (self._formats and has_formats(layout)):
            return layout.base_nbytes
        specs = ((block, layout.block(block)) for block in self.all(layout))
        prefix = format_prefix("")
        return sum(spec.nbytes for block, spec in specs if block < layout.base_blocks or spec.name.startswith(prefix))

    def check_place(self, layout: Layout, *, on_disk: bool) -> None:
        """Raise `UsageError` if the replica is to be on disk, which keeps whole models only."""
        if on_disk and self.blocks(layout) is not None:
            raise UsageError(
                "In a swarm with formats a node keeps its replica in memory: leave out --replica, or use a machine "
                "with more memory."
            )

    def needs(self, header: ChunkHeader, layout: Layout | None) -> bool:
        """Whether a chunk changes a block that is held. True also while that is not known, and for a chunk of another
        model, which is refused when it is decoded."""
        held = None if layout is None or header.layout_hash != layout.hash else self.blocks(layout)
        return held is None or any(entry.block >= held.size or held[entry.block] for entry in header.blocks)


def has_formats(layout: Layout) -> bool:
    """Whether the model has parts that hold formats."""
    return any(tensor.name.startswith(format_prefix("")) for tensor in layout.tensors)


def _without_formats(layout: Layout) -> NDArray[np.bool_]:
    held = np.ones(layout.n_blocks, np.bool_)
    for tensor in layout.tensors:
        if tensor.name.startswith(format_prefix("")):
            blocks = layout.blocks_of(tensor.name)
            held[blocks.start : blocks.stop] = False
    return held
