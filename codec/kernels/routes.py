# pyright: reportCallIssue=false
"""Coding of sets of experts: one binary decision an expert and set, by an arithmetic coder with learned probabilities.

The coder keeps an interval [low, low + span) of 64-bit integers, after Martin, "Range encoding" (1979), with a carry.
A decision of probability p/65536 takes the lower part of the interval. When the span is below 2^32, the encoder moves
the upper 32 bits of `low` out. All arithmetic is on integers, so both sides compute the same on every machine.

A set has exactly k of n experts, and the decisions go through the experts in order. When r are still to come among the
m left, the odds of each are its learned odds times (r / (m - r)) / (sum / (m - sum)), where `sum` is the sum of the
learned probabilities of those left. With equal probabilities p is r / m, and a set costs log2 C(n, k) bits.
"""

import numpy as np

from codec.kernels.jit import kernel

__all__ = ["NO_ROOM", "TOO_SHORT", "decode_sets", "encode_sets"]

NO_ROOM = -1
"""The coded form is longer than the buffer."""
TOO_SHORT = -2
"""The bytes end before the last set, or are not those that the encoder writes."""

ONE = 1 << 16
"""Probability 1."""
LEAST = 32
"""The least probability of a decision, and of an expert."""
FINE = 6
"""Averages have so many bits more than probabilities; otherwise those of rare experts would be rounded to 0."""
SLOW = 10
"""The average over the whole text moves by 1/2^SLOW a set at least."""
PRIOR = 16
"""Sets that the first prediction, that all are as likely, counts for."""
FAST = 4
"""The average over the last sets moves by 1/2^FAST a set."""
NEAR = 6
"""The averages from which the factor of the previous token's experts follows move by 1/2^NEAR a set."""

ZERO = np.uint64(0)
FULL = np.uint64(0xFFFFFFFFFFFFFFFF)
LOW32 = np.uint64(0xFFFFFFFF)
SMALL = np.uint64(1 << 32)
BITS16 = np.uint64(16)
BITS32 = np.uint64(32)


@kernel
def _begin(slow, fast, near, k):
    """Set the learned state: every expert is as likely, and the previous token's experts are no likelier."""
    layers, n = slow.shape
    for layer in range(layers):
        for e in range(n):
            slow[layer, e] = (k * ONE << FINE) // n
            fast[layer, e] = (k * ONE << FINE) // n
        near[layer, 0] = (k * ONE) // n
        near[layer, 1] = (k * ONE) // n


@kernel
def _predict(slow, fast, near, before, out):
    """Write the learned probability of each expert of a layer to `out`; returns their sum. `before`: 1 for those of the
    previous token, whose odds are multiplied by those of their past hits over those of the past predictions."""
    hit = min(max(np.int64(near[0]), np.int64(LEAST)), np.int64(ONE - LEAST))
    told = min(max(np.int64(near[1]), np.int64(LEAST)), np.int64(ONE - LEAST))
    up, down = (hit * (ONE - told)) >> 16, ((ONE - hit) * told) >> 16
    total = np.int64(0)
    for e in range(out.size):
        p = (7 * np.int64(slow[e]) + np.int64(fast[e])) >> (3 + FINE)
        p = min(max(p, np.int64(LEAST)), np.int64(ONE - LEAST))
        if before[e]:
            a, b = p * up, (ONE - p) * down
            p = min(max((a << 16) // (a + b + 1), np.int64(LEAST)), np.int64(ONE - LEAST))
        out[e] = p
        total += p
    return total


@kernel
def _learn(slow, fast, near, before, chosen, step, seen, k):
    """Move the averages towards the set `chosen` (1 for its experts). `step`: the slow one's, in 1/65536."""
    hits = told = np.int64(0)
    for e in range(slow.size):
        p = (7 * np.int64(slow[e]) + np.int64(fast[e])) >> (3 + FINE)
        hits += before[e] & chosen[e]
        told += before[e] * p
        target = np.int64(chosen[e]) * (ONE << FINE)
        slow[e] += ((target - np.int64(slow[e])) * step) >> 16
        fast[e] += (target - np.int64(fast[e])) >> FAST
    if seen:
        near[0] += (hits * ONE // k - np.int64(near[0])) >> NEAR
        near[1] += (told // k - np.int64(near[1])) >> NEAR


@kernel
def _share(p, total, r, m):
    """The probability, in 1/65536, that an expert of probability `p` is one of the r among m that sum to `total`."""
    rest = m * ONE - total
    a = (p * r * (rest >> 6)) >> 6
    b = ((ONE - p) * (m - r) * (total >> 6)) >> 6
    found = (a << 16) // (a + b + 1)
    return min(max(found, np.int64(LEAST)), np.int64(ONE - LEAST))


@kernel
def _even(r, m):
    """The same where all are as likely: r of m."""
    return min(max((r * ONE + (m >> 1)) // m, np.int64(1)), np.int64(ONE - 1))


@kernel
def _carry(words, count):
    """Add 1 to the number that the words so far are."""
    i = count - 1
    while i >= 0 and words[i] == 0xFFFFFFFF:
        words[i] = 0
        i -= 1
    if i >= 0:
        words[i] += np.uint32(1)


@kernel
def _last_bytes(low, span):
    """(how many bytes end the code, the 64-bit number that they begin, whether it overflowed): the shortest number
    in the interval."""
    for n in range(1, 8):
        mask = FULL >> np.uint64(8 * n)
        value = (low + mask) & ~mask
        if value - low < span:
            return n, value, value < low
    return 8, low, False


@kernel
def encode_sets(ids, n, learned, words, slow, fast, near, now, before, chosen):
    """Code the sets. Returns (words, bytes of the last number, the last number), or (NO_ROOM, 0, 0).

    `ids`: uint16, (tokens, layers, k), ascending in each set. `words`: uint32, the output. `slow`, `fast`: int32,
    (layers, n); `near`: int32, (layers, 2); `before`: uint8, (layers, n); `now`: int64, (n,); `chosen`: uint8, (n,).
    """
    tokens, layers, k = ids.shape
    low, span, count = ZERO, FULL, 0
    _begin(slow, fast, near, k)
    before[:] = 0
    for t in range(tokens):
        step = max(ONE // (t + PRIOR), ONE >> SLOW)
        for layer in range(layers):
            chosen[:] = 0
            for i in range(k):
                chosen[ids[t, layer, i]] = 1
            total = np.int64(0)
            if learned:
                total = _predict(slow[layer], fast[layer], near[layer], before[layer], now)
            r = np.int64(k)
            for e in range(n):
                m = np.int64(n - e)
                if r == 0 or r == m:
                    break
                p = _share(now[e], total, r, m) if learned else _even(r, m)
                total -= now[e]
                bound = (span >> BITS16) * np.uint64(p)
                if chosen[e]:
                    span = bound
                    r -= 1
                else:
                    low += bound
                    if low < bound:
                        _carry(words, count)
                    span -= bound
                if span < SMALL:
                    if count == words.size:
                        return NO_ROOM, 0, ZERO
                    words[count] = np.uint32(low >> BITS32)
                    count += 1
                    low <<= BITS32
                    span <<= BITS32
            if learned:
                _learn(slow[layer], fast[layer], near[layer], before[layer], chosen, step, t > 0, k)
                before[layer, :] = chosen
    length, value, over = _last_bytes(low, span)
    if over:
        _carry(words, count)
    return count, length, value


@kernel
def decode_sets(data, n, learned, ids, slow, fast, near, now, before, chosen):
    """The inverse of `encode_sets`, into `ids`. Returns 0, or TOO_SHORT.

    `data`: uint8, all bytes of the code. Writes only ids below n, ascending in each set, whatever the bytes are.
    """
    tokens, layers, k = ids.shape
    size = np.int64(data.size)
    low, span, code, at = ZERO, FULL, ZERO, np.int64(0)
    for _ in range(8):
        code = (code << np.uint64(8)) | (np.uint64(data[at]) if at < size else ZERO)
        at += 1
    _begin(slow, fast, near, k)
    before[:] = 0
    for t in range(tokens):
        step = max(ONE // (t + PRIOR), ONE >> SLOW)
        for layer in range(layers):
            chosen[:] = 0
            total = np.int64(0)
            if learned:
                total = _predict(slow[layer], fast[layer], near[layer], before[layer], now)
            r, found = np.int64(k), np.int64(0)
            for e in range(n):
                m = np.int64(n - e)
                if r == 0:
                    break
                if r == m:
                    for rest in range(e, n):
                        ids[t, layer, found] = rest
                        chosen[rest] = 1
                        found += 1
                    break
                p = _share(now[e], total, r, m) if learned else _even(r, m)
                total -= now[e]
                bound = (span >> BITS16) * np.uint64(p)
                if code < bound:
                    span = bound
                    ids[t, layer, found] = e
                    chosen[e] = 1
                    found += 1
                    r -= 1
                else:
                    low += bound
                    code -= bound
                    span -= bound
                if span < SMALL:
                    if at >= size + 8:
                        return TOO_SHORT
                    low <<= BITS32
                    span <<= BITS32
                    for _ in range(4):
                        code = (code << np.uint64(8)) | (np.uint64(data[at]) if at < size else ZERO)
                        at += 1
            if learned:
                _learn(slow[layer], fast[layer], near[layer], before[layer], chosen, step, t > 0, k)
                before[layer, :] = chosen
    length, value, _ = _last_bytes(low, span)
    if size != at - 8 + length or code != value - low:
        return TOO_SHORT
    return 0
