# pyright: reportCallIssue=false
"""The planes of a payload: counts, gaps, signs and magnitudes of each class (rice); or positions, then values (pco).

`docs/codec.md` specifies the layout. The readers check every bound: for malformed bytes they return the negative index
of a field in `FIELDS`, and never read or write outside of the buffers.
"""

import numpy as np

from codec.kernels.codes import (
    get_count,
    get_golomb,
    get_numbers,
    plan_golomb,
    plan_numbers,
    put,
    put_count,
    put_golomb,
    put_numbers,
)
from codec.kernels.jit import kernel
from codec.kernels.lanes import bit_length, element

__all__ = ["FIELDS", "read_planes", "read_positions", "read_values", "write_planes", "write_positions", "write_values"]

ZERO = np.uint64(0)
LAST = np.uint64(63)

FIELDS = ("", "count", "gaps", "signs", "magnitudes")
"""The names of the fields; a reader that fails returns the negative index."""
_COUNT, _GAPS, _SIGNS, _MAGNITUDES = range(1, 5)


@kernel
def _put_diffs(words, capacity, at, row, n, scratch):
    """Append the signs, then the magnitudes less one, of n differences; the position after them, or -1 if too long."""
    sizes = scratch[0]
    if at + n + 64 > capacity:
        return np.int64(-1)
    for start in range(0, n, 64):
        falls, here = ZERO, min(np.int64(64), n - start)
        for i in range(here):  # without a branch: half of the signs are negative, and no processor can predict which
            d = np.int64(row[start + i])
            falls |= (np.uint64(d) >> LAST) << np.uint64(i)
            sizes[start + i] = abs(d) - 1
        at = put(words, at, falls, here)
    return put_numbers(words, capacity, at, sizes, n, scratch[1], scratch[2])


@kernel
def _get_diffs(words, at, end, row, n, scratch, most_magnitude):
    """The inverse of `_put_diffs`; the position after the differences, or -field."""
    sizes = scratch[0]
    signs = at
    if at + n > end:
        return np.int64(-_SIGNS)
    at = get_numbers(words, at + n, end, sizes, n, scratch[1], scratch[2], most_magnitude - 1)
    if at < 0:
        return np.int64(-_MAGNITUDES)
    for start in range(0, n, 32):
        falls = element(words, words.ctypes.data + (signs >> 3), 0) >> (signs & 7)
        signs += 32
        for i in range(start, min(start + 32, n)):
            sign = -(falls >> (i - start) & 1)
            row[i] = (np.int64(sizes[i]) + 1 ^ sign) - sign
    return at


@kernel
def write_planes(words, capacity, at, gaps, diffs, fill, scratch):
    """Append every class; the position after them, or -1 if `capacity` (bits) could be too small.

    `words`: uint64, zero from `at` on. `gaps`: uint32[16, n]. `diffs`: int32[16, n]. `fill`: int64[16], the number of
    changes in each class. `scratch`: uint32[3, n].
    """
    for c in range(fill.size):
        n = fill[c]
        if at + 64 > capacity:
            return np.int64(-1)
        at = put_count(words, at, n)
        if n == 0:
            continue
        at = put_numbers(words, capacity, at, gaps[c], n, scratch[1], scratch[2])
        if at < 0:
            return at
        at = _put_diffs(words, capacity, at, diffs[c], n, scratch)
        if at < 0:
            return at
    return at


@kernel
def read_planes(words, at, end, gaps, diffs, fill, scratch, elements, most_magnitude):
    """The inverse of `write_planes`; the position after the last class, or -field for bytes that no encoder writes.

    `end`: bits in the payload. `elements`: elements in the block; bounds the sum of all counts, and each gap.
    `most_magnitude`: 2^(width - 1), the largest |difference| modulo 2^width.
    """
    left = np.int64(elements)
    for c in range(fill.size):
        n, at = get_count(words, at, end, left)
        if n < 0:
            return np.int64(-_COUNT)
        fill[c] = n
        left -= n
        if n == 0:
            continue
        at = get_numbers(words, at, end, gaps[c], n, scratch[1], scratch[2], elements)
        if at < 0:
            return np.int64(-_GAPS)
        at = _get_diffs(words, at, end, diffs[c], n, scratch, most_magnitude)
        if at < 0:
            return at
    return at


@kernel
def write_values(words, capacity, at, diffs, fill, scratch):
    """Append the differences of every class as `write_planes` does, without counts and gaps."""
    for c in range(fill.size):
        if fill[c] > 0:
            at = _put_diffs(words, capacity, at, diffs[c], fill[c], scratch)
            if at < 0:
                return at
    return at


@kernel
def read_values(words, at, end, diffs, fill, scratch, most_magnitude):
    """The inverse of `write_values`; the caller has counted `fill`. Returns as `read_planes` does."""
    for c in range(fill.size):
        if fill[c] > 0:
            at = _get_diffs(words, at, end, diffs[c], fill[c], scratch, most_magnitude)
            if at < 0:
                return at
    return at


@kernel
def write_positions(words, capacity, at, positions, scratch):
    """Append the number of positions and the gaps between them; the position after them, or -1 if too long."""
    n = positions.size
    gaps = scratch[0]
    after = np.int64(0)
    for i in range(n):
        gaps[i] = np.int64(positions[i]) - after
        after = np.int64(positions[i]) + 1
    at = put_count(words, at, np.int64(n))
    m, bits = plan_golomb(gaps, n)
    if plan_numbers(gaps, n, scratch[1], scratch[2])[1] < bits + 4 + bit_length(np.uint64(m)):  # clustered changes
        at = put(words, at, np.uint64(1), 1)
        return put_numbers(words, capacity, at, gaps, n, scratch[1], scratch[2])
    if at + bits + 128 > capacity:
        return np.int64(-1)
    at = put_count(words, put(words, at, ZERO, 1), m)
    return put_golomb(words, at, gaps, n, m)


@kernel
def read_positions(words, at, end, positions, scratch, elements):
    """The inverse of `write_positions`: (count, the position after), or (0, -field). `positions`: uint32[elements]."""
    n, at = get_count(words, at, end, elements)
    if n < 1 or at + 1 > end:
        return np.int64(0), np.int64(-_COUNT)
    clustered = element(words, words.ctypes.data + (at >> 3), 0) >> (at & 7) & 1
    at += 1
    gaps = scratch[0]
    if clustered:
        at = get_numbers(words, at, end, gaps, n, scratch[1], scratch[2], elements)
    else:
        m, at = get_count(words, at, end, elements)
        if m < 1:
            return np.int64(0), np.int64(-_GAPS)
        at = get_golomb(words, at, end, gaps, n, m, scratch[1], elements)
    if at < 0:
        return np.int64(0), np.int64(-_GAPS)
    where = np.int64(-1)
    for i in range(n):
        where += np.int64(gaps[i]) + 1
        if where >= elements:
            return np.int64(0), np.int64(-_GAPS)
        positions[i] = where
    return n, at
