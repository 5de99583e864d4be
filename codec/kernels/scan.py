# pyright: reportCallIssue=false
"""Passes over a block: find its changes and rank them within the classes of their old exponents, or replay them.

A *word* is 64 elements, a *tile* 64 words. Each pass first classifies a tile in vector code without branches. That
gives, for each word, the mask of every class and the number of elements of each class before it. Then the pass handles
the changes. Branches that the processor cannot predict (does this word have a change?) do not occur in the first part
and are rare in the second.

Every kernel takes whole words; `codec.rice` pads the tail. Indices are unsigned, since numba would check a signed index
for being negative.
"""

import numpy as np

from codec.kernels.jit import kernel
from codec.kernels.lanes import (
    classify,
    copy_lanes,
    differing,
    element,
    popcount,
    prefetch,
    put_element,
    select_bit,
    trailing_zeros,
)

__all__ = [
    "NEVER",
    "TILE_WORDS",
    "count_values",
    "find_top",
    "gather",
    "list_changes",
    "merge_values",
    "scan_decode",
    "scan_encode",
    "scatter",
    "sort_values",
]

ZERO, ONE, TWO, THREE, FOUR, SIX = (np.uint64(n) for n in (0, 1, 2, 3, 4, 6))
LAST_LANE = np.uint64(63)
TILE_WORDS = 64
AHEAD = 2048
"""Elements from the one that a pass looks at to the one that it has the cache fetch: 4 KiB of bf16, a page. The
processor itself fetches ahead within a page only, and a page of the replica is rarely in its caches: without this, a
scan waits for half of its time."""
NEVER = 1 << 62
"""The rank of the next change in a class that has no more changes."""


@kernel
def find_top(like, words, n, shift, mask, histogram):
    """The largest exponent e such that 2 % or more of a sample of the `n` elements at `words` have exponents >= e.

    The sample is the first 64 of every 16384 elements: whole cache lines, evenly spread. A block of less than 65536
    elements is read whole. `histogram`: int64[256], scratch.
    """
    histogram[:] = 0
    step = 16384 if n >= 65536 else 64
    total = 0
    for start in range(0, n, step):  # all of them first: each would be waited for on its own
        prefetch(like, words, start)
    for start in range(0, n, step):
        end = min(start + 64, n)
        for i in range(start, end):
            histogram[(element(like, words, i) >> shift) & mask] += 1
        total += end - start
    top = mask
    tail = histogram[top]
    while 50 * tail < total:
        top -= 1
        tail += histogram[top]
    return top


@kernel
def _class_of(bits, shift, mask, top):
    """min(15, max(0, top - exponent)), as `classify` computes it."""
    return np.uint64(min(np.int64(15), max(np.int64(0), top - ((bits >> shift) & mask))))


@kernel
def _ordinal(bits, width, flip):
    """The ordinal of an element, and its own inverse: see `codec.bits`."""
    return bits ^ (-(bits >> (width - 1)) & flip)


@kernel
def _steps(before, later, width, flip):
    """The difference of two elements' ordinals modulo 2^width, signed."""
    d = _ordinal(later, width, flip) - _ordinal(before, width, flip)
    return (d << (64 - width)) >> (64 - width)


@kernel
def _moved(bits, steps, width, flip):
    """The bits whose ordinal is `steps` more."""
    return _ordinal((_ordinal(bits, width, flip) + steps) & ((1 << width) - 1), width, flip)


@kernel
def _list_bits(mask, base, positions, at):
    """Write base + the index of each set bit of `mask` to `positions` from `at` on; the index after them.

    Two entries are always written, since most words have at most two changes: this avoids an unpredictable branch.
    """
    rest = mask & (mask - ONE)
    positions[at] = base + trailing_zeros(mask)
    positions[at + ONE] = base + trailing_zeros(rest)
    after = at + np.uint64(popcount(mask))
    at += TWO
    rest &= rest - ONE
    while rest != ZERO:
        positions[at] = base + trailing_zeros(rest)
        at += ONE
        rest &= rest - ONE
    return after


@kernel
def list_changes(like, old, new, n_words, first, positions, start):
    """Write the positions of all changes, without classes; the index after them. Arguments as for `scan_encode`."""
    at = np.uint64(start)
    for word in range(n_words):
        index = word * 64
        at = _list_bits(differing(like, old, new, index), np.uint64(first + index), positions, at)
    return at


@kernel
def _copy_row(source, start, target):
    """target[:16] = source[start : start + 16]. numba would take seconds to compile a slice assignment."""
    for c in range(16):
        target[c] = source[start + c]


@kernel
def scan_encode(
    like, old, new, n_words, first, shift, mask, top, flip, masks, seen, state, gaps, diffs, positions, start
):
    """Write each change's gap and ordinal difference to the row of its class; the index in `positions` after the last.

    `like`: array of the element type. `old`, `new`: addresses. `first`: position of the first element.
    `shift`, `mask`: of the exponent. `top`: see `find_top`. `flip`: bits to flip in a negative float's ordinal, 0 for
    integers.
    `masks`: uint64[64 * 16], scratch. `seen`: int64[65 * 16], scratch, except for the first row: the elements of each
    class so far, kept from call to call.
    `state`: int64[2, 16], kept from call to call: for each class the rank after its last change, and its changes.
    `gaps`: uint32[16, n], unchanged elements of the class since its last change. `diffs`: int32[16, n]. `positions`:
    uint32[n + 2], written from `start` on.
    """
    width = like.itemsize * 8
    after, fill = state[0], state[1]
    at = np.uint64(start)
    for tile in range(0, n_words, TILE_WORDS):
        rows = min(TILE_WORDS, n_words - tile)
        done = at
        for row in range(rows):
            index = (tile + row) * 64
            prefetch(like, old, index + AHEAD)
            prefetch(like, new, index + AHEAD)
            classify(row, masks, seen, like, old, index, shift, mask, top)
            changed = differing(like, old, new, index)
            at = _list_bits(changed, np.uint64(first + index), positions, at)
        for i in range(done, at):
            index = np.int64(positions[i]) - first
            row = np.uint64((index >> 6) - tile)
            bit = np.uint64(index) & LAST_LANE
            before = element(like, old, index)
            later = element(like, new, index)
            c = _class_of(before, shift, mask, top)
            rank = seen[(row << FOUR) | c] + popcount(masks[(row << FOUR) | c] & ((ONE << bit) - ONE))
            k = np.uint64(fill[c])
            gaps[c, k] = rank - after[c]
            diffs[c, k] = _steps(before, later, width, flip)
            after[c] = rank + 1
            fill[c] = k + ONE
        _copy_row(seen, 16 * rows, seen)
    return at


@kernel
def _row_of(seen, c, rank):
    """The word of the tile with the element of class `c` and rank `rank`: the last word with at most `rank` before it.

    A search in three steps, each among four and without a branch, since the outcome is unpredictable.
    """
    at = c
    for step in (np.uint64(16), np.uint64(4), np.uint64(1)):
        stride = step << FOUR
        quarters = np.uint64(seen[at + stride] <= rank)
        quarters += np.uint64(seen[at + stride * TWO] <= rank)
        quarters += np.uint64(seen[at + stride * THREE] <= rank)
        at += stride * quarters
    return at >> FOUR


@kernel
def scan_decode(
    like, old, copy, n_words, first, shift, mask, top, flip, masks, seen, pending, state, gaps, diffs, positions, bits,
    start,
):  # fmt: skip
    """Turn gaps into ascending positions, and differences into new bits; the index in `positions` after the last.

    `copy`: address of a writable array, which receives the old words and then the changes; 0 for none.
    `masks`, `seen`: as for `scan_encode`. `pending`: int32[4096], scratch.
    `state`: int64[3, 16]: for each class the rank of the next change (`NEVER` after the last), the changes done, and
    all its changes.
    `positions`: uint32[n + 2], `bits`: array of the element type; both written from `start` on.
    """
    width = like.itemsize * 8
    upcoming, done, total = state[0], state[1], state[2]
    hits = np.zeros(TILE_WORDS, np.uint64)
    limits = np.empty(16, np.int64)
    at = np.uint64(start)
    for tile in range(0, n_words, TILE_WORDS):
        rows = min(TILE_WORDS, n_words - tile)
        for row in range(rows):
            index = (tile + row) * 64
            prefetch(like, old, index + AHEAD)
            classify(row, masks, seen, like, old, index, shift, mask, top)
            if copy != 0:
                copy_lanes(like, old, copy, index)
        _copy_row(seen, 16 * rows, limits)
        seen[16 * rows :] = NEVER  # so that `_row_of` stays within the tile, also in one that is not full
        for c in range(np.uint64(16)):
            rank, k, end, limit = upcoming[c], np.uint64(done[c]), np.uint64(total[c]), limits[c]
            while rank < limit:
                row = _row_of(seen, c, rank)
                bit = select_bit(masks[(row << FOUR) | c], np.uint64(rank - seen[(row << FOUR) | c]))
                hits[row] |= ONE << bit
                pending[(row << SIX) | bit] = diffs[c, k]
                k += ONE
                rank = rank + 1 + gaps[c, k] if k < end else NEVER
            upcoming[c] = rank
            done[c] = k
        begin = at
        for row in range(np.uint64(rows)):
            at = _list_bits(hits[row], np.uint64(first + (tile + np.int64(row)) * 64), positions, at)
            hits[row] = ZERO
        for i in range(begin, at):
            index = np.int64(positions[i]) - first
            value = _moved(element(like, old, index), pending[np.uint64(index - tile * 64)], width, flip)
            bits[i] = value
            if copy != 0:
                put_element(like, copy, index, value)
        _copy_row(limits, 0, seen)
    return at


@kernel
def sort_values(like, old, new, positions, shift, mask, top, flip, fill, diffs):
    """Write the ordinal difference at each position to its class's row. Arguments as for `scan_encode`. `fill`: 0."""
    width = like.itemsize * 8
    for i in range(positions.size):
        at = np.int64(positions[i])
        before, later = element(like, old, at), element(like, new, at)
        c = _class_of(before, shift, mask, top)
        k = np.uint64(fill[c])
        diffs[c, k] = _steps(before, later, width, flip)
        fill[c] = k + ONE


@kernel
def count_values(like, old, positions, shift, mask, top, fill):
    """Count the positions of each class in `fill`: int64[16], zeros before."""
    for i in range(positions.size):
        fill[_class_of(element(like, old, np.int64(positions[i])), shift, mask, top)] += 1


@kernel
def merge_values(like, old, positions, shift, mask, top, flip, done, diffs, bits):
    """The inverse of `sort_values`: write the new bits at each position. `done`: int64[16], zeros before."""
    width = like.itemsize * 8
    for i in range(positions.size):
        value = element(like, old, np.int64(positions[i]))
        c = _class_of(value, shift, mask, top)
        k = np.uint64(done[c])
        bits[i] = _moved(value, diffs[c, k], width, flip)
        done[c] = k + ONE


@kernel
def gather(words, positions, bits):
    """bits = words[positions], where `words` is an address. The caller must have checked the positions.

    numpy would first convert all positions to int64, which takes longer than the gathering.
    """
    for i in range(positions.size):
        bits[i] = element(bits, words, np.int64(positions[i]))


@kernel
def scatter(words, positions, bits):
    """words[positions] = bits. The caller must have checked the positions."""
    for i in range(positions.size):
        words[positions[i]] = bits[i]
