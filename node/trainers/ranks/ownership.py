"""Who holds which part of a model that several processes train together, and who encodes which block. Pure.

A rank writes the part that it holds; where several hold the same part, one of them does. Each block is encoded by one
rank that holds some of it: a block within one rank's part by that rank, a block that crosses a border by whichever of
those that touch it has least to do. So a rank reads, beyond its own part, only what it lacks of some border blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from codec.errors import UsageError
from codec.layout import Layout, TensorSpec

__all__ = ["Ownership", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of a tensor whose index along dimension `dim` is `start` to `start + length`."""

    dim: int
    start: int
    length: int


Held = Mapping[str, Part | None]
"""What one rank holds, by checkpoint name; None: all of the tensor."""


class Ownership:
    """The shares of all ranks; the same on each, because it follows from what all hold and from the layout alone."""

    def __init__(self, layout: Layout, held: Sequence[Held]) -> None:
        """`held`: by rank, names as in the layout or their aliases.

        Raises `UsageError` naming the tensor when the parts are not one whole tensor.
        """
        self.world = len(held)
        self._layout = layout
        self._index = {spec.name: i for i, spec in enumerate(layout.tensors)}
        self._writers: list[dict[int, Part]] = []
        load = [0] * self.world
        canonical = [{layout.tensor(name).name: part for name, part in one.items()} for one in held]
        for spec in layout.tensors:
            writers = _writers(spec, canonical, load)
            for rank, part in writers.items():
                load[rank] += spec.nbytes * part.length // max(1, _size(spec, part.dim))
            self._writers.append(writers)
        self._touching = [ranks for i, spec in enumerate(layout.tensors) for ranks in self._touch(i, spec)]
        self.owner = self._share_out()
        """int32 (n_blocks,): the rank that encodes each block."""

    @classmethod
    def alone(cls, layout: Layout) -> "Ownership":
        """One process that holds everything."""
        return cls(layout, [{spec.name: None for spec in layout.tensors}])

    def writes(self, rank: int, name: str) -> Part | None:
        """What `rank` has to write of the tensor; None: nothing."""
        return self._writers[self._index[self._layout.tensor(name).name]].get(rank)

    def index(self, name: str) -> int:
        """The number of a tensor in the layout."""
        return self._index[self._layout.tensor(name).name]

    def tensors_of(self, rank: int) -> NDArray[np.int64]:
        """The tensors (by number) of which `rank` writes something."""
        return np.array([i for i, writers in enumerate(self._writers) if rank in writers], np.int64)

    def touching(self, block: int) -> tuple[int, ...]:
        """The ranks that write something of a block."""
        return self._touching[block]

    def blocks_of(self, rank: int) -> NDArray[np.int64]:
        """The blocks that `rank` encodes, ascending."""
        return np.flatnonzero(self.owner == rank)

    def _touch(self, index: int, spec: TensorSpec) -> list[tuple[int, ...]]:
        """By block of one tensor: the ranks that write something of it, ascending."""
        writers = self._writers[index]
        everybody = tuple(sorted(writers))
        blocks = [self._layout.block(block) for block in self._layout.blocks_of(spec.name)]
        if len(everybody) == 1 or any(part.dim for part in writers.values()):
            return [everybody] * len(blocks)
        row = prod(spec.shape[1:])
        spans = [(rank, row * part.start, row * (part.start + part.length)) for rank, part in sorted(writers.items())]
        return [
            tuple(rank for rank, start, end in spans if start < block.start + block.count and block.start < end)
            for block in blocks
        ]

    def _share_out(self) -> NDArray[np.int32]:
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


def _writers(spec: TensorSpec, held: Sequence[Held], load: Sequence[int]) -> dict[int, Part]:
    """By rank: what it writes of one tensor. Of ranks that hold the same, the one with least to write does."""
    holders: dict[Part, list[int]] = {}
    for rank, one in enumerate(held):
        if spec.name in one:
            part = one[spec.name] or Part(0, 0, _size(spec, 0))
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
