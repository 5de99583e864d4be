"""Blocks of zeros beyond the base: parts of a layout that nothing uses yet, such as empty slots of adapters.

Their hash is known without their bits. So they are never read, hashed, sent or written: in memory and in files they are
holes, which take no room. A block whose hash is that of zeros *is* zeros, wherever it is kept.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec.bits import Bits
from codec.layout import Layout

__all__ = ["are_zeros", "with_holes", "zero_blocks", "zero_hash", "zero_hashes"]


@lru_cache(maxsize=64)
def zero_hash(nbytes: int) -> bytes:
    """The hash (32 bytes) of a block of so many zero bytes."""
    return blake3(bytes(nbytes)).digest()


def zero_hashes(layout: Layout) -> NDArray[np.uint8]:
    """The hashes of all blocks beyond the base if they are zeros: uint8 (n_blocks - base_blocks, 32)."""
    blocks = range(layout.base_blocks, layout.n_blocks)
    found = b"".join(zero_hash(layout.block(block).nbytes) for block in blocks)
    return np.frombuffer(found, np.uint8).reshape(-1, 32)


def are_zeros(layout: Layout, block: int, digest: bytes) -> bool:
    """Whether a block is beyond the base, and one with this hash is zeros."""
    return block >= layout.base_blocks and digest == zero_hash(layout.block(block).nbytes)


def zero_blocks(layout: Layout, hashes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """For each block, whether it is beyond the base and zeros. `hashes`: uint8 (n_blocks, 32)."""
    found = np.zeros(layout.n_blocks, np.bool_)
    found[layout.base_blocks :] = (hashes[layout.base_blocks :] == zero_hashes(layout)).all(axis=1)
    return found


def with_holes(
    layout: Layout, hashes: NDArray[np.uint8], name: str, block: Callable[[int], Bits]
) -> Iterator[Bits | int]:
    """The blocks of a tensor, for `codec.checkpoint.write_checkpoint`: the number of its elements for a block of zeros,
    else `block(id)`. Raises `KeyError`."""
    for number in layout.blocks_of(name):
        zeros = are_zeros(layout, number, hashes[number].tobytes())
        yield layout.block(number).count if zeros else block(number)
