"""Tensors without elements that record where each of their elements came from.

A library's own code that fuses, splits and transposes a checkpoint's tensors runs on them, and the results show which
element went where, for a model of any size, in milliseconds. An operation that does more than move elements (adds,
multiplies, dequantizes) raises `Unfollowed`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from node.models import pieces as moves
from node.models.pieces import Piece, Unfollowed

__all__ = ["Symbol"]


class Symbol(torch.Tensor):
    """A tensor without elements. `pieces`: which checkpoint elements are where in it."""

    pieces: list[Piece]

    @staticmethod
    def __new__(cls, pieces: list[Piece], shape: Sequence[int], dtype: torch.dtype) -> "Symbol":
        symbol = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device="cpu")  # type: ignore[attr-defined]
        symbol.pieces = pieces
        return symbol

    @classmethod
    def stored(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> "Symbol":
        """A tensor as the checkpoint stores it."""
        return cls(moves.whole(name, shape), shape, dtype)

    def __repr__(self, **_: Any) -> str:
        return f"Symbol({tuple(self.shape)}, {self.dtype}, {len(self.pieces)} pieces)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        move = _MOVES.get(func.overloadpacket.__name__)
        if move is None:
            raise Unfollowed(f"{func.overloadpacket.__name__} computes, or is not known to this version")
        return move(*args, **(kwargs or {}))


def _same(x: Symbol, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Symbol:
    return Symbol(x.pieces, x.shape, dtype or x.dtype)


def _permute(x: Symbol, order: Sequence[int]) -> Symbol:
    order = [dim % x.dim() for dim in order]
    return Symbol(moves.permuted(x.pieces, order), [x.shape[dim] for dim in order], x.dtype)


def _transpose(x: Symbol, a: int, b: int) -> Symbol:
    order = list(range(x.dim()))
    order[a], order[b] = order[b], order[a]
    return _permute(x, order)


def _view(x: Symbol, shape: Sequence[int]) -> Symbol:
    new = list(shape)
    if -1 in new:
        known = -torch.Size(new).numel()
        new[new.index(-1)] = x.numel() // max(1, known)
    return Symbol(moves.reshaped(x.pieces, x.shape, new), new, x.dtype)


def _unsqueeze(x: Symbol, dim: int) -> Symbol:
    at = dim % (x.dim() + 1)
    return _view(x, [*x.shape[:at], 1, *x.shape[at:]])


def _squeeze(x: Symbol, dims: int | Sequence[int] | None = None) -> Symbol:
    given = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    dropped = {dim % x.dim() for dim in given if x.shape[dim] == 1}
    return _view(x, [size for dim, size in enumerate(x.shape) if dim not in dropped])


def _slice(x: Symbol, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Symbol:
    if step != 1:
        raise Unfollowed("a slice with a step")
    dim %= x.dim()
    low, high, _ = slice(start, end).indices(x.shape[dim])
    return _narrow(x, dim, low, max(0, high - low))


def _narrow(x: Symbol, dim: int, start: int, length: int) -> Symbol:
    shape = [*x.shape]
    shape[dim] = length
    return Symbol(moves.narrowed(x.pieces, dim, start, length), shape, x.dtype)


def _select(x: Symbol, dim: int, index: int) -> Symbol:
    dim %= x.dim()
    part = _narrow(x, dim, index % x.shape[dim], 1)
    return _view(part, [size for i, size in enumerate(part.shape) if i != dim])


def _split(x: Symbol, sizes: int | Sequence[int], dim: int = 0) -> list[Symbol]:
    dim %= x.dim()
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[dim] - at) for at in range(0, x.shape[dim], sizes)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_narrow(x, dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def _unbind(x: Symbol, dim: int = 0) -> list[Symbol]:
    return [_select(x, dim, i) for i in range(x.shape[dim])]


def _cat(parts: Sequence[Symbol], dim: int = 0) -> Symbol:
    if not all(isinstance(part, Symbol) for part in parts):
        raise Unfollowed("a tensor is made up when the checkpoint is loaded")
    dim %= parts[0].dim()
    shape = [*parts[0].shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    return Symbol(moves.concatenated([(part.pieces, part.shape[dim]) for part in parts], dim), shape, parts[0].dtype)


def _stack(parts: Sequence[Symbol], dim: int = 0) -> Symbol:
    return _cat([_unsqueeze(part, dim) for part in parts], dim % (parts[0].dim() + 1))


_MOVES: Final[dict[str, Callable[..., Any]]] = {
    "alias": _same,
    "detach": _same,
    "clone": _same,
    "contiguous": _same,
    "lift_fresh": _same,
    "_to_copy": _same,
    "permute": _permute,
    "transpose": _transpose,
    "t": lambda x: _transpose(x, 0, 1),
    "view": _view,
    "_unsafe_view": _view,
    "reshape": _view,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "slice": _slice,
    "select": _select,
    "split": _split,
    "split_with_sizes": _split,
    "unbind": _unbind,
    "cat": _cat,
    "stack": _stack,
}
