"""Blocks read back out of the memory of an engine, for a replica that keeps no copy of its own in memory.

An engine follows its replica, so a live block may be at an older version than the replica, be a mix of two versions, or
be damaged. Nothing here trusts it: a live block says by its hash which version it is, the chunks since then bring it
forward, and the result must have the hash that the block must have. Otherwise the block is read from disk.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits
from codec.layout import Layout

__all__ = ["LiveBlocks", "LiveFirst", "SnapshotBlocks"]


class LiveBlocks(Protocol):
    """An engine's memory. Any number of threads may call it."""

    def read(self, blocks: Sequence[int]) -> list[Bits]:
        """The live bits of the first few of `blocks`, as many as are read at once, each in an array of its own.

        Empty when no engine can be read now.
        """
        ...

    def count(self, *, right: bool) -> None:
        """Count a block that was read. `right`: it was brought to the bits that it must have."""
        ...


class SnapshotBlocks:
    """`LiveBlocks` for a snapshot: that the engine has gone on to a later version is not counted as a difference."""

    def __init__(self, live: LiveBlocks) -> None:
        self.read = live.read
        self._count = live.count

    def count(self, *, right: bool) -> None:
        """See `LiveBlocks`."""
        if right:
            self._count(right=True)


class LiveFirst:
    """Reads blocks in the order of a list: live where `bring_forward` makes the live bits right, else from disk.

    It is a `BlockSource` of that list. One thread uses it, once.
    """

    def __init__(
        self,
        live: LiveBlocks | None,
        layout: Layout,
        hashes: NDArray[np.uint8],
        blocks: Iterable[int],
        bring_forward: Callable[[int, Bits], bool],
        from_disk: Callable[[int], Bits],
    ) -> None:
        """`live` None: all blocks are read from disk. `bring_forward(block, bits)`: changes live bits to those of the
        present version; whether it could."""
        self.layout, self.hashes = layout, hashes
        self._live, self._bring_forward, self._from_disk = live, bring_forward, from_disk
        self._left = [block for block in blocks if block < layout.base_blocks]
        self._ahead: dict[int, Bits] = {}

    def block(self, block: int) -> Bits:
        """The block's elements, flat. Raises what `from_disk` raises."""
        live = self._live if block < self.layout.base_blocks else None  # an engine's weights are the base
        if live is not None and block not in self._ahead:
            self._left = [other for other in self._left if other > block]
            wanted = [block, *self._left]
            self._ahead = dict(zip(wanted, live.read(wanted), strict=False))
            if not self._ahead:
                self._live = None  # an engine that cannot be read now is not asked for each further block
        bits = self._ahead.pop(block, None)
        if live is not None and bits is not None:
            right = self._bring_forward(block, bits)
            live.count(right=right)
            if right:
                return bits
        return self._from_disk(block)
