# pyright: reportCallIssue=false
"""rANS codes of bytes, with frequencies that stand in the payload: the planes of new values (`codec.values`).

A *table* gives each of the 256 symbols a frequency; all frequencies add up to 4096. Four states of 32 bits take turns,
so that a processor works on four symbols at once, and exchange 16 bits at a time with one stream of words. The state
machine is that of J. Duda, "Asymmetric numeral systems" (arXiv:1311.2540), with the tables of F. Giesen, "Interleaved
entropy coders" (arXiv:1402.3392). `docs/codec.md` specifies the bytes.

The readers check every bound: for malformed bytes they return -1 and never read or write outside of the buffers. They
need 16 bytes of buffer after the last word.
"""

import numpy as np

from codec.kernels.codes import get, get_numbers, plan_numbers, put, put_numbers
from codec.kernels.jit import kernel

__all__ = [
    "SCALE",
    "SYMBOLS",
    "count_pairs",
    "get_stream",
    "get_table",
    "join_planes",
    "plan_table",
    "put_runs",
    "put_stream",
    "put_table",
    "split_planes",
]

SYMBOLS = 256
SCALE = 4096
"""What the frequencies of a table add up to."""
_LEAST = np.uint64(1 << 16)
"""A state is at least this between two symbols; it is below 2^32."""

_EVEN, _ONE, _LISTED = range(3)
"""The forms of a table: every symbol equally often; one symbol only; a list of frequencies."""


@kernel
def split_planes(values, turn, planes):
    """Write the bytes of each value into `planes`, uint8 (itemsize, n), the most significant ones first.

    `turn`: 1 where the top bit becomes the lowest one; 0 where bits stay.
    """
    size = planes.shape[0]
    for i in range(values.size):
        value = np.uint64(values[i])
        if turn:
            value = value << np.uint64(1) | value >> np.uint64(8 * size - 1)
        for level in range(size):
            planes[level, i] = value >> np.uint64(8 * (size - 1 - level))


@kernel
def join_planes(planes, turn, values):
    """The inverse of `split_planes`, into `values`."""
    size = planes.shape[0]
    for i in range(values.size):
        value = np.uint64(0)
        for level in range(size):
            value = value << np.uint64(8) | np.uint64(planes[level, i])
        if turn:
            value = value >> np.uint64(1) | (value & np.uint64(1)) << np.uint64(8 * size - 1)
        values[i] = value


@kernel
def put_runs(values, ends, sizes, into):
    """Copy `values` into runs of `into`. `ends`, `sizes`: int64, of each run; the caller has checked that they fit."""
    taken = 0
    for run in range(ends.size):
        first = ends[run] - sizes[run]
        for i in range(sizes[run]):
            into[first + i] = values[taken + i]
        taken += sizes[run]


@kernel
def count_pairs(above, places, symbols, counts):
    """Add 1 to `counts[places[above[i]], symbols[i]]` for each i; to `counts[0, symbols[i]]` if `above` is empty.

    `above`, `symbols`: uint8 (n,). `places`: uint8 (256,). `counts`: int64 (contexts, 256).
    """
    if above.size == 0:
        for i in range(symbols.size):
            counts[0, symbols[i]] += 1
    else:
        for i in range(symbols.size):
            counts[places[above[i]], symbols[i]] += 1


@kernel
def _normalise(counts, total, frequencies):
    """Frequencies that add up to `SCALE`, at least 1 for each symbol that occurs; `total`: the sum of `counts`."""
    left = np.int64(SCALE)
    for s in range(SYMBOLS):
        frequencies[s] = 0
        if counts[s] > 0:
            frequencies[s] = max(np.int64(1), (counts[s] * SCALE + total // 2) // total)
            left -= np.int64(frequencies[s])
    while left != 0:
        # The symbol whose code grows least, or shrinks most, by one step. A step of rounding is at most 256 steps.
        chosen, best = -1, 0.0
        for s in range(SYMBOLS):
            f = np.float64(frequencies[s])
            if f == 0.0 or (left < 0 and f == 1.0):
                continue
            gain = counts[s] * np.log2((f + 1.0) / f) if left > 0 else counts[s] * np.log2((f - 1.0) / f)
            if chosen < 0 or gain > best:
                chosen, best = s, gain
        step = 1 if left > 0 else -1
        frequencies[chosen] = np.int64(frequencies[chosen]) + step
        left -= step


@kernel
def plan_table(counts, frequencies, gaps, excess):
    """The table with which symbols that occur `counts` times take the fewest bits: (form, bits, table included).

    `counts`: int64 (256,). `frequencies`: uint32 (256,), receives the table's. `gaps`, `excess`: uint32 scratch (256,).
    """
    total, found, last = np.int64(0), 0, 0
    for s in range(SYMBOLS):
        total += counts[s]
        if counts[s] > 0:
            found += 1
            last = s
    if found <= 1:
        for s in range(SYMBOLS):
            frequencies[s] = 0
        frequencies[last] = SCALE
        return _ONE, np.float64(10)
    _normalise(counts, total, frequencies)
    bits = np.float64(2 + plan_numbers(frequencies, SYMBOLS, gaps, excess)[1])
    for s in range(SYMBOLS):
        if counts[s] > 0:
            bits += counts[s] * (12.0 - np.log2(np.float64(frequencies[s])))
    if bits >= 8.0 * total + 2:
        for s in range(SYMBOLS):
            frequencies[s] = SCALE // SYMBOLS
        return _EVEN, 8.0 * total + 2
    return _LISTED, bits


@kernel
def put_table(words, capacity, at, form, frequencies, gaps, excess):
    """Append a table; the position after it, or -1 if `capacity` (bits) could be too small."""
    if at + 128 > capacity:
        return np.int64(-1)
    at = put(words, at, np.uint64(form), 2)
    if form == _LISTED:
        return put_numbers(words, capacity, at, frequencies, SYMBOLS, gaps, excess)
    if form == _ONE:
        for s in range(SYMBOLS):
            if frequencies[s] > 0:
                return put(words, at, np.uint64(s), 8)
    return at


@kernel
def get_table(words, at, end, slots, frequencies, gaps, excess):
    """Read a table; the position after it, or -1.

    `slots`: uint32 (4096,), receives for each slot its symbol, frequency - 1 and place within the symbol's slots, from
    the low bits up in 8, 12 and 12 bits. `frequencies`, `gaps`, `excess`: uint32 scratch (256,).
    """
    if at + 2 > end:
        return np.int64(-1)
    form = np.int64(get(words, at, 2))
    at += 2
    if form == _LISTED:
        at = get_numbers(words, at, end, frequencies, SYMBOLS, gaps, excess, SCALE)
        if at < 0:
            return at
    elif form == _EVEN:
        for s in range(SYMBOLS):
            frequencies[s] = SCALE // SYMBOLS
    elif form == _ONE and at + 8 <= end:
        for s in range(SYMBOLS):
            frequencies[s] = 0
        frequencies[np.int64(get(words, at, 8))] = SCALE
        at += 8
    else:
        return np.int64(-1)
    total = np.int64(0)
    for s in range(SYMBOLS):
        total += np.int64(frequencies[s])
    if total != SCALE:
        return np.int64(-1)
    slot = 0
    for s in range(SYMBOLS):
        f = np.int64(frequencies[s])
        for place in range(f):
            slots[slot] = s | (f - 1) << 8 | place << 20
            slot += 1
    return at


@kernel
def put_stream(halves, symbols, above, places, frequencies):
    """Code `symbols` into the end of `halves`; the index of the first used element.

    `halves`: uint16, with room for n + 8. `symbols`: uint8 (n,). `above`: uint8 (n,), or empty; `places[above[i]]` is
    the context, else 0. `frequencies`: uint32 (contexts, 256); those of symbols that occur are not 0.
    """
    starts = np.zeros(frequencies.shape, np.uint64)
    for c in range(frequencies.shape[0]):
        for s in range(1, SYMBOLS):
            starts[c, s] = starts[c, s - 1] + np.uint64(frequencies[c, s - 1])
    states = np.full(4, _LEAST)
    at = halves.size
    for back in range(symbols.size):
        i = symbols.size - 1 - back
        c, s = np.int64(places[above[i]]) if above.size > 0 else 0, symbols[i]
        f, x = np.uint64(frequencies[c, s]), states[i & 3]
        if x >= f << np.uint64(20):
            at -= 1
            halves[at] = x & np.uint64(0xFFFF)
            x >>= np.uint64(16)
        states[i & 3] = (x // f << np.uint64(12)) + x % f + starts[c, s]
    for back in range(4):
        state = states[3 - back]
        at -= 2
        halves[at] = state & np.uint64(0xFFFF)
        halves[at + 1] = state >> np.uint64(16)
    return at


@kernel
def get_stream(halves, at, last, symbols, above, places, slots):
    """The inverse of `put_stream`: the index after the stream, or -1.

    `halves`: uint16; the stream begins at `at` and ends at `last` or before. `symbols`: uint8 (n,), receives the
    result. `above`, `places`: as for `put_stream`. `slots`: uint32 (contexts, 4096).
    """
    if at + 8 > last:
        return np.int64(-1)
    low, half, twelve, twenty, eight = np.uint64(4095), np.uint64(16), np.uint64(12), np.uint64(20), np.uint64(8)
    a = np.uint64(halves[at]) | np.uint64(halves[at + 1]) << half
    b = np.uint64(halves[at + 2]) | np.uint64(halves[at + 3]) << half
    c = np.uint64(halves[at + 4]) | np.uint64(halves[at + 5]) << half
    d = np.uint64(halves[at + 6]) | np.uint64(halves[at + 7]) << half
    if a < _LEAST or b < _LEAST or c < _LEAST or d < _LEAST:
        return np.int64(-1)
    at += 8
    n, mixed, one = symbols.size, above.size > 0, slots[0]
    whole = n & ~3
    for i in range(0, whole, 4):
        if mixed:
            ta = np.uint64(slots[places[above[i]], a & low])
            tb = np.uint64(slots[places[above[i + 1]], b & low])
            tc = np.uint64(slots[places[above[i + 2]], c & low])
            td = np.uint64(slots[places[above[i + 3]], d & low])
        else:
            ta, tb = np.uint64(one[a & low]), np.uint64(one[b & low])
            tc, td = np.uint64(one[c & low]), np.uint64(one[d & low])
        symbols[i], symbols[i + 1], symbols[i + 2], symbols[i + 3] = ta, tb, tc, td
        a = ((ta >> eight & low) + np.uint64(1)) * (a >> twelve) + (ta >> twenty)
        b = ((tb >> eight & low) + np.uint64(1)) * (b >> twelve) + (tb >> twenty)
        c = ((tc >> eight & low) + np.uint64(1)) * (c >> twelve) + (tc >> twenty)
        d = ((td >> eight & low) + np.uint64(1)) * (d >> twelve) + (td >> twenty)
        more = a < _LEAST
        a = a << half | np.uint64(halves[at]) if more else a
        at += more
        more = b < _LEAST
        b = b << half | np.uint64(halves[at]) if more else b
        at += more
        more = c < _LEAST
        c = c << half | np.uint64(halves[at]) if more else c
        at += more
        more = d < _LEAST
        d = d << half | np.uint64(halves[at]) if more else d
        at += more
        if at > last:
            return np.int64(-1)
    for i in range(whole, n):
        t = np.uint64(slots[places[above[i]] if mixed else 0, a & low])
        symbols[i] = t
        x = ((t >> eight & low) + np.uint64(1)) * (a >> twelve) + (t >> twenty)
        if x < _LEAST:
            x = x << half | np.uint64(halves[at])
            at += 1
        a, b, c, d = b, c, d, x  # the others take their turns
    if at > last or a != _LEAST or b != _LEAST or c != _LEAST or d != _LEAST:
        return np.int64(-1)
    return np.int64(at)
