"""Symbols follow a tensor's elements through every operation that moves them."""

import random

import pytest
import torch

from node.models.pieces import Piece, Unfollowed, reshaped, strides_of
from node.models.symbols import Symbol

Pair = tuple[torch.Tensor, Symbol]


class Store:
    """Real tensors of distinct numbers, each with a symbol."""

    def __init__(self) -> None:
        self.real: dict[str, torch.Tensor] = {}
        self.at = 0

    def make(self, shape: list[int]) -> Pair:
        name, count = f"t{len(self.real)}", torch.Size(shape).numel()
        self.real[name] = torch.arange(self.at, self.at + count).reshape(shape)
        self.at += count
        return self.real[name], Symbol.stored(name, shape, torch.int64)

    def check(self, pair: Pair) -> None:
        """Check that the symbol gives the origin of each element of the real tensor exactly once."""
        real, symbol = pair
        assert real.shape == symbol.shape
        out = torch.full(tuple(symbol.shape), -1)
        for piece in symbol.pieces:
            box = out[tuple(slice(at, at + size) for at, size in zip(piece.start, piece.shape, strict=True))]
            assert bool((box == -1).all())
            box.copy_(self.real[piece.source].as_strided(piece.shape, piece.strides, piece.offset))
        assert torch.equal(out, real)


def moved(random: random.Random, store: Store, pair: Pair) -> Pair:
    x, s = pair
    dim = random.randrange(x.dim())
    match random.choice(["transpose", "cat", "stack", "chunk", "view", "interleave", "select", "unsqueeze"]):
        case "transpose":
            other = random.randrange(x.dim())
            return x.transpose(dim, other).contiguous(), s.transpose(dim, other).contiguous()
        case "cat":
            y, u = store.make(list(x.shape))
            return torch.cat([x, y], dim), torch.cat([s, u], dim)
        case "stack":
            y, u = store.make(list(x.shape))
            return torch.stack([y, x], dim), torch.stack([u, s], dim)
        case "chunk" if x.shape[dim] > 1:
            part = random.randrange(2)
            return x.chunk(2, dim)[part], s.chunk(2, dim)[part]
        case "view":
            rows = random.choice([n for n in range(1, x.numel() + 1) if x.numel() % n == 0])
            return x.reshape(rows, -1), s.reshape(rows, -1)
        case "interleave" if x.shape[dim] % 2 == 0:
            split = [*x.shape[:dim], x.shape[dim] // 2, 2, *x.shape[dim + 1 :]]
            x, s = (z.reshape(split).transpose(dim, dim + 1).reshape(x.shape).contiguous() for z in (x, s))
            return x, s
        case "select" if x.dim() > 1 and x.numel() > 40:
            at = random.randrange(x.shape[dim])
            return x.select(dim, at), s.select(dim, at)
        case "unsqueeze":
            return x.unsqueeze(dim), s.unsqueeze(dim)
    return pair


@pytest.mark.parametrize("seed", range(150))
def test_random_moves(seed: int) -> None:
    chosen, store = random.Random(seed), Store()
    pair = store.make([chosen.choice([2, 3, 4, 6]) for _ in range(chosen.randrange(1, 4))])
    for _ in range(8):
        pair = moved(chosen, store, pair)
        if pair[0].numel() > 4000:
            pair = pair[0].flatten()[:512], pair[1].flatten()[:512]
    store.check(pair)


def test_operations_that_compute_are_not_followed() -> None:
    symbol = Symbol.stored("x", (4, 4), torch.float32)
    for compute in (lambda: symbol + 1, lambda: symbol * symbol, lambda: symbol[::2], lambda: symbol.sum()):
        with pytest.raises(Unfollowed):
            compute()
    with pytest.raises(Unfollowed, match="made up"):
        torch.cat([symbol, torch.zeros(4, 4)])


def test_too_many_pieces_are_refused() -> None:
    columns = [Piece("x", (0, 0), (1 << 17, 2), 0, (2, 1))]
    turned = [Piece("x", (0, 0), (1 << 17, 2), 0, (1, 1 << 17))]
    assert len(reshaped(columns, (1 << 17, 2), (1 << 18,))) == 1
    with pytest.raises(Unfollowed):
        reshaped(turned, (1 << 17, 2), (1 << 18,))
    assert strides_of((2, 3, 4)) == (12, 4, 1)
