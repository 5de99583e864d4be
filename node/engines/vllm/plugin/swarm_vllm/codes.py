"""The order in which vLLM's kernel on CPUs keeps packed 4-bit codes, checked by marks.

A checkpoint's word (int32) has 8 codes of one row of a matrix. A word of the kernel has the codes of 8 rows in one
column, and words are in blocks of 16 rows: (rows / 16, columns, 2). So a code moves by itself, and a word is written by
way of the bits that change in it. Nothing of this is taken on trust: the number of every code goes through the kernel's
own code in digits of 4 bits, and must come out where this map has it.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from .packing import NotMoved

__all__ = ["CODES_A_WORD", "CodePacking", "learn_codes"]

CODES_A_WORD: Final = 8
_BLOCK: Final = 16
"""Rows of a block, in two words for each column."""
_SHIFTS: Final = np.arange(0, 32, 4, dtype=np.uint32)
_SLAB: Final = 1 << 20
"""Codes that are numbered at a time."""

Process = Callable[[torch.Tensor], torch.Tensor]
"""A kernel's own code: the words that it keeps, of the words of a checkpoint, which it may change."""


class CodePacking:
    """Where the codes of a matrix of `columns` columns are in the kernel's memory. Places are of words."""

    def __init__(self, columns: int) -> None:
        self._columns = columns

    def _live(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Of loaded words at `places`, any shape: (the live word of each one's first code, the shift of its codes in
        live words). The other codes are in every second word after that."""
        row, word = np.divmod(places, self._columns // CODES_A_WORD)
        live = row // _BLOCK * (2 * self._columns) + word * (2 * CODES_A_WORD) + row % _BLOCK // CODES_A_WORD
        return live, (row % CODES_A_WORD * 4).astype(np.uint32)

    def read(self, live: Callable[[NDArray[np.int64]], NDArray[Any]], places: NDArray[np.int64]) -> NDArray[np.int32]:
        """The loaded words at `places`, put together from live ones. `live`: reads words of the kernel's memory."""
        first, shift = self._live(places)
        words = np.zeros(places.shape, np.uint32)
        for code in range(CODES_A_WORD):
            words |= (live(first + 2 * code).view(np.uint32) >> shift & np.uint32(15)) << _SHIFTS[code]
        return words.view(np.int32)

    def changes(
        self, flat: NDArray[Any], places: NDArray[np.int64], words: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """(live words, the bits that change in each), a pair for each code that differs from the live one.

        `flat`: the kernel's memory. `places`: of loaded words, (n,). `words`: new ones, 4 bytes each, (n,).
        """
        first, shift = self._live(places)
        at = first[:, None] + 2 * np.arange(CODES_A_WORD)
        new = words.view(np.uint32)[:, None] >> _SHIFTS
        flips = (flat.view(np.uint32)[at] >> shift[:, None] ^ new) & np.uint32(15)
        changed = flips != 0
        return at[changed], (flips << shift[:, None])[changed]

    @staticmethod
    def merged(
        flat: NDArray[Any], places: NDArray[np.int64], flips: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """What `changes` found, as (live words, ascending and each once; their new bits)."""
        order = np.argsort(places, kind="stable")
        ordered, flips = places[order], flips[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        once = ordered[starts]
        if once.size:
            flips = np.bitwise_or.reduceat(flips, starts)
        return once, flat.view(np.uint32)[once] ^ flips


def learn_codes(process: Process, rows: int, columns: int) -> CodePacking:
    """The packing of a matrix of codes. `process`: called a few times, each time with new words, int32
    (rows, columns / 8).

    Raises `NotMoved` when the kernel does not keep each code where `CodePacking` has it, and what `process` raises.
    """
    if rows % _BLOCK or columns % CODES_A_WORD:
        raise NotMoved(f"has a matrix of {rows} x {columns} codes, which blocks of {_BLOCK} rows do not fill")
    packing, words = CodePacking(columns), columns // CODES_A_WORD
    for digit in range(max(1, -(-(rows * columns - 1).bit_length() // 4))):
        marks = np.empty((rows, words), np.uint32)
        for part in _parts(rows, columns):
            marks[part] = _numbers(part, columns, digit)
        made = process(torch.from_numpy(marks.view(np.int32)))
        if made.dtype != torch.int32 or not made.is_contiguous() or made.numel() != rows * words:
            raise NotMoved("keeps codes in other words")
        flat = made.detach().reshape(-1).numpy()
        for part in _parts(rows, columns):
            places = np.arange(part.start * words, part.stop * words, dtype=np.int64).reshape(-1, words)
            if (packing.read(flat.__getitem__, places).view(np.uint32) != _numbers(part, columns, digit)).any():
                raise NotMoved("keeps codes in another order")
    return packing


def _parts(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _SLAB // columns)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _numbers(rows: slice, columns: int, digit: int) -> NDArray[np.uint32]:
    """Words whose codes are digits of the numbers of all codes of some rows: uint32 (rows, columns / 8)."""
    numbers = np.arange(rows.start * columns, rows.stop * columns, dtype=np.int64) >> 4 * digit & 15
    codes = numbers.astype(np.uint32).reshape(rows.stop - rows.start, -1, CODES_A_WORD)
    return np.bitwise_or.reduce(codes << _SHIFTS, axis=2)
