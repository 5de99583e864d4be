"""Where a checkpoint tensor's elements are live: boxes, affine on both sides.

A box is one copy that a weight loader would make: `shape` elements, from strided places of the checkpoint tensor to
strided places of a live storage. vLLM's loaders split tensors (tensor parallelism) and concatenate them (qkv, gate and
up), so a tensor has any number of boxes on a rank.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Box"]


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Box:
    """One box. Offsets and strides are in elements. `storage`: the live storage's number."""

    storage: int
    shape: tuple[int, ...]
    live_offset: int
    live_strides: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def last(self) -> int:
        """The flat checkpoint index of the box's last element."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def shift(self) -> int | None:
        """Live place minus checkpoint place, if the box is one contiguous run on both sides; else None."""
        run = _contiguous(self.shape)
        live = [i for i, size in enumerate(self.shape) if size > 1]
        one_run = all(self.strides[i] == run[i] == self.live_strides[i] for i in live)
        return self.live_offset - self.offset if one_run else None

    def map(self, indices: NDArray[np.int64]) -> tuple[slice | NDArray[np.int64], NDArray[np.int64]]:
        """(which of `indices` are in the box, their places in the live storage). `indices`: flat, ascending."""
        if (shift := self.shift) is not None:
            lo, hi = np.searchsorted(indices, (self.offset, self.offset + self.elements)).tolist()
            return slice(lo, hi), indices[lo:hi] + shift
        lo, hi = np.searchsorted(indices, (self.offset, self.last + 1)).tolist()
        rest = indices[lo:hi] - self.offset
        place = np.full(rest.shape, self.live_offset, np.int64)
        inside = np.ones(rest.shape, bool)
        for axis in sorted(range(len(self.shape)), key=lambda i: -self.strides[i]):
            if self.shape[axis] == 1:
                continue
            at = rest // self.strides[axis]
            inside &= at < self.shape[axis]
            rest = rest - at * self.strides[axis]
            place += at * self.live_strides[axis]
        inside &= rest == 0
        chosen = np.flatnonzero(inside)
        return chosen + lo, place[chosen]

    def rows(self, row: int, start: int, count: int) -> "Box | None":
        """The part of the box within checkpoint elements [start, start + count); None when it is empty.

        Both must be multiples of `row`, the elements of a row. Raises `ValueError` for a box that does not divide by
        rows.
        """
        if self.last < start or self.offset >= start + count or not self.elements:
            return None
        if start <= self.offset and self.last < start + count:
            return self
        if (shift := self.shift) is not None:
            lo, hi = max(self.offset, start), min(self.offset + self.elements, start + count)
            return Box(self.storage, (hi - lo,), lo + shift, (1,), lo, (1,))
        inner = self.last - self.offset - (self.shape[0] - 1) * self.strides[0]
        if self.strides[0] != row or self.offset % row + inner >= row:
            raise ValueError("a box that does not divide by rows")
        first = max(0, start // row - self.offset // row)
        end = min(self.shape[0], (start + count) // row - self.offset // row)
        return Box(
            self.storage,
            (end - first, *self.shape[1:]),
            self.live_offset + first * self.live_strides[0],
            self.live_strides,
            self.offset + first * self.strides[0],
            self.strides,
        )
