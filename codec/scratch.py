"""What both coders need for one block at a time: arrays that are reused, and bit strings in and out of them."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits, DType
from codec.errors import PeerError
from codec.lanes import CLASSES, LANES
from codec.layout import BLOCK_ELEMENTS
from codec.planes import FIELDS
from codec.scan import TILE_WORDS, find_top

__all__ = ["Positions", "Scratch", "check", "choose_top", "exponent_of", "read_bits", "tail", "taken"]

Positions = NDArray[np.uint32]
"""Elements of a block, ascending."""


class Scratch:
    """Arrays for one block at a time, reused: fresh pages would cost more than the coding.

    The rows for the classes hold a whole block each, 136 MiB of address space, of which only what is written to becomes
    memory: about 9 bytes a changed element of the busiest block so far.
    """

    _free: list["Scratch"] = []  # noqa: RUF012

    def __init__(self) -> None:
        # Rows a power of two apart would fall on the same cache sets.
        row = BLOCK_ELEMENTS + 272
        self.gaps = np.empty((CLASSES, row), np.uint32)
        self.diffs = np.empty((CLASSES, row), np.int32)
        self.numbers = np.empty((3, row), np.uint32)
        self.positions = np.empty(BLOCK_ELEMENTS + LANES, np.uint32)
        self.bits = np.empty(BLOCK_ELEMENTS + LANES, np.uint32)
        self.words = np.zeros(BLOCK_ELEMENTS * 40 // 64 + 256, np.uint64)
        self.state = np.empty((3, CLASSES), np.int64)
        self.masks = np.empty(TILE_WORDS * CLASSES, np.uint64)
        self.seen = np.empty((TILE_WORDS + 1) * CLASSES, np.int64)
        self.pending = np.empty(TILE_WORDS * LANES, np.int32)
        self.histogram = np.empty(256, np.int64)
        self.tails = np.empty((3, LANES), np.uint32)

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *error: object) -> None:
        self._free.append(self)

    @classmethod
    def take(cls) -> "Scratch":
        """One that no other thread is using; `with` gives it back. Lists are safe to share between threads."""
        try:
            return cls._free.pop()
        except IndexError:
            return cls()


def exponent_of(dtype: DType) -> tuple[int, int, int]:
    """(shift, mask, flip): where the exponent is, and which bits a negative number's ordinal inverts."""
    flip = (1 << (dtype.width - 1)) - 1 if dtype.is_float else 0
    return dtype.exponent_shift or 0, dtype.exponent_mask or 0, flip


def choose_top(scratch: Scratch, old: Bits, dtype: DType) -> int:
    """The largest exponent that, with those above it, at least 2 % of a sample have; they share class 0.

    Rarer ones need no class of their own, and every class below is then one exponent wide.
    """
    shift, mask, _ = exponent_of(dtype)
    if mask == 0:
        return 0
    return find_top(scratch.bits.view(dtype.bits), old.ctypes.data, old.size, shift, mask, scratch.histogram)


def tail(scratch: Scratch, row: int, values: Bits, dtype: DType) -> Bits:
    """The last, incomplete word of `values`, padded with zeros to 64 elements."""
    padded = scratch.tails[row].view(dtype.bits)[:LANES]
    left = values.size % LANES
    padded[:left] = values[values.size - left :]
    padded[left:] = 0
    return padded


def check(old: Bits, dtype: DType) -> None:
    assert old.ndim == 1
    assert old.dtype == dtype.bits
    assert old.size <= BLOCK_ELEMENTS
    assert old.flags.c_contiguous


def taken(words: NDArray[np.uint64], end: int) -> bytes:
    """The first `end` bits of `words` as bytes; `words` is all zeros again."""
    assert end > 0, "more than 40 bits an element: see Scratch.words"
    used = (end + 63) >> 6
    payload = words[:used].view(np.uint8)[: (end + 7) >> 3].tobytes()
    words[: used + 1] = 0
    return payload


def read_bits(
    coder: str, scratch: Scratch, payload: bytes | memoryview, planes: Callable[[NDArray[np.uint64], int], int]
) -> None:
    """Have `planes(words, end)` read the payload after its first byte: the bit after it, or -field.

    Raises `PeerError` of this coder unless it takes all of it.
    """
    words = scratch.words
    if not 2 <= len(payload) <= words.nbytes - 16:
        raise PeerError(f"{coder}.length: {len(payload)} bytes")
    end = 8 * len(payload)
    used = (end + 63) >> 6
    words.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
    try:
        at = planes(words, end)
    finally:
        words[: used + 1] = 0  # the encoder counts on zeros, and so does whoever reads a last word half filled
    if at < 0:
        raise PeerError(f"{coder}.{FIELDS[-at]}: not what an encoder writes")
    if (at + 7) >> 3 != len(payload):
        raise PeerError(f"{coder}.end: {len(payload)} bytes, of which {(at + 7) >> 3} say something")
    if at & 7 and payload[-1] >> (at & 7):
        raise PeerError(f"{coder}.padding: not zero")
