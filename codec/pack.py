"""How large chunks and pieces are, and packing block deltas into chunks as they come.

Sizes follow from F, the payload of the last version: many small chunks let a stripe that is behind give work to its
siblings, and many small pieces let relays forward soon; but each costs its header, its hash and its turn.
"""

import math
from typing import Final

from codec.chunk import MAX_BLOCKS, MAX_CHUNK_BYTES, MAX_PIECE_BYTES, MIN_PIECE_BYTES, BlockDelta

__all__ = ["MIN_CHUNK_BYTES", "STRIPES", "Packer", "chunk_target", "piece_target"]

STRIPES: Final = 8
"""K: trees that chunks travel down."""
MIN_CHUNK_BYTES: Final = 64 << 10
_LONGEST_PIECE_S: Final = 0.1


def _power_of_two(value: int, least: int, most: int) -> int:
    """The power of two nearest to `value` (by ratio), within bounds that are themselves powers of two."""
    return max(least, min(most, 1 << max(value * 181 // 128, 1).bit_length() - 1))  # 181/128: the root of two


def chunk_target(payload_bytes: int) -> int:
    """Bytes of body to aim for, when the last version's payload was `payload_bytes`: F/(32 K), from 64 KiB to 1 MiB.

    Thirty-two chunks a stripe: the last one to arrive then costs about 1/32 of a stripe's time, and what an overloaded
    relay hands to others is no more than that. Each costs 0.3 KB of header and one signature to check (0.14 ms).
    """
    return max(MIN_CHUNK_BYTES, min(MAX_CHUNK_BYTES, payload_bytes // (32 * STRIPES)))


def piece_target(payload_bytes: int, nodes: int | None = None, link_mbit: float = math.inf) -> int:
    """Bytes of a piece: F/(200 K), among few nodes F/(25 K), and no more than a stripe brings in a tenth of a second;
    rounded to a power of two, from 16 to 256 KiB.

    A piece crosses a tree of depth D in D of its own sending times; two hundred a stripe keep that near D/2 percent.
    Below 16 KiB its hash (32 bytes) and the turn in each relay cost more than the wait that they save. Up to 2 K
    `nodes` (None: who knows) stand about one relay deep: an eighth of the pieces cost each of them an eighth of the
    turns. But with pieces that take long, neighbours are late to help one another (`link_mbit`: at what the version
    arrives, see `arrival_mbit`): of 256 KiB at 100 Mbit/s, one chunk in five crossed a border twice.
    """
    pieces = 25 if nodes is not None and nodes <= 2 * STRIPES else 200
    longest = min(_LONGEST_PIECE_S * link_mbit * 125_000 / STRIPES, MAX_PIECE_BYTES)
    return _power_of_two(min(payload_bytes // (pieces * STRIPES), int(longest)), MIN_PIECE_BYTES, MAX_PIECE_BYTES)


class Packer:
    """Collects block deltas until they fill a chunk. Feed them in any order; each call gives the chunks that are full.

    A delta that alone exceeds the target becomes a chunk of its own, so that one raw block does not wait for others.
    """

    def __init__(self, target_bytes: int) -> None:
        """`target_bytes`: see `chunk_target`."""
        assert 0 < target_bytes <= MAX_CHUNK_BYTES
        self._target = target_bytes
        self._waiting: list[BlockDelta] = []
        self._bytes = 0

    def add(self, delta: BlockDelta) -> list[list[BlockDelta]]:
        """The chunks (0, 1 or 2 lists of deltas for `seal_chunk`) that `delta` makes full."""
        size = len(delta.payload)
        if size >= self._target:
            return [[delta]]
        full = self.flush() if self._bytes + size > self._target or len(self._waiting) == MAX_BLOCKS else []
        self._waiting.append(delta)
        self._bytes += size
        return full

    def flush(self) -> list[list[BlockDelta]]:
        """What is left, as at most one chunk."""
        full = [self._waiting] if self._waiting else []
        self._waiting, self._bytes = [], 0
        return full
