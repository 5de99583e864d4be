"""A Reed-Solomon erasure code: n fragments of which any k give the content back, and fewer than k do not.

The first k fragments are the content itself, cut into k; the others are its products with a Cauchy matrix over the
field of 256 elements (x^8 + x^4 + x^3 + x^2 + 1). Every square part of a Cauchy matrix can be inverted, so any k
fragments determine the content (Bloemer, Kalfane, Karp, Karpinski, Luby, Zuckerman, 1995). Sums are XOR; a product with
one element is a look-up in a table of 256 bytes, which `bytes.translate` does at memory speed.

A code and not copies: with n = 12 and k = 6 any six machines may be lost at twice the content's size; copies would
take seven times its size for that.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

import numpy as np

__all__ = ["MAX_FRAGMENTS", "join_fragments", "parity"]

MAX_FRAGMENTS: Final = 128
"""Half of the field's elements: more machines than anybody gives a content to."""
_POLYNOMIAL: Final = 0x11D

Data = bytes | memoryview


def _tables() -> tuple[list[int], list[int]]:
    """Powers of the generator 2 (twice over, so that sums of logarithms need no modulus), and logarithms."""
    powers, logarithms = [0] * 510, [0] * 256
    value = 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithms[value] = exponent
        value = value << 1 ^ (_POLYNOMIAL if value & 0x80 else 0)
    return powers, logarithms


_POWERS, _LOGARITHMS = _tables()


def _product(a: int, b: int) -> int:
    return _POWERS[_LOGARITHMS[a] + _LOGARITHMS[b]] if a and b else 0


def _inverse(a: int) -> int:
    return _POWERS[255 - _LOGARITHMS[a]]


@lru_cache(maxsize=256)
def _times(factor: int) -> bytes:
    """The products of `factor` with 0 to 255, for `bytes.translate`."""
    return bytes(_product(factor, value) for value in range(256))


def _row(fragment: int, k: int) -> list[int]:
    """The factors of the k parts of the content in a fragment."""
    if fragment < k:
        return [int(part == fragment) for part in range(k)]
    return [_inverse(fragment ^ part) for part in range(k)]  # 1 / (x_i + y_j), with x_i = fragment and y_j = part


def _combined(factors: Sequence[int], parts: Sequence[Data]) -> bytes:
    """The sum of the parts, each times its factor; all parts have one length."""
    total = np.zeros(len(parts[0]), np.uint8)
    for factor, part in zip(factors, parts, strict=True):
        if factor == 1:
            total ^= np.frombuffer(part, np.uint8)
        elif factor:
            total ^= np.frombuffer(bytes(part).translate(_times(factor)), np.uint8)
    return total.tobytes()


def parity(parts: Sequence[Data], n: int) -> list[bytes]:
    """Fragments k to n-1 of a content whose k parts, of one length, are fragments 0 to k-1. k <= n <= 128."""
    k = len(parts)
    assert 1 <= k <= n <= MAX_FRAGMENTS
    return [_combined(_row(fragment, k), parts) for fragment in range(k, n)]


def join_fragments(fragments: Mapping[int, Data], k: int) -> list[Data]:
    """The k parts of a content, from any k of its fragments, by number. Fragments beyond k are ignored.

    Which fragments are right must be known before: a wrong one makes every computed part wrong.
    """
    chosen = sorted(fragments)[:k]
    assert len(chosen) == k
    assert chosen[0] >= 0
    assert chosen[-1] < MAX_FRAGMENTS
    if chosen[-1] < k:
        return [fragments[number] for number in chosen]
    solved = _solution(tuple(chosen), k)
    data = [fragments[number] for number in chosen]
    return [fragments[part] if part in chosen else _combined(solved[part], data) for part in range(k)]


@lru_cache(maxsize=64)
def _solution(chosen: tuple[int, ...], k: int) -> list[list[int]]:
    """By part of the content: the factors of the chosen fragments in it. Gauss and Jordan's elimination."""
    rows = [_row(number, k) + [int(column == at) for column in range(k)] for at, number in enumerate(chosen)]
    for column in range(k):
        pivot = next(at for at in range(column, k) if rows[at][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = _inverse(rows[column][column])
        rows[column] = [_product(scale, value) for value in rows[column]]
        for at in range(k):
            if at != column and (factor := rows[at][column]):
                rows[at] = [
                    value ^ _product(factor, pivoted) for value, pivoted in zip(rows[at], rows[column], strict=True)
                ]
    return [row[k:] for row in rows]
