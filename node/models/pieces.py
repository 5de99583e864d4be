"""Where the elements of a checkpoint's tensor are in a model's parameter: boxes, each an affine map. Pure.

A library that fuses tensors when it loads a checkpoint (for example the experts of a layer into one parameter) only
moves elements. A `Piece` is one box of the parameter, with the checkpoint elements that are in it. The functions follow
pieces through the moves: permute, narrow, concatenate, reshape.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

__all__ = [
    "MAX_PIECES",
    "Piece",
    "Unfollowed",
    "concatenated",
    "narrowed",
    "permuted",
    "reshaped",
    "strides_of",
    "whole",
]

MAX_PIECES: Final = 1 << 16
"""Pieces of one tensor. Fusing makes a handful, and a permutation of heads two a head; more would be too slow."""


class Unfollowed(Exception):
    """An operation that is not one of these moves, so the places of its elements are unknown."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Element k of the box at `start` is element `offset + sum(k * strides)` of the checkpoint tensor `source`, flat.

    `start`, `shape`, `strides`: one number for each dimension of the tensor that the box lies in.
    """

    source: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def cut(self, dim: int, start: int, stop: int) -> "Piece | None":
        """The part with indices [start, stop) along `dim`, in the same coordinates; None when it is empty."""
        low, high = max(self.start[dim], start), min(self.start[dim] + self.shape[dim], stop)
        if low >= high:
            return None
        moved = self.offset + (low - self.start[dim]) * self.strides[dim]
        return replace(
            self, start=_put(self.start, dim, low), shape=_put(self.shape, dim, high - low), offset=moved
        )  # fmt: skip

    def shift(self, dim: int, by: int) -> "Piece":
        """The same elements, `by` further along `dim`."""
        return replace(self, start=_put(self.start, dim, self.start[dim] + by))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def whole(name: str, shape: Sequence[int]) -> list[Piece]:
    """The pieces of a checkpoint tensor as it is stored."""
    shape = tuple(shape)
    return [Piece(name, (0,) * len(shape), shape, 0, strides_of(shape))] if prod(shape) else []


def permuted(pieces: Iterable[Piece], order: Sequence[int]) -> list[Piece]:
    """The pieces after a permutation: dimension i of the result is dimension `order[i]`."""
    return [
        Piece(p.source, _take(p.start, order), _take(p.shape, order), p.offset, _take(p.strides, order)) for p in pieces
    ]


def narrowed(pieces: Iterable[Piece], dim: int, start: int, length: int) -> list[Piece]:
    """The pieces with indices [start, start + length) along `dim`, counted from `start`."""
    found = (piece.cut(dim, start, start + length) for piece in pieces)
    return [piece.shift(dim, -start) for piece in found if piece is not None]


def concatenated(parts: Iterable[tuple[Sequence[Piece], int]], dim: int) -> list[Piece]:
    """The pieces of tensors that are concatenated along `dim`. `parts`: (pieces, size along `dim`) of each tensor."""
    found: list[Piece] = []
    at = 0
    for pieces, size in parts:
        found += [piece.shift(dim, at) for piece in pieces]
        at += size
    return found


def reshaped(pieces: Iterable[Piece], old: Sequence[int], new: Sequence[int]) -> list[Piece]:
    """The same elements in the same order, in another shape. Raises `Unfollowed` when that takes too many pieces."""
    found: list[Piece] = []
    groups = _groups(tuple(old), tuple(new))
    for piece in pieces:
        found += _reshape(piece, groups)
        if len(found) > MAX_PIECES:
            raise Unfollowed("more boxes than can be kept")
    return found


Groups = list[tuple[tuple[int, ...], tuple[int, ...]]]


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> Groups:
    """The shortest runs of old and new dimensions whose products are equal."""
    groups: Groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = [i, i + 1], [j, j + 1]
        if i >= len(old) or j >= len(new):  # only dimensions of size 1 are left
            groups.append((old[i:], new[j:]))
            break
        while prod(old[a[0] : a[1]]) != prod(new[b[0] : b[1]]):
            if prod(old[a[0] : a[1]]) < prod(new[b[0] : b[1]]):
                a[1] += 1
            else:
                b[1] += 1
            if a[1] > len(old) or b[1] > len(new):
                raise Unfollowed(f"a reshape of {old} to {new}")
        groups.append((old[a[0] : a[1]], new[b[0] : b[1]]))
        i, j = a[1], b[1]
    return groups


def _reshape(piece: Piece, groups: Groups) -> list[Piece]:
    """A piece in the new shape: each group of dimensions is merged into one, which is then split."""
    found = [replace(piece, start=(), shape=(), strides=())]
    at = 0
    for old, new in groups:
        here = slice(at, at + len(old))
        at += len(old)
        box = Piece("", piece.start[here], piece.shape[here], 0, piece.strides[here])
        boxes = [cut for run in _merge(box, old) for cut in _split(run, new)]
        found = [
            Piece(
                p.source, p.start + b.start, p.shape + b.shape, p.offset + b.offset, p.strides + b.strides
            ) for p in found for b in boxes
        ]  # fmt: skip
        if len(found) > MAX_PIECES:
            raise Unfollowed("more boxes than can be kept")
    return found


def _merge(box: Piece, sizes: tuple[int, ...]) -> list[Piece]:
    """The box in one dimension instead of those of `sizes`: runs of elements."""
    if not sizes:
        return [Piece("", (0,), (1,), box.offset, (0,))]
    runs = [Piece("", box.start[-1:], box.shape[-1:], box.offset, box.strides[-1:])]
    inner = sizes[-1]
    for dim in range(len(sizes) - 2, -1, -1):
        merged: list[Piece] = []
        start, length, stride = box.start[dim], box.shape[dim], box.strides[dim]
        for run in runs:
            if length == 1 or (run.shape[0] == inner and stride == inner * run.strides[0]):
                merged.append(
                    replace(run, start=(start * inner + run.start[0],), shape=(length * run.shape[0],))
                )  # fmt: skip
                continue
            if length > MAX_PIECES:
                raise Unfollowed("more boxes than can be kept")
            merged += [
                replace(run, start=((start + k) * inner + run.start[0],), offset=run.offset + k * stride)
                for k in range(length)
            ]
        runs, inner = merged, inner * sizes[dim]
    return runs


def _split(run: Piece, sizes: tuple[int, ...]) -> list[Piece]:
    """A run of one dimension as boxes in the dimensions `sizes`, whose product is its size."""
    (start,), (length,), (stride,) = run.start, run.shape, run.strides
    if not sizes:
        return [Piece("", (), (), run.offset, ())]
    if len(sizes) == 1:
        return [run]
    inner = prod(sizes[1:])
    first, last = start // inner, (start + length - 1) // inner
    if first == last or (start % inner == 0 and length % inner == 0):
        many = 1 if first == last else length // inner
        here = start % inner if first == last else 0
        rest = Piece("", (here,), (length // many,), run.offset, (stride,))
        return [
            Piece("", (first, *b.start), (many, *b.shape), b.offset, (inner * stride, *b.strides))
            for b in _split(rest, sizes[1:])
        ]
    border = (first + 1) * inner if start % inner else last * inner
    left = Piece("", (start,), (border - start,), run.offset, (stride,))
    right = Piece("", (border,), (start + length - border,), run.offset + (border - start) * stride, (stride,))
    return [*_split(left, sizes), *_split(right, sizes)]


def _put(numbers: tuple[int, ...], at: int, number: int) -> tuple[int, ...]:
    return (*numbers[:at], number, *numbers[at + 1 :])


def _take(numbers: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(numbers[i] for i in order)
