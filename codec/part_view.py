"""One part of a replica as a model of its own, for encoders: they compare blocks by their numbers in the part."""

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits
from codec.chunk import CODER_RICE
from codec.manifest import state_root
from codec.parts import PartBlocks
from codec.staging import BlockSource, EncodedBlock, encode_changes

__all__ = ["PartView"]


class PartView:
    """One part of a replica, as a `codec.staging.BlockSource` of the part's own layout. It changes when the replica
    does."""

    def __init__(self, whole: BlockSource, part: PartBlocks) -> None:
        self._whole = whole
        self.part = part
        self.layout = part.layout
        self.base_values = whole.layout.base_blocks < whole.layout.n_blocks
        """As `codec.replica.Replica.base_values`, of the whole."""

    @property
    def hashes(self) -> NDArray[np.uint8]:
        """uint8 (n_blocks, 32), a view."""
        return self._whole.hashes[self.part.first : self.part.first + self.layout.n_blocks]

    def block(self, block: int) -> Bits:
        """The block's elements, flat. Raises `IndexError`."""
        if not 0 <= block < self.layout.n_blocks:
            raise IndexError(f"block {block} of {self.layout.n_blocks}")
        return self._whole.block(self.part.first + block)

    @property
    def root(self) -> bytes:
        """The part's root (32 bytes)."""
        return state_root(self.layout.hash, self.hashes)

    def encode_changes(self, block: int, new: Bits, coder: int = CODER_RICE) -> EncodedBlock | None:
        """The delta from a block to `new` (flat, `dtype.bits`) with the positions of the changes; None if equal."""
        new_values = self.base_values or block >= self.layout.base_blocks
        return encode_changes(
            block, self.block(block), new, self.layout.block(block).dtype, coder, new_values=new_values
        )
