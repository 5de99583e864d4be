"""The sizes of chunks and pieces, and the packing of block deltas into chunks.

Sizes follow from F, the payload of the last version in bytes. Small chunks let a stripe that is behind pass work to the
other stripes, and small pieces let relays forward early; but each chunk costs a header, and each piece costs a hash and
the handling of a message in every relay.
"""

import math
from collections.abc import Sequence
from typing import Final

from codec.chunk import MAX_BLOCKS, MAX_CHUNK_BYTES, MAX_PIECE_BYTES, MIN_PIECE_BYTES, BlockDelta

__all__ = ["MIN_CHUNK_BYTES", "STRIPES", "ClassPacker", "Packer", "chunk_target", "piece_target"]

STRIPES: Final = 8
"""K: the number of distribution trees."""
MIN_CHUNK_BYTES: Final = 64 << 10
_LONGEST_PIECE_S: Final = 0.1
"""Seconds that a piece may take at a stripe's share of the link: see `piece_target`."""


def _power_of_two(value: int, least: int, most: int) -> int:
    """The power of two nearest to `value` (by ratio), within bounds that are themselves powers of two."""
    return max(least, min(most, 1 << max(value * 181 // 128, 1).bit_length() - 1))  # 181/128: about sqrt(2)


def chunk_target(payload_bytes: int) -> int:
    """The size of a chunk's body to aim for, in bytes: F/(32 K), from 64 KiB to 1 MiB. `payload_bytes`: F.

    With 32 chunks per stripe, waiting for the last chunk costs about 1/32 of a stripe's time, and an overloaded relay
    passes on units of that size. Each chunk costs 0.3 KB of header and the check of one signature (0.14 ms).
    """
    return max(MIN_CHUNK_BYTES, min(MAX_CHUNK_BYTES, payload_bytes // (32 * STRIPES)))


def piece_target(payload_bytes: int, nodes: int | None = None, link_mbit: float = math.inf) -> int:
    """The size of a piece in bytes: F/(200 K), or F/(25 K) for up to 2 K nodes, but at most what a stripe receives in
    `_LONGEST_PIECE_S`; rounded to a power of two from 16 to 256 KiB.

    `payload_bytes`: F. `nodes`: None if unknown. `link_mbit`: Mbit/s at which the version arrives (see
    `arrival_mbit`).

    A piece needs D of its sending times to cross a tree of depth D; with 200 pieces per stripe that is about D/2 % of
    a stripe's time. Below 16 KiB the hash (32 bytes) and the handling in each relay cost more than the shorter wait
    saves. Up to 2 K nodes are about one relay deep, so an eighth of the pieces suffices and costs each relay an eighth
    of the handling. Pieces that take long to send make neighbours late to help one another: with pieces of 256 KiB at
    100 Mbit/s, one chunk in five crossed a border twice.
    """
    pieces = 25 if nodes is not None and nodes <= 2 * STRIPES else 200
    longest = min(_LONGEST_PIECE_S * link_mbit * 125_000 / STRIPES, MAX_PIECE_BYTES)
    return _power_of_two(min(payload_bytes // (pieces * STRIPES), int(longest)), MIN_PIECE_BYTES, MAX_PIECE_BYTES)


class Packer:
    """Collects block deltas, in any order, until they fill a chunk; each call returns the chunks that are full.

    A delta that alone reaches the target size becomes a chunk of its own, so that a raw block does not wait for others.
    """

    def __init__(self, target_bytes: int) -> None:
        """`target_bytes`: see `chunk_target`. It may be changed between two calls."""
        assert 0 < target_bytes <= MAX_CHUNK_BYTES
        self.target_bytes = target_bytes
        self._waiting: list[BlockDelta] = []
        self._bytes = 0

    def add(self, delta: BlockDelta) -> list[list[BlockDelta]]:
        """The chunks (0 or 1 lists of deltas for `seal_chunk`) that `delta` completes."""
        size = len(delta.payload)
        if size >= self.target_bytes:
            return [[delta]]
        full = self.flush() if self._bytes + size > self.target_bytes or len(self._waiting) == MAX_BLOCKS else []
        self._waiting.append(delta)
        self._bytes += size
        return full

    def flush(self) -> list[list[BlockDelta]]:
        """The remaining deltas, as at most one chunk."""
        full = [self._waiting] if self._waiting else []
        self._waiting, self._bytes = [], 0
        return full


class ClassPacker:
    """A `Packer` for each class of blocks, so that no chunk has blocks of two classes.

    A class's first block opens its packer, so at most a chunk for each class is open at a time.
    """

    def __init__(self, target_bytes: int, classes: Sequence[int] | None = None) -> None:
        """`target_bytes`: see `Packer`. `classes`: of each block of the model, its class; None: there is one."""
        self._target_bytes = target_bytes
        self._classes = classes
        self._packers: dict[int, Packer] = {}

    @property
    def target_bytes(self) -> int:
        """The size of chunks, of all classes."""
        return self._target_bytes

    @target_bytes.setter
    def target_bytes(self, target_bytes: int) -> None:
        self._target_bytes = target_bytes
        for packer in self._packers.values():
            packer.target_bytes = target_bytes

    def add(self, delta: BlockDelta) -> list[list[BlockDelta]]:
        """The chunks (0 or 1 lists of deltas) that `delta` completes."""
        wanted = 0 if self._classes is None else self._classes[delta.block]
        packer = self._packers.get(wanted)
        if packer is None:
            packer = self._packers[wanted] = Packer(self._target_bytes)
        return packer.add(delta)

    def flush(self) -> list[list[BlockDelta]]:
        """The remaining deltas, as at most one chunk for each class."""
        return [chunk for packer in self._packers.values() for chunk in packer.flush()]
