"""Scratch arrays that both coders reuse for each block, and the bit strings of payloads in them."""

import contextlib
import math
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits, DType
from codec.errors import PeerError
from codec.kernels.lanes import CLASSES, LANES
from codec.kernels.planes import FIELDS
from codec.kernels.scan import TILE_WORDS, find_top
from codec.layout import BLOCK_ELEMENTS

__all__ = ["Positions", "Scratch", "check", "choose_top", "exponent_of", "read_payload", "tail", "take_payload"]

Positions = NDArray[np.uint32]
"""Indices of elements in a block, ascending."""


class Scratch:
    """Arrays for one block at a time. They are reused, since faulting in fresh pages would cost more than the coding.

    The row of each class holds a whole block: 136 MiB of address space together. Only pages that are written to use
    memory: about 9 bytes per changed element of the block with the most changes so far.
    """

    _free: list["Scratch"] = []  # noqa: RUF012

    def __init__(self) -> None:
        # With a power of two between them, the starts of all rows would share the same cache sets.
        row = BLOCK_ELEMENTS + 272
        self.gaps = _sparse((CLASSES, row), np.uint32)
        self.diffs = _sparse((CLASSES, row), np.int32)
        self.numbers = _sparse((3, row), np.uint32)
        self.positions = _sparse((BLOCK_ELEMENTS + LANES,), np.uint32)
        self.bits = _sparse((BLOCK_ELEMENTS + LANES,), np.uint32)
        self.words = _sparse((BLOCK_ELEMENTS * 40 // 64 + 256,), np.uint64)
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
        """Arrays that no other thread uses; leaving `with` returns them. List operations are atomic between threads."""
        try:
            return cls._free.pop()
        except IndexError:
            return cls()


def _sparse(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array of zeros that uses memory only where it is written, in pages of the smallest size.

    `np.empty` asks the system for huge pages: 2 MiB for the first few numbers of each row, 70 MiB a thread together.
    """
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that has no huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


def exponent_of(dtype: DType) -> tuple[int, int, int]:
    """(shift, mask, flip): the position of the exponent, and the bits that `ordinal` flips in a negative number."""
    flip = (1 << (dtype.width - 1)) - 1 if dtype.is_float else 0
    return dtype.exponent_shift or 0, dtype.exponent_mask or 0, flip


def choose_top(scratch: Scratch, old: Bits, dtype: DType) -> int:
    """The largest exponent e such that at least 2 % of a sample have exponents of e or more; these share class 0.

    Rarer exponents need no class of their own. Each of the classes 1 to 14 is one exponent.
    """
    shift, mask, _ = exponent_of(dtype)
    if mask == 0:
        return 0
    return find_top(scratch.bits.view(dtype.bits), old.ctypes.data, old.size, shift, mask, scratch.histogram)


def tail(scratch: Scratch, row: int, values: Bits, dtype: DType) -> Bits:
    """The last, incomplete group of `values`, padded with zeros to 64 elements, in row `row` of `scratch.tails`."""
    padded = scratch.tails[row].view(dtype.bits)[:LANES]
    left = values.size % LANES
    padded[:left] = values[values.size - left :]
    padded[left:] = 0
    return padded


def check(old: Bits, dtype: DType) -> None:
    """Assert that an array is one that the kernels can address: flat, contiguous, of `dtype`, at most a block."""
    assert old.ndim == 1
    assert old.dtype == dtype.bits
    assert old.size <= BLOCK_ELEMENTS
    assert old.flags.c_contiguous


def take_payload(words: NDArray[np.uint64], end: int) -> bytes:
    """The first `end` bits of `words` as bytes. Sets `words` back to zeros for the next block."""
    assert end > 0, "more than 40 bits per element: see Scratch.words"
    used = (end + 63) >> 6
    payload = words[:used].view(np.uint8)[: (end + 7) >> 3].tobytes()
    words[: used + 1] = 0
    return payload


def read_payload(
    coder: str, scratch: Scratch, payload: bytes | memoryview, planes: Callable[[NDArray[np.uint64], int], int]
) -> None:
    """Call `planes(words, end)` on the payload's bits; it returns the position after the last bit read, or -field.

    Raises `PeerError`, which begins with `coder`, if `planes` fails or does not read the whole payload.
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
        words[: used + 1] = 0  # the encoder, and the reader of a half-filled last word, rely on zeros
    if at < 0:
        raise PeerError(f"{coder}.{FIELDS[-at]}: not what an encoder writes")
    if (at + 7) >> 3 != len(payload):
        raise PeerError(f"{coder}.end: {len(payload)} bytes, of which {(at + 7) >> 3} are used")
    if at & 7 and payload[-1] >> (at & 7):
        raise PeerError(f"{coder}.padding: not zero")
