# pyright: reportCallIssue=false
"""Passes over a block: which elements changed, counted inside the classes of their old exponents.

Every kernel takes whole words of 64 elements; `codec.rice` pads the tail. Nothing here allocates.
"""

import numpy as np

from codec.jit import kernel
from codec.lanes import (
    class_mask,
    count_classes,
    countdown_classes,
    element,
    negatives,
    planes,
    planes_and_copy,
    popcount,
    put_element,
    select_bit,
    trailing_zeros,
)

__all__ = ["NEVER", "exponents", "scan_decode", "scan_encode", "scatter"]

ONE = np.uint64(1)
ZERO = np.uint64(0)
NEVER = 1 << 62
"""Elements until the next change of a class that has no more."""


@kernel
def exponents(like, words, n, shift, mask, histogram):
    """Count the exponents of a sample of `n` elements: one run of 64 in 4096, so whole cache lines, evenly spread.

    `histogram`: int64[256], zeroed here.
    """
    histogram[:] = 0
    step = 4096 if n >= 65536 else 64
    for start in range(0, n, step):
        for i in range(start, min(start + 64, n)):
            histogram[(element(like, words, i) >> shift) & mask] += 1


@kernel
def scan_encode(like, old, new, n_words, first, shift, mask, top, flip, state, gaps, diffs, positions, start):
    """Write each change's gap and ordinal difference to its class's row; the number of changes from `start` on.

    `like`: array of the element type. `old`, `new`: addresses. `first`: index of the first element (its position).
    `flip`: magnitude bits to invert in a negative float's ordinal, 0 for integers.
    `state`: int64[3, 16]: elements seen, rank after the last change, changes, by class; carried from call to call.
    `gaps`: uint32[16, n], unchanged elements of the class since its last change. `diffs`: int32[16, n]. `positions`:
    uint32[n], from `start`.
    """
    width = like.itemsize * 8
    seen, after, fill = state[0], state[1], state[2]
    at = np.uint64(start)
    for word in range(n_words):
        base = word * 64
        changed, p0, p1, p2, p3 = planes(like, old, new, base, shift, mask, top)
        while changed != ZERO:
            bit = trailing_zeros(changed)
            changed &= changed - ONE
            c = (
                ((p0 >> bit) & ONE)
                | (((p1 >> bit) & ONE) << ONE)
                | (((p2 >> bit) & ONE) << np.uint64(2))
                | (((p3 >> bit) & ONE) << np.uint64(3))
            )
            rank = seen[c] + popcount(class_mask(c, p0, p1, p2, p3) & ((ONE << bit) - ONE))
            k = np.uint64(fill[c])  # unsigned: numba then asks of no index whether it is negative
            gaps[c, k] = rank - after[c]
            lane = np.int64(bit)
            before = element(like, old, base + lane)
            later = element(like, new, base + lane)
            before ^= -(before >> (width - 1)) & flip
            later ^= -(later >> (width - 1)) & flip
            diffs[c, k] = ((later - before) << (64 - width)) >> (64 - width)  # modulo 2^width, signed
            after[c] = rank + 1
            fill[c] = k + ONE
            positions[at] = first + base + lane
            at += ONE
        count_classes(seen, p0, p1, p2, p3)
    return at


@kernel
def scan_decode(like, old, copy, n_words, first, shift, mask, top, flip, state, gaps, diffs, positions, bits, start):
    """Turn gaps back into positions, in order, and differences into new bits; the number of changes from `start` on.

    `copy`: address of a writable array, which receives the old words and then the changes; 0 for none.
    `state`: int64[3, 16]: elements until the next change (`NEVER` after the last), changes done, and in all, by class.
    `gaps`: int64-valued uint32[16, n]. `positions`: uint32[n], `bits`: array of the element type, both from `start`.
    """
    width = like.itemsize * 8
    until, done, total = state[0], state[1], state[2]
    target = copy if copy != 0 else old
    pending = np.empty(64, np.int64)
    at = np.uint64(start)
    for word in range(n_words):
        base = word * 64
        if copy != 0:
            p0, p1, p2, p3 = planes_and_copy(like, old, copy, base, shift, mask, top)
        else:
            _, p0, p1, p2, p3 = planes(like, old, old, base, shift, mask, top)
        if countdown_classes(until, p0, p1, p2, p3) >= 0:
            continue
        hits = ZERO
        classes = negatives(until)
        while classes != ZERO:
            c = trailing_zeros(classes)
            classes &= classes - ONE
            members = class_mask(c, p0, p1, p2, p3)
            here = popcount(members)
            rank = until[c] + here
            k, end = np.uint64(done[c]), np.uint64(total[c])
            while rank < here:
                bit = select_bit(members, np.uint64(rank))
                pending[bit] = diffs[c, k]
                hits |= ONE << bit
                k += ONE
                rank = rank + 1 + gaps[c, k] if k < end else NEVER
            done[c] = k
            until[c] = rank - here
        while hits != ZERO:
            bit = trailing_zeros(hits)
            hits &= hits - ONE
            lane = np.int64(bit)
            value = element(like, old, base + lane)
            value ^= -(value >> (width - 1)) & flip
            value += pending[bit]
            value &= (1 << width) - 1
            value ^= -(value >> (width - 1)) & flip
            positions[at] = first + base + lane
            bits[at] = value
            if copy != 0:
                put_element(like, target, base + lane, value)
            at += ONE
    return at


@kernel
def scatter(words, positions, bits):
    """words[positions] = bits. The caller has bounded the positions."""
    for i in range(positions.size):
        words[positions[i]] = bits[i]
