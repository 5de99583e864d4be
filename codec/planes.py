# pyright: reportCallIssue=false
"""Gaps and differences to bits and back: Rice codes laid out in planes.

A Rice code of parameter k writes a number as its k low bits and, in unary, the rest. A *plane* holds one kind of bits
for all numbers of a class: first every low part, then every unary part, then the signs, then the magnitudes. Planes let
each loop do one thing. Bits fill uint64 words from the least significant end. `docs/codec.md` specifies the layout.

The decoder trusts nothing: it returns a negative `-field` instead of reading or writing where it should not.
"""

import numpy as np

from codec.jit import kernel
from codec.lanes import trailing_zeros

__all__ = ["FIELDS", "read_planes", "write_planes"]

ONE = np.uint64(1)
ZERO = np.uint64(0)

FIELDS = ("", "count", "gap parameter", "mode", "exceptions", "parameter", "gaps", "signs", "magnitudes")
"""What a negative result of `read_planes` names."""
_COUNT, _GAP, _MODE, _NX, _PARAMETER, _GAPS, _SIGNS, _MAGNITUDES = range(1, 9)
_MAX_K = 31


@kernel
def _put(words, at, value, n):
    """Append the low n (0..64) bits of `value`, whose other bits are zero."""
    if n == 0:
        return at
    word, shift = at >> 6, np.uint64(at & 63)
    words[word] |= value << shift
    if (at & 63) + n > 64:
        words[word + 1] |= value >> (np.uint64(64) - shift)
    return at + n


@kernel
def _get(words, at, n):
    """The n (1..64) bits from `at`."""
    word, shift = at >> 6, np.uint64(at & 63)
    value = words[word] >> shift
    if (at & 63) + n > 64:
        value |= words[word + 1] << (np.uint64(64) - shift)
    return value if n == 64 else value & ((ONE << np.uint64(n)) - ONE)


@kernel
def _put_count(words, at, value):
    """A count below 2^21: five bits of length, then the bits below its leading one."""
    length = 0
    while value >> length:
        length += 1
    at = _put(words, at, np.uint64(length), 5)
    if length > 1:
        at = _put(words, at, np.uint64(value - (1 << (length - 1))), length - 1)
    return at


@kernel
def _best_parameter(values, n):
    """The k that makes the Rice codes of values[:n] shortest, and their bits."""
    total = np.int64(0)
    for i in range(n):
        total += values[i]
    k = 0
    while (np.int64(n) << (k + 1)) <= total and k < _MAX_K - 1:
        k += 1
    best = np.int64(1) << 62
    chosen = 0
    for candidate in range(max(0, k - 1), min(_MAX_K, k + 1) + 1):
        cost = np.int64(n) * (candidate + 1)
        for i in range(n):
            cost += values[i] >> candidate
        if cost < best:
            best = cost
            chosen = candidate
    return chosen, best


@kernel
def _put_rice(words, at, values, n, k):
    if k > 0:
        mask = (np.uint64(1) << np.uint64(k)) - ONE
        for i in range(n):
            at = _put(words, at, np.uint64(values[i]) & mask, k)
    for i in range(n):
        at += np.int64(values[i]) >> k
        words[at >> 6] |= ONE << np.uint64(at & 63)
        at += 1
    return at


@kernel
def _get_rice(words, at, end, values, n, k, most):
    """Read n numbers of at most `most` into `values`; the bit after them, or -1."""
    if at + n * (k + 1) > end:
        return -1
    if k > 0:
        for i in range(n):
            values[i] = _get(words, at, k)
            at += k
    else:
        for i in range(n):
            values[i] = 0
    if n == 0:
        return at
    word = at >> 6
    last_word = (end - 1) >> 6
    current = words[word] & (~ZERO << np.uint64(at & 63))
    before = at - 1
    for i in range(n):
        while current == ZERO:
            word += 1
            if word > last_word:
                return -1
            current = words[word]
        here = (word << 6) + trailing_zeros(current)
        current &= current - ONE
        value = np.int64(values[i]) + ((here - before - 1) << k)
        if value > most:
            return -1
        values[i] = value
        before = here
    return before + 1 if before < end else -1


@kernel
def _split(diffs, n, exceptions, sizes):
    """Where |d| > 1: gaps between such entries, and |d| - 2. Returns how many."""
    found = 0
    after = 0
    for i in range(n):
        d = np.int64(diffs[i])
        magnitude = d if d > 0 else -d
        if magnitude > 1:
            exceptions[found] = i - after
            sizes[found] = magnitude - 2
            after = i + 1
            found += 1
    return found


@kernel
def write_planes(words, capacity, at, gaps, diffs, fill, exceptions, sizes):
    """Append every class; the bit after them, or -1 when `capacity` bits could be too few.

    `words`: uint64, zero from `at` on. `gaps`: uint32[16, n]; `diffs`: int32[16, n]; `fill`: int64[16], changes.
    `exceptions`, `sizes`: uint32[n], scratch.
    """
    for c in range(fill.size):
        n = fill[c]
        if at + 64 > capacity:
            return -1
        at = _put_count(words, at, n)
        if n == 0:
            continue
        k, gap_bits = _best_parameter(gaps[c], n)
        nx = _split(diffs[c], n, exceptions, sizes)
        mode, k1, k2, value_bits = 0, 0, 0, np.int64(0)
        if nx > 0:
            k1, bits1 = _best_parameter(exceptions, nx)
            k2, bits2 = _best_parameter(sizes, nx)
            mode, value_bits = 2, bits1 + bits2
        if nx > n >> 3:
            # Many are larger than one: Rice codes of |d| - 1 for all of them may be shorter.
            _split(diffs[c], n, exceptions, sizes)
            for i in range(n):
                d = np.int64(diffs[c, i])
                exceptions[i] = (d if d > 0 else -d) - 1
            kd, bits = _best_parameter(exceptions, n)
            if bits <= value_bits:
                mode, k1, value_bits = 1, kd, bits
            else:
                _split(diffs[c], n, exceptions, sizes)
        if at + gap_bits + n + value_bits + 64 > capacity:
            return -1
        at = _put(words, at, np.uint64(k), 5)
        at = _put(words, at, np.uint64(mode), 2)
        if mode == 1:
            at = _put(words, at, np.uint64(k1), 5)
        elif mode == 2:
            at = _put_count(words, at, nx)
            at = _put(words, at, np.uint64(k1), 5)
            at = _put(words, at, np.uint64(k2), 5)
        at = _put_rice(words, at, gaps[c], n, k)
        for i in range(n):
            if diffs[c, i] < 0:
                words[at >> 6] |= ONE << np.uint64(at & 63)
            at += 1
        if mode == 1:
            at = _put_rice(words, at, exceptions, n, k1)
        elif mode == 2:
            at = _put_rice(words, at, exceptions, nx, k1)
            at = _put_rice(words, at, sizes, nx, k2)
    return at


@kernel
def _get_count(words, at, end, most):
    """(count, the bit after it); count is -1 when it is cut off, not in its shortest form or more than `most`."""
    if at + 5 > end:
        return np.int64(-1), at
    length = np.int64(_get(words, at, 5))
    at += 5
    if length == 0:
        return np.int64(0), at
    if length > 21 or at + length - 1 > end:
        return np.int64(-1), at
    value = np.int64(1) << (length - 1)
    if length > 1:
        value += np.int64(_get(words, at, length - 1))
        at += length - 1
    return (value, at) if value <= most else (np.int64(-1), at)


@kernel
def _read_class(words, at, end, gaps, diffs, n, exceptions, sizes, most, most_magnitude):
    """One class after its count; the bit after it or -field."""
    if at + 7 > end:
        return -_GAP
    k = np.int64(_get(words, at, 5))
    mode = np.int64(_get(words, at + 5, 2))
    at += 7
    if mode > 2:
        return -_MODE
    nx, k1, k2 = np.int64(0), np.int64(0), np.int64(0)
    if mode == 2:
        nx, at = _get_count(words, at, end, n)
        if nx < 1:
            return -_NX
    if mode > 0:
        if at + 5 * mode > end:
            return -_PARAMETER
        k1 = np.int64(_get(words, at, 5))
        at += 5
        if mode == 2:
            k2 = np.int64(_get(words, at, 5))
            at += 5
    at = _get_rice(words, at, end, gaps, n, k, most)
    if at < 0:
        return -_GAPS
    if at + n > end:
        return -_SIGNS
    for i in range(n):
        diffs[i] = 1 - 2 * np.int64((words[at >> 6] >> np.uint64(at & 63)) & ONE)
        at += 1
    if mode == 1:
        at = _get_rice(words, at, end, sizes, n, k1, most_magnitude - 1)
        if at < 0:
            return -_MAGNITUDES
        for i in range(n):
            diffs[i] = np.int64(diffs[i]) * (np.int64(sizes[i]) + 1)
    elif mode == 2:
        at = _get_rice(words, at, end, exceptions, nx, k1, n)
        if at < 0:
            return -_MAGNITUDES
        at = _get_rice(words, at, end, sizes, nx, k2, most_magnitude - 2)
        if at < 0:
            return -_MAGNITUDES
        where = np.int64(-1)
        for i in range(nx):
            where += np.int64(exceptions[i]) + 1
            if where >= n:
                return -_MAGNITUDES
            diffs[where] = np.int64(diffs[where]) * (np.int64(sizes[i]) + 2)
    return at


@kernel
def read_planes(words, at, end, gaps, diffs, fill, exceptions, sizes, elements, most_magnitude):
    """The other way; the bit after the last class, or -field (see `FIELDS`) for bytes that no encoder wrote.

    `end`: bits in the payload. `elements`: in the block; bounds the sum of all counts, and each gap.
    `most_magnitude`: 2^(width - 1), the largest |difference| modulo 2^width.
    """
    left = np.int64(elements)
    for c in range(fill.size):
        n, at = _get_count(words, at, end, left)
        if n < 0:
            return -_COUNT
        fill[c] = n
        left -= n
        if n == 0:
            continue
        at = _read_class(words, at, end, gaps[c], diffs[c], n, exceptions, sizes, elements, most_magnitude)
        if at < 0:
            return at
    return at
