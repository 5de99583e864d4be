"""Which rank writes which part of a sharded model, and which rank encodes which block. Pure.

A rank writes the part that it holds; where several ranks hold the same part, one of them writes it. Each block is
encoded by one rank that holds some of it. A block within one rank's part is encoded by that rank; a block that crosses
a border, by the rank with the least load among those that write some of it. So a rank reads, beyond its own part, only
the missing elements of some border blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from codec.errors import UsageError
from codec.layout import Layout, TensorSpec

__all__ = ["Ownership", "TensorPart"]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The elements of a tensor whose index along dimension `dim` is `start` to `start + length`."""

    dim: int
    start: int
    length: int


HeldParts = Mapping[str, TensorPart | None]
"""The part of each tensor that one rank holds, by checkpoint name; None: all of the tensor."""


class Ownership:
    """Which rank writes and encodes what. Every rank computes the same from what all ranks hold and the layout."""

    def __init__(self, layout: Layout, held: Sequence[HeldParts]) -> None:
        """`held`: what each rank holds, by rank. Its names may be aliases in the layout.

        Raises `UsageError` naming the tensor when the ranks' parts do not add up to a whole tensor.
        """
        self.world = len(held)
        self._layout = layout
        self._index = {spec.name: i for i, spec in enumerate(layout.tensors)}
        self._writers: list[dict[int, TensorPart]] = []
        load = [0] * self.world
        canonical = [{layout.tensor(name).name: part for name, part in parts.items()} for parts in held]
        for spec in layout.tensors:
            writers = _writers(spec, canonical, load)
            for rank, part in writers.items():
                load[rank] += spec.nbytes * part.length // max(1, _size(spec, part.dim))
            self._writers.append(writers)
        self._touching = [ranks for i, spec in enumerate(layout.tensors) for ranks in self._touch(i, spec)]
        self.owner = self._assign_blocks()
        """int32 (n_blocks,): the rank that encodes each block."""

    @classmethod
    def alone(cls, layout: Layout) -> "Ownership":
        """The ownership of a single process that holds every tensor whole."""
        return cls(layout, [{spec.name: None for spec in layout.tensors}])

    def writes(self, rank: int, name: str) -> TensorPart | None:
        """The part of a tensor that `rank` writes; None: nothing."""
        return self._writers[self._index[self._layout.tensor(name).name]].get(rank)

    def index(self, name: str) -> int:
        """The index of a tensor in the layout, by its name or an alias."""
        return self._index[self._layout.tensor(name).name]

    def tensors_of(self, rank: int) -> NDArray[np.int64]:
        """int64: indices in the layout of the tensors of which `rank` writes a part."""
        return np.array([i for i, writers in enumerate(self._writers) if rank in writers], np.int64)

    def touching(self, block: int) -> tuple[int, ...]:
        """The ranks that write some of a block, ascending."""
        return self._touching[block]

    def blocks_of(self, rank: int) -> NDArray[np.int64]:
        """int64: the blocks that `rank` encodes, ascending."""
        return np.flatnonzero(self.owner == rank)

    def _touch(self, index: int, spec: TensorSpec) -> list[tuple[int, ...]]:
        """For each block of tensor number `index`, the ranks that write some of it, ascending."""
        writers = self._writers[index]
        all_writers = tuple(sorted(writers))
        blocks = [self._layout.block(block) for block in self._layout.blocks_of(spec.name)]
        if len(all_writers) == 1 or any(part.dim for part in writers.values()):
            return [all_writers] * len(blocks)
        row = prod(spec.shape[1:])
        spans = [(rank, row * part.start, row * (part.start + part.length)) for rank, part in sorted(writers.items())]
        return [
            tuple(rank for rank, start, end in spans if start < block.start + block.count and block.start < end)
            for block in blocks
        ]

    def _assign_blocks(self) -> NDArray[np.int32]:
        """int32 (n_blocks,): the rank that encodes each block. Balances the bytes that ranks encode."""
        owner = np.full(self._layout.n_blocks, -1, np.int32)
        load = [0] * self.world
        sizes = [self._layout.block(block).nbytes for block in range(len(owner))]
        for block, ranks in enumerate(self._touching):
            if len(ranks) == 1:
                owner[block] = ranks[0]
                load[ranks[0]] += sizes[block]
        for block, ranks in enumerate(self._touching):
            if owner[block] < 0:
                owner[block] = chosen = min(ranks, key=lambda rank: (load[rank], rank))
                load[chosen] += sizes[block]
        return owner


def _size(spec: TensorSpec, dim: int) -> int:
    return spec.shape[dim] if spec.shape else 1


def _writers(spec: TensorSpec, held: Sequence[HeldParts], load: Sequence[int]) -> dict[int, TensorPart]:
    """The part of one tensor that each rank writes. Of ranks that hold the same part, the one with the least load
    writes.

    `load`: bytes that each rank writes of earlier tensors. Raises `UsageError` when the parts are not a whole tensor.
    """
    holders: dict[TensorPart, list[int]] = {}
    for rank, parts_held in enumerate(held):
        if spec.name in parts_held:
            part = parts_held[spec.name] or TensorPart(0, 0, _size(spec, 0))
            if part.length or not spec.elements:
                holders.setdefault(part, []).append(rank)
    parts = sorted(holders, key=lambda part: part.start)
    at = 0
    for part in parts:
        if part.dim != parts[0].dim or part.start != at:
            break
        at += part.length
    else:
        if parts and at == _size(spec, parts[0].dim):
            return {min(holders[part], key=lambda rank: (load[rank], rank)): part for part in parts}
    raise UsageError(f"The ranks together do not hold {spec.name}, which the base checkpoint has: publish all of it.")
