"""Which blocks of a model each rank of a tensor- or expert-parallel engine needs, from the tensors' names and shapes.

Pure. A block is a fixed range of a tensor's elements in their stored order, so a tensor that is cut by rows gives each
rank a run of blocks, and one that is cut by columns gives every rank a part of every block: all ranks need all of it.
What a rank cannot be shown to do without counts as needed.
"""

import re
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Final

from codec.layout import BLOCK_ELEMENTS, Layout, TensorSpec

__all__ = ["MAX_SHARDS", "Parallel", "block_ranks", "exact_bytes", "has_experts", "per_rank"]

MAX_SHARDS: Final = 1024
"""Ranks of one engine that are reckoned: more than any engine has, and the arithmetic takes a second."""

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
    """The number of experts whose tensors are stored one by one."""
    found = (_EXPERT.search(tensor.name) for tensor in layout.tensors)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def has_experts(layout: Layout) -> bool:
    """Whether expert parallelism divides anything of this model."""
    return any(".experts." in tensor.name for tensor in layout.tensors)


def _cut(tensor: TensorSpec, parallel: Parallel) -> _Cut:
    if len(tensor.shape) < 2:
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
    class: the same ranks need them."""
    everyone, experts = (1 << shards) - 1, _experts(layout)
    found: list[int] = []
    for tensor in layout.tensors:
        cut = _cut(tensor, parallel)
        if cut is _Cut.ROWS and tensor.elements:
            found += _row_ranks(tensor.shape[0], tensor.elements // tensor.shape[0], shards)
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
