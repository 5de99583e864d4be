# pyright: reportCallIssue=false
"""Codes of lists of numbers: Rice, exp-Golomb and Golomb, laid out in planes.

A Rice code with parameter k writes the k low bits of a number, and the rest in unary. A *plane* holds one kind of bits
for many numbers: first the low bits of all, then the unary parts of all, so that each loop does one thing. A list that
is mostly zeros is split into two lists: the gaps between the non-zero numbers, and these numbers less one. Bits fill
uint64 words from the least significant end. `docs/codec.md` specifies the layout.

The readers check every bound: for malformed bytes they return -1 and never read or write outside of the buffers. All of
them need 16 bytes of buffer after `end`.
"""

import numpy as np

from codec.kernels.jit import kernel
from codec.kernels.lanes import bit_length, element, trailing_zeros

__all__ = [
    "get_count",
    "get_golomb",
    "get_numbers",
    "plan_golomb",
    "plan_numbers",
    "put",
    "put_count",
    "put_golomb",
    "put_numbers",
]

ONE = np.uint64(1)
ZERO = np.uint64(0)
SIX, LAST, WORD = np.uint64(6), np.uint64(63), np.uint64(64)

_ZEROS, _RICE, _SPLIT_RICE, _SPLIT_GAMMA = range(4)
"""The modes of a list: all zero; Rice codes; split, all in Rice codes; split, with exp-Golomb codes of the numbers."""
_MAX_K = 31


@kernel
def put(words, at, value, n):
    """Append the low n (0..64) bits of `value`, whose other bits must be zero; the position after them."""
    if n == 0:
        return at
    word, shift = at >> 6, np.uint64(at & 63)
    words[word] |= value << shift
    if (at & 63) + n > 64:
        words[word + 1] |= value >> (np.uint64(64) - shift)
    return at + n


@kernel
def get(words, at, n):
    """The n (1..64) bits at `at`."""
    word, shift = at >> 6, np.uint64(at & 63)
    value = words[word] >> shift
    if (at & 63) + n > 64:
        value |= words[word + 1] << (np.uint64(64) - shift)
    return value if n == 64 else value & ((ONE << np.uint64(n)) - ONE)


@kernel
def put_count(words, at, value):
    """Append a count below 2^21: its bit length in 5 bits, then the bits below its leading one."""
    length = bit_length(np.uint64(value))
    at = put(words, at, np.uint64(length), 5)
    if length > 1:
        at = put(words, at, np.uint64(value - (1 << (length - 1))), length - 1)
    return at


@kernel
def get_count(words, at, end, most):
    """(count, the position after it); the count is -1 if it is cut off or more than `most`."""
    if at + 5 > end:
        return np.int64(-1), at
    length = np.int64(get(words, at, 5))
    at += 5
    if length == 0:
        return np.int64(0), at
    if length > 21 or at + length - 1 > end:
        return np.int64(-1), at
    value = np.int64(1) << (length - 1)
    if length > 1:
        value += np.int64(get(words, at, length - 1))
        at += length - 1
    return (value, at) if value <= most else (np.int64(-1), at)


@kernel
def _best_rice(values, n):
    """(the k with the shortest Rice codes of values[:n], their length in bits)."""
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
def _best_gamma(values, n):
    """(the k with the shortest exp-Golomb codes of values[:n], their length in bits)."""
    best = np.int64(1) << 62
    chosen = 0
    for k in range(_MAX_K + 1):
        cost = np.int64(n) * (k + 1)
        for i in range(n):
            cost += 2 * (bit_length(np.uint64((np.int64(values[i]) >> k) + 1)) - 1)
        if cost >= best:
            break
        best = cost
        chosen = k
    return chosen, best


@kernel
def _put_low(words, at, values, n, k):
    """Append the k (1..31) low bits of each number. The current word stays in a register."""
    mask = (ONE << np.uint64(k)) - ONE
    word, used, width = np.uint64(at) >> SIX, np.uint64(at) & LAST, np.uint64(k)
    filling = words[word]
    for i in range(n):
        value = np.uint64(values[i]) & mask
        filling |= value << used
        used += width
        if used >= WORD:
            words[word] = filling
            word += ONE
            used -= WORD
            filling = value >> (width - used)
    words[word] = filling
    return at + n * k


@kernel
def _put_unary(words, at, values, n, k):
    """Append each number without its k low bits in unary: that many zeros, then a one."""
    word = np.uint64(at) >> SIX
    filling = words[word]
    for i in range(n):
        at += np.int64(values[i]) >> k
        here = np.uint64(at) >> SIX
        if here != word:
            words[word] = filling
            word = here
            filling = words[word]
        filling |= ONE << (np.uint64(at) & LAST)
        at += 1
    words[word] = filling
    return at


@kernel
def _put_rice(words, at, values, n, k):
    """Append values[:n] in Rice codes; the position after them."""
    if k > 0:
        at = _put_low(words, at, values, n, k)
    return _put_unary(words, at, values, n, k)


@kernel
def _put_gamma(words, at, values, n, k):
    """Append values[:n] in exp-Golomb codes; the position after them."""
    for i in range(n):
        at += bit_length(np.uint64((np.int64(values[i]) >> k) + 1)) - 1
        words[at >> 6] |= ONE << np.uint64(at & 63)
        at += 1
    for i in range(n):
        value = np.int64(values[i]) + (np.int64(1) << k)
        bits = bit_length(np.uint64(value)) - 1
        at = put(words, at, np.uint64(value - (np.int64(1) << bits)), bits)
    return at


@kernel
def _get_unary(words, at, end, values, n):
    """Read n unary numbers into `values`; the position after them, or -1."""
    if n == 0:
        return at
    if at >= end:
        return np.int64(-1)
    word, last = np.uint64(at) >> SIX, np.uint64(end - 1) >> SIX
    current = words[word] & (~ZERO << (np.uint64(at) & LAST))
    before = at - 1
    for i in range(n):
        while current == ZERO:
            word += ONE
            if word > last:
                return np.int64(-1)
            current = words[word]
        here = np.int64((word << SIX) + trailing_zeros(current))
        current &= current - ONE
        values[i] = here - before - 1
        before = here
    return before + 1 if before < end else np.int64(-1)


@kernel
def _get_rice(words, at, end, values, n, k, most):
    """Read n Rice codes of at most `most` into `values`; the position after them, or -1."""
    if at + n * (k + 1) > end:
        return np.int64(-1)
    low = at
    at = _get_unary(words, at + n * k, end, values, n)
    if at < 0:
        return at
    largest = np.int64(0)
    mask = (np.int64(1) << k) - 1
    for i in range(n):
        # Load 8 bytes from the byte in which the k <= 31 bits begin. The buffer extends beyond `end`.
        there = element(words, words.ctypes.data + (low >> 3), 0) >> (low & 7)
        value = np.int64(values[i]) << k | there & mask
        low += k
        largest = max(largest, value)
        values[i] = value
    return at if largest <= most else np.int64(-1)


@kernel
def _get_gamma(words, at, end, values, n, k, most):
    """Read n exp-Golomb codes of at most `most` into `values`; the position after them, or -1."""
    at = _get_unary(words, at, end, values, n)
    if at < 0:
        return at
    for i in range(n):
        bits = np.int64(values[i]) + k
        if bits > 40 or at + bits > end:
            return np.int64(-1)
        value = np.int64(1) << bits
        if bits > 0:
            value |= np.int64(get(words, at, bits))
            at += bits
        value -= np.int64(1) << k
        if value > most:
            return np.int64(-1)
        values[i] = value
    return at


@kernel
def _split(values, n, gaps, excess):
    """For each non-zero number of values[:n], write the zeros before it to `gaps` and the number less one to `excess`.

    Returns how many there are.
    """
    found = np.uint64(0)
    after = 0
    for i in range(n):
        gaps[found] = i - after
        excess[found] = values[i] - 1
        there = values[i] != 0
        found += np.uint64(there)
        after = i + 1 if there else after
    return np.int64(found)


@kernel
def plan_numbers(values, n, gaps, excess):
    """The shortest mode for values[:n]: (mode, bits, k, number of non-zero values, k1, k2).

    `gaps`, `excess`: uint32 scratch for n numbers; in the split modes they hold the two lists afterwards.
    """
    k, bits = _best_rice(values, n)
    mode, nx, k1, k2 = _RICE, np.int64(0), 0, 0
    # Of geometrically distributed numbers, about one in ten is less than 2^k / 8. If a third are, zeros or a long tail
    # make Rice codes long, so that splitting is worth a try.
    low = max(np.int64(1), (np.int64(1) << k) >> 3)
    small = np.int64(0)
    for i in range(n):
        small += values[i] < low
    bits += 7
    if 3 * small >= n:
        nx = _split(values, n, gaps, excess)
        if nx == 0:
            return _ZEROS, np.int64(2), 0, nx, 0, 0
        k1, bits1 = _best_rice(gaps, nx)
        k_rice, bits_rice = _best_rice(excess, nx)
        k_gamma, bits_gamma = _best_gamma(excess, nx)
        bits2 = bits1 + min(bits_rice, bits_gamma) + 27
        if bits2 < bits:
            bits = bits2
            mode, k2 = (_SPLIT_RICE, k_rice) if bits_rice <= bits_gamma else (_SPLIT_GAMMA, k_gamma)
    return mode, bits, k, nx, k1, k2


@kernel
def put_numbers(words, capacity, at, values, n, gaps, excess):
    """Append values[:n] in the shortest mode; the position after them, or -1 if `capacity` (bits) is too small.

    `gaps`, `excess`: uint32 scratch for n numbers.
    """
    mode, bits, k, nx, k1, k2 = plan_numbers(values, n, gaps, excess)
    if at + bits + 64 > capacity:
        return np.int64(-1)
    at = put(words, at, np.uint64(mode), 2)
    if mode == _RICE:
        at = put(words, at, np.uint64(k), 5)
        return _put_rice(words, at, values, n, k)
    if mode == _ZEROS:
        return at
    at = put_count(words, at, nx)
    at = put(words, at, np.uint64(k1), 5)
    at = put(words, at, np.uint64(k2), 5)
    at = _put_rice(words, at, gaps, nx, k1)
    if mode == _SPLIT_RICE:
        return _put_rice(words, at, excess, nx, k2)
    return _put_gamma(words, at, excess, nx, k2)


@kernel
def get_numbers(words, at, end, values, n, gaps, excess, most):
    """Read a list of n numbers of at most `most` into `values`; the position after it, or -1."""
    if at + 2 > end:
        return np.int64(-1)
    mode = np.int64(get(words, at, 2))
    at += 2
    if mode == _RICE:
        if at + 5 > end:
            return np.int64(-1)
        return _get_rice(words, at + 5, end, values, n, np.int64(get(words, at, 5)), most)
    for i in range(n):
        values[i] = 0
    if mode == _ZEROS:
        return at
    nx, at = get_count(words, at, end, n)
    if nx < 1 or at + 10 > end:
        return np.int64(-1)
    k1, k2 = np.int64(get(words, at, 5)), np.int64(get(words, at + 5, 5))
    at = _get_rice(words, at + 10, end, gaps, nx, k1, n)
    if at < 0:
        return at
    if mode == _SPLIT_RICE:
        at = _get_rice(words, at, end, excess, nx, k2, most - 1)
    else:
        at = _get_gamma(words, at, end, excess, nx, k2, most - 1)
    if at < 0:
        return at
    where = np.int64(-1)
    for i in range(nx):
        where += np.int64(gaps[i]) + 1
        if where >= n:
            return np.int64(-1)
        values[where] = np.int64(excess[i]) + 1
    return at


@kernel
def _divider(m):
    """The d with v // m == v * d >> 40 for all v and m up to 2^20, since the error, v / 2^40, is less than 1 / m."""
    return (np.int64(1) << 40) // m + 1


@kernel
def plan_golomb(values, n):
    """(the m with about the shortest Golomb codes of values[:n], their length in bits): about ln 2 times the mean."""
    total = np.int64(0)
    for i in range(n):
        total += values[i]
    m = max(np.int64(1), np.int64(0.693147 * total / n + 0.6))
    length = bit_length(np.uint64(m - 1))
    short, divider = (np.int64(1) << length) - m, _divider(m)
    bits = np.int64(n) * (length + 1)
    for i in range(n):
        value = np.int64(values[i])
        quotient = value * divider >> 40
        bits += quotient - (value - quotient * m < short)
    return m, bits


@kernel
def put_golomb(words, at, values, n, m):
    """Append values[:n] in Golomb codes: every v mod m in truncated binary, then every v // m in unary.

    A remainder below `short` takes one bit less than the others; the extra bit of the others is written last.
    """
    length = bit_length(np.uint64(m - 1))
    short, divider = (np.int64(1) << length) - m, _divider(m)
    word, used, filling = np.uint64(at) >> SIX, np.uint64(at) & LAST, words[at >> 6]
    for i in range(n if m > 1 else 0):
        value = np.int64(values[i])
        rest = value - (value * divider >> 40) * m
        longer = np.int64(rest >= short)
        rest += short * longer
        rest = rest >> longer | (rest & longer) << (length - 1)
        width = np.uint64(length - 1 + longer)
        filling |= np.uint64(rest) << used
        used += width
        if used >= WORD:
            words[word] = filling
            word += ONE
            used -= WORD
            filling = np.uint64(rest) >> (width - used)
    words[word] = filling
    at = np.int64((word << SIX) | used)
    for i in range(n):
        at += np.int64(values[i]) * divider >> 40
        words[at >> 6] |= ONE << np.uint64(at & 63)
        at += 1
    return at


@kernel
def get_golomb(words, at, end, values, n, m, rests, most):
    """Read n Golomb codes of at most `most`; the position after them, or -1. `rests`: uint32 scratch for n numbers."""
    length = bit_length(np.uint64(m - 1))
    short = (np.int64(1) << length) - m
    if at + n * (length + 1 - (short > 0)) > end:
        return np.int64(-1)
    base, mask = words.ctypes.data, (np.int64(1) << max(np.int64(0), length - 1)) - 1
    for i in range(n):
        # As in `_get_rice`. Beyond `end` this reads the zeros that follow; the check after the loop refuses that.
        there = element(words, base + (min(at, end) >> 3), 0) >> (at & 7)
        rest = there & mask
        longer = np.int64(rest >= short) if length > 0 else np.int64(0)
        rests[i] = (rest << 1 | there >> (length - 1) & 1) - short if longer else rest
        at += length - 1 + longer if length > 0 else 0
    if at > end:
        return np.int64(-1)
    at = _get_unary(words, at, end, values, n)
    if at < 0:
        return at
    for i in range(n):
        value = np.int64(values[i]) * m + np.int64(rests[i])
        if value > most:
            return np.int64(-1)
        values[i] = value
    return at
