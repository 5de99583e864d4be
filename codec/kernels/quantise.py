# pyright: reportCallIssue=false
"""Passes over bf16 matrices: the scale of each tile, and the codes of elements under a scale.

Every operation on floats is one IEEE operation in single precision, rounded to nearest with ties to even: nothing is
fused, so each machine and each language gets the same bits. `docs/formats.md` specifies the steps.
"""

import numpy as np

from codec.kernels.jit import kernel

__all__ = ["FP8", "INT4", "INT8", "code_elements", "dequantise_rows", "mark_stale", "quantise_rows"]

INT4, INT8, FP8 = 0, 1, 2

LEAST_SCALE = np.float32(2.0**-100)
"""Keeps scales, and what codes stand for, out of the denormal numbers, which some processors are told to flush."""
LEAST_POWER = 27
"""The stored exponent of `LEAST_SCALE`: -100 + 127."""
ROUNDER = np.float32(1.5 * 2.0**23)
"""x + ROUNDER - ROUNDER is x rounded to an integer, ties to even, for |x| < 2^22."""
_LARGEST = np.array([7, 127, 448], np.float32)
_TOP_EXPONENT = np.array([2, 6, 8], np.int64)
"""Of the largest code value of each kind: its exponent ..."""
_TOP_MANTISSA = np.array([96, 126, 96], np.int64)
"""... and its mantissa in 128ths: 7 = 2^2 x (1 + 96/128), 127 = 2^6 x (1 + 126/128), 448 = 2^8 x (1 + 96/128)."""


@kernel
def _size(bits):
    """The magnitude of a bf16 element as its bits, 0 for infinities and NaNs: these do not count for a scale."""
    size = np.int64(bits) & 0x7FFF
    return size if size < 0x7F80 else np.int64(0)


@kernel
def _power(size, kind):
    """The stored exponent of the smallest power of two under which a magnitude is at most the largest code value."""
    power = (size >> 7) - _TOP_EXPONENT[kind] + np.int64((size & 0x7F) > _TOP_MANTISSA[kind])
    return max(power, np.int64(LEAST_POWER))


@kernel
def _scale_bits(size, kind, powers):
    """The scale for a largest magnitude, as the bits of a single-precision float."""
    if powers:
        return np.uint32(_power(size, kind) << 23)
    word = np.empty(1, np.uint32)
    word[0] = np.uint32(size << 16)
    scale = word.view(np.float32)
    scale[0] = max(scale[0] / _LARGEST[kind], LEAST_SCALE)
    return word[0]


@kernel
def _code_row(values, words, source, codes, target, first, last, scale, kind):
    """Code elements first..last-1 of a row that lies at `source` in `values` (bf16 bits), into the row at `target`.

    `words`: uint32[>= last - first], scratch. `first` is even where two codes share a byte.
    """
    n = last - first
    floats = words.view(np.float32)
    for i in range(n):
        words[i] = np.uint32(values[source + first + i]) << np.uint32(16)
    largest = _LARGEST[kind]
    for i in range(n):
        x = floats[i] / scale
        x = np.float32(0) if x != x else x
        floats[i] = min(max(x, -largest), largest)
    if kind == FP8:
        for i in range(n):
            bits = words[i]
            sign = (bits >> np.uint32(24)) & np.uint32(0x80)
            bits &= np.uint32(0x7FFFFFFF)
            normal = (bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
            words[i] = bits
            small = (floats[i] * np.float32(512) + ROUNDER) - ROUNDER
            code = np.uint32(small) if bits < np.uint32(0x3C800000) else normal - np.uint32(960)
            codes[target + first + i] = np.uint8(code | sign) if code else np.uint8(0)
        for i in range(n):
            if (np.uint32(values[source + first + i]) & np.uint32(0x7FFF)) > np.uint32(0x7F80):
                codes[target + first + i] = np.uint8(0x7F)
    elif kind == INT8:
        for i in range(n):
            codes[target + first + i] = np.uint8(np.int32((floats[i] + ROUNDER) - ROUNDER))
    else:
        for i in range(0, n - 1, 2):
            low = np.int32((floats[i] + ROUNDER) - ROUNDER) + np.int32(8)
            high = np.int32((floats[i + 1] + ROUNDER) - ROUNDER) + np.int32(8)
            codes[target + ((first + i) >> 1)] = np.uint8(low | high << np.int32(4))
        if n & 1:
            low = np.int32((floats[n - 1] + ROUNDER) - ROUNDER) + np.int32(8)
            codes[target + ((last - 1) >> 1)] = np.uint8(low)


@kernel
def quantise_rows(values, rows, columns, tile_rows, tile_columns, stale, kind, powers, codes, scales, words):
    """Compute the scales and codes of the tiles that are `stale`; the others stay as they are.

    `values`: uint16[rows * columns], the bf16 bits of whole rows of one plane, beginning with a row of tiles. `stale`:
    bool[tiles], row by row. `codes`: uint8, the rows' codes. `scales`: uint32[tiles], bits of single-precision floats.
    `words`: uint32[tile_columns], scratch.
    """
    across = (columns + tile_columns - 1) // tile_columns
    row_bytes = (columns + 1) // 2 if kind == INT4 else columns
    pair = np.empty(1, np.uint32)
    for tile in range(stale.size):
        if not stale[tile]:
            continue
        top, left = tile // across * tile_rows, tile % across * tile_columns
        bottom, right = min(top + tile_rows, rows), min(left + tile_columns, columns)
        largest = np.uint16(0)
        for row in range(top, bottom):
            for at in range(row * columns + left, row * columns + right):
                size = values[at] & np.uint16(0x7FFF)
                size = size if size < np.uint16(0x7F80) else np.uint16(0)
                largest = max(largest, size)
        pair[0] = _scale_bits(np.int64(largest), kind, powers)
        scales[tile] = pair[0]
        scale = pair.view(np.float32)[0]
        for row in range(top, bottom):
            _code_row(values, words, row * columns, codes, row * row_bytes, left, right, scale, kind)


@kernel
def mark_stale(old, new, positions, columns, tile_rows, tile_columns, kind, powers, scales, stale):
    """Mark the tiles whose scale may have changed.

    The scale of a tile is the largest of the scales that its elements would have alone. It stays if no changed element
    would have a larger one, and none that would have had just this one has a smaller one now.

    `old`, `new`: uint16, the bits of whole rows. `positions`: the elements that differ. `scales`: uint32[tiles], those
    of `old`. `stale`: bool[tiles], to be marked.
    """
    across = (columns + tile_columns - 1) // tile_columns
    pair = np.empty(3, np.uint32)
    floats = pair.view(np.float32)
    for i in range(positions.size):
        at = np.int64(positions[i])
        row = at // columns
        tile = row // tile_rows * across + (at - row * columns) // tile_columns
        if stale[tile]:
            continue
        pair[0] = scales[tile]
        pair[1] = _scale_bits(_size(old[at]), kind, powers)
        pair[2] = _scale_bits(_size(new[at]), kind, powers)
        if floats[2] > floats[0] or (floats[1] == floats[0] and floats[2] < floats[0]):
            stale[tile] = True


@kernel
def code_elements(new, positions, columns, tile_rows, tile_columns, kind, scales, stale, codes):
    """Code the changed elements of the tiles that are not `stale`, under the scales that they have.

    Arguments as for `mark_stale`; `codes`: uint8, the rows' codes, written in place.
    """
    across = (columns + tile_columns - 1) // tile_columns
    row_bytes = (columns + 1) // 2 if kind == INT4 else columns
    pair, words, one = np.empty(1, np.uint32), np.empty(2, np.uint32), np.empty(1, np.uint8)
    for i in range(positions.size):
        at = np.int64(positions[i])
        row = at // columns
        column = at - row * columns
        tile = row // tile_rows * across + column // tile_columns
        if stale[tile]:
            continue
        pair[0] = scales[tile]
        _code_row(new, words, at, one, 0, 0, 1, pair.view(np.float32)[0], kind)
        if kind == INT4:
            byte, shift = row * row_bytes + (column >> 1), np.uint8(4 * (column & 1))
            codes[byte] = (codes[byte] & np.uint8(0xF0 >> shift)) | np.uint8(one[0] << shift)
        else:
            codes[row * row_bytes + column] = one[0]


@kernel
def dequantise_rows(codes, rows, columns, tile_rows, tile_columns, kind, scales, values):
    """Write what the codes of whole rows stand for to `values` (float32[rows * columns]): code value x scale.

    `codes`: uint8, the rows' codes. `scales`: uint32[tiles], bits of single-precision floats.
    """
    across = (columns + tile_columns - 1) // tile_columns
    row_bytes = (columns + 1) // 2 if kind == INT4 else columns
    table = np.empty(256, np.float32)
    for code in range(256):
        if kind == INT8:
            table[code] = code - 256 if code > 127 else code
        elif kind == INT4:
            table[code] = code - 8
        elif code & 0x7F == 0x7F:
            table[code] = np.nan
        else:
            exponent, mantissa = (code >> 3) & 15, code & 7
            power = np.float32(2.0) ** (max(exponent, 1) - 10)
            value = np.float32(mantissa + (8 if exponent else 0)) * power
            table[code] = -value if code & 0x80 else value
    pair = np.empty(1, np.uint32)
    for row in range(rows):
        for tile in range(across):
            pair[0] = scales[row // tile_rows * across + tile]
            scale = pair.view(np.float32)[0]
            left, right = tile * tile_columns, min((tile + 1) * tile_columns, columns)
            if kind == INT4:
                for column in range(left, right):
                    byte = codes[row * row_bytes + (column >> 1)]
                    values[row * columns + column] = table[(byte >> (4 * (column & 1))) & 15] * scale
            else:
                for column in range(left, right):
                    values[row * columns + column] = table[codes[row * row_bytes + column]] * scale
