"""Which blocks of a model each rank of a tensor- or expert-parallel engine needs, from the tensors' names and shapes.

Pure. A block is a fixed range of a tensor's elements in their stored order, so a tensor that is cut by rows gives each
rank a run of blocks, and one that is cut by columns gives every rank a part of every block: all ranks need all of it.
What a rank cannot be shown to do without counts as needed.

A swarm whose seed has such a rule (`seed --shards N`, experts only) cuts its chunks by *class*: the set of ranks that
need a block. A member may then hold a `Shard`, the blocks of some ranks.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Final

from codec.errors import UsageError
from codec.layout import BLOCK_ELEMENTS, Layout, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "MAX_RANKS",
    "MAX_SHARDS",
    "Parallel",
    "Shard",
    "block_ranks",
    "exact_bytes",
    "has_experts",
    "per_rank",
]

MAX_SHARDS: Final = 1024
"""Ranks of one engine that are reckoned: more than any engine has, and the arithmetic takes a second."""
MAX_RANKS: Final = 64
"""Ranks over which a swarm deals experts. There are at most twice as many classes (`block_ranks`), each of which keeps
a chunk of at most 1 MiB open at the seed: 128 MiB."""
_WIDEST: Final = 2
"""Ranks of a class in expert parallel, unless all ranks need it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The blocks that `ranks` of an engine need, of the `shards` ranks over which experts are dealt."""

    shards: int
    ranks: tuple[int, ...]
    """Ascending, at least one."""

    def __post_init__(self) -> None:
        if not 2 <= self.shards <= MAX_RANKS:
            raise UsageError(f"A model is divided over 2 to {MAX_RANKS} ranks, not {self.shards}.")
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)) or self.ranks[-1] >= self.shards:
            raise UsageError(f"Name ranks from 0 to {self.shards - 1}, each once, of {self.shards}.")

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """The shard that `3/8` or `0,1/8` names. Raises `UsageError`."""
        if not re.fullmatch(r"\d{1,3}(,\d{1,3})*/\d{1,4}", text):
            raise UsageError(f"A shard is named as 3/8 (rank 3 of 8, from 0 on) or 0,1/8, not as {text!r}.")
        ranks, _, shards = text.partition("/")
        return cls(int(shards), tuple(sorted(int(rank) for rank in ranks.split(","))))

    def __str__(self) -> str:
        return f"{','.join(map(str, self.ranks))}/{self.shards}"

    def covers(self, other: object) -> bool:
        """Whether this shard has every block of `other`."""
        return isinstance(other, Shard) and self.shards == other.shards and set(other.ranks) <= set(self.ranks)

    def blocks(self, layout: Layout) -> "NDArray[np.bool_]":
        """For each block of the model, whether it is in this shard."""
        import numpy as np  # a relay knows shards, and loads no numpy

        mine = sum(1 << rank for rank in self.ranks)
        found = (bool(ranks & mine) for ranks in block_ranks(layout, self.shards, Parallel.EXPERT))
        return np.fromiter(found, np.bool_, layout.n_blocks)


_EXPERT: Final = re.compile(r"\.experts\.(\d+)\.")
_ATTENTION_ROWS: Final = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
_ROWS: Final = frozenset((*_ATTENTION_ROWS, "gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head"))
"""Linear layers whose outputs engines divide (stored as rows), and the vocabulary's tensors."""
_COLUMNS: Final = frozenset(["o_proj", "down_proj", "w2"])
"""Linear layers whose inputs engines divide: stored as columns."""


class Parallel(Enum):
    """How an engine divides a model. EXPERT: experts are divided, and each rank holds everything else. TENSOR: every
    matrix is divided, those of each expert too."""

    TENSOR = "tensor parallel"
    EXPERT = "expert parallel"


class _Cut(Enum):
    """How one tensor is divided. ONE: the rank of its expert has all of it."""

    ALL = 0
    ROWS = 1
    COLUMNS = 2
    ONE = 3


def _experts(layout: Layout) -> int:
    """The number of the base's experts whose tensors are stored one by one."""
    found = (_EXPERT.search(tensor.name) for tensor in layout.tensors if _is_divided(tensor))
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def has_experts(layout: Layout) -> bool:
    """Whether expert parallelism divides anything of this model."""
    return any(".experts." in tensor.name for tensor in layout.tensors if _is_divided(tensor))


def _is_divided(tensor: TensorSpec) -> bool:
    """Whether ranks may divide the tensor: those of other parts than the base (`codec.parts`) are needed by all."""
    return not tensor.name.startswith("~")


def _cut(tensor: TensorSpec, parallel: Parallel) -> _Cut:
    if len(tensor.shape) < 2 or not _is_divided(tensor):
        return _Cut.ALL
    stacked = ".experts." in tensor.name and _EXPERT.search(tensor.name) is None  # all experts in one tensor
    if parallel is Parallel.EXPERT:
        if stacked:
            return _Cut.ROWS
        return _Cut.ONE if ".experts." in tensor.name else _Cut.ALL
    if stacked:
        return _Cut.COLUMNS
    layer = tensor.name.removesuffix(".weight").rpartition(".")[2]
    return _Cut.ROWS if layer in _ROWS else _Cut.COLUMNS if layer in _COLUMNS else _Cut.ALL


def _rank_of_expert(name: str, experts: int, shards: int) -> int:
    match = _EXPERT.search(name)
    assert match is not None
    return int(match[1]) * shards // experts


@cache
def _row_ranks(rows: int, columns: int, shards: int) -> tuple[int, ...]:
    """For each block of a tensor that is cut by rows, the ranks that need it, as bits. Rank r has the rows from
    r * rows // shards on."""
    found: list[int] = []
    for start in range(0, rows * columns, BLOCK_ELEMENTS):
        end = min(start + BLOCK_ELEMENTS, rows * columns)
        first, last = (((element // columns + 1) * shards - 1) // rows for element in (start, end - 1))
        found.append((1 << (last + 1)) - (1 << first))
    return tuple(found)


def block_ranks(layout: Layout, shards: int, parallel: Parallel) -> list[int]:
    """For each block of the model, the ranks that need it: bit r stands for rank r. Blocks with equal bits are of one
    class: the same ranks need them.

    In expert parallel a block of three ranks or more (of a tensor with many small experts) counts as needed by all. So
    there are at most 2 x `shards` classes: one for each rank, one for each two that follow another, and one for all.
    """
    everyone, experts = (1 << shards) - 1, _experts(layout)
    found: list[int] = []
    for tensor in layout.tensors:
        cut = _cut(tensor, parallel)
        if cut is _Cut.ROWS and tensor.elements:
            rows = _row_ranks(tensor.shape[0], tensor.elements // tensor.shape[0], shards)
            narrow = parallel is Parallel.EXPERT
            found += (everyone if narrow and ranks.bit_count() > _WIDEST else ranks for ranks in rows)
        elif cut is _Cut.ONE:
            found += [1 << _rank_of_expert(tensor.name, experts, shards)] * tensor.n_blocks
        else:
            found += [everyone] * tensor.n_blocks
    return found


def per_rank(by_ranks: dict[int, int], shards: int) -> list[int]:
    """The sum for each rank of what it needs. `by_ranks`: bytes by the ranks that need them, as bits."""
    return [sum(nbytes for ranks, nbytes in by_ranks.items() if ranks >> rank & 1) for rank in range(shards)]


def _spans(size: int, shards: int) -> Iterator[int]:
    """The size of each rank's part of `size` rows or columns."""
    for rank in range(shards):
        yield (rank + 1) * size // shards - rank * size // shards


def exact_bytes(layout: Layout, shards: int, parallel: Parallel) -> list[int]:
    """For each rank, the bytes of the weights that it computes with: what it would take if blocks did not matter."""
    experts = _experts(layout)
    found = [0] * shards
    divided: Counter[tuple[int, int]] = Counter()
    for tensor in layout.tensors:
        cut = _cut(tensor, parallel)
        if cut is _Cut.ONE:
            found[_rank_of_expert(tensor.name, experts, shards)] += tensor.nbytes
        elif cut is _Cut.ALL or not tensor.elements:
            found = [nbytes + tensor.nbytes for nbytes in found]
        else:
            size = tensor.shape[0 if cut is _Cut.ROWS else -1]
            divided[size, tensor.nbytes // size] += 1
    for (size, line_bytes), count in divided.items():
        found = [nbytes + count * line_bytes * span for nbytes, span in zip(found, _spans(size, shards), strict=True)]
    return found
