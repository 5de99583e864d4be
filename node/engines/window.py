"""The shared memory through which a node reads blocks back out of its engine.

The node makes one window and passes its descriptor on when the engine is attached. For each request the engine writes
the live bits of the blocks asked for into it, one after another, at the places that both ends reckon with `places`.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec import BlockSpec, Layout
from codec.bits import Bits

__all__ = ["WINDOW_BYTES", "Place", "places"]

WINDOW_BYTES: Final = 16 << 20
"""Eight blocks of a bf16 model, so that a request costs little beside what it reads; two of the largest blocks."""
_ALIGNED: Final = 64


class Place(NamedTuple):
    """Where one block is in the window."""

    block: int
    spec: BlockSpec
    offset: int

    def view(self, window: NDArray[np.uint8]) -> Bits:
        """The block's elements in the window."""
        return window[self.offset : self.offset + self.spec.nbytes].view(self.spec.dtype.bits)


def places(layout: Layout, blocks: Iterable[int]) -> Iterator[Place]:
    """The places of the first few blocks, as many as fit. Raises `IndexError` for a block that the layout lacks."""
    offset = 0
    for block in blocks:
        spec = layout.block(block)
        if offset + spec.nbytes > WINDOW_BYTES:
            return
        yield Place(block, spec, offset)
        offset += -(-spec.nbytes // _ALIGNED) * _ALIGNED
