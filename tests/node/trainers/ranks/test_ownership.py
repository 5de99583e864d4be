"""Each element is written by one rank, and each block encoded by one rank, which holds some of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec import Layout, TensorSpec
from codec.errors import UsageError
from codec.layout import BLOCK_ELEMENTS
from node.trainers.publish.attempt import runs_of
from node.trainers.ranks.ownership import Ownership, TensorPart

COLUMNS = 1 << 16


def cut(size: int, world: int, rank: int) -> tuple[int, int]:
    """Parts as `torch.chunk` cuts them: the last ranks may hold less, or nothing."""
    rows = -(-size // world)
    start = min(rank * rows, size)
    return start, min(rows, size - start)


def held_by(layout: Layout, world: int, whole: set[str]) -> list[dict[str, TensorPart | None]]:
    return [
        {
            s.name: None if s.name in whole or not s.shape else TensorPart(0, *cut(s.shape[0], world, rank))
            for s in layout.tensors
        }
        for rank in range(world)
    ]


@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    world=st.integers(1, 9),
    whole=st.sets(st.integers(0, 5)),
)
def test_every_element_is_written_once_and_every_block_encoded_once(sizes: list[int], world: int, whole: set[int]):
    layout = Layout(tuple(TensorSpec(f"t{i}", "BF16", (rows, COLUMNS)) for i, rows in enumerate(sizes)))
    ownership = Ownership(layout, held_by(layout, world, {f"t{i}" for i in whole}))
    for spec in layout.tensors:
        parts = [(rank, ownership.writes(rank, spec.name)) for rank in range(world)]
        written = [row for _, part in parts if part is not None for row in range(part.start, part.start + part.length)]
        assert written == sorted(written)
        assert sorted(written) == list(range(spec.shape[0]))
        for block in layout.blocks_of(spec.name):
            first = layout.block(block).start // COLUMNS
            rows = range(first, first + layout.block(block).count // COLUMNS)
            touching = {
                rank for rank, part in parts if part and set(rows) & set(range(part.start, part.start + part.length))
            }
            assert set(ownership.touching(block)) == touching
            assert ownership.owner[block] in touching
    assert sum(len(ownership.blocks_of(rank)) for rank in range(world)) == layout.n_blocks


def test_border_blocks_go_to_the_rank_with_the_least_load():
    layout = Layout(tuple(TensorSpec(f"t{i:02}", "BF16", (64, 64)) for i in range(40)))
    ownership = Ownership(layout, held_by(layout, 4, set()))
    assert [len(ownership.blocks_of(rank)) for rank in range(4)] == [10] * 4


def test_blocks_within_a_part_stay_with_their_rank():
    layout = Layout((TensorSpec("t", "BF16", (64 * BLOCK_ELEMENTS // COLUMNS, COLUMNS)),))
    ownership = Ownership(layout, held_by(layout, 4, set()))
    assert all(len(ownership.touching(block)) == 1 for block in range(64))
    assert ownership.owner.tolist() == [rank for rank in range(4) for _ in range(16)]


def test_tensors_that_all_ranks_hold_are_divided_among_them():
    layout = Layout(tuple(TensorSpec(f"t{i}", "BF16", (8, 8)) for i in range(4)))
    ownership = Ownership(layout, [{spec.name: None for spec in layout.tensors}] * 2)
    assert [len(ownership.tensors_of(rank)) for rank in range(2)] == [2, 2]
    assert [len(ownership.blocks_of(rank)) for rank in range(2)] == [2, 2]


def test_shards_by_column_make_every_block_a_border_block():
    layout = Layout((TensorSpec("t", "BF16", (COLUMNS, 64)),))
    ownership = Ownership(layout, [{"t": TensorPart(1, 0, 32)}, {"t": TensorPart(1, 32, 32)}])
    assert ownership.touching(0) == (0, 1)
    assert sorted(ownership.owner.tolist()) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "held",
    [
        [{"t": TensorPart(0, 0, 4)}],
        [{"t": TensorPart(0, 0, 4)}, {"t": TensorPart(0, 5, 3)}],
        [{"t": TensorPart(0, 0, 4)}, {"t": TensorPart(1, 4, 4)}],
        [{}, {}],
    ],
)
def test_parts_that_are_not_a_whole_tensor_are_refused(held: list[dict[str, TensorPart | None]]):
    layout = Layout((TensorSpec("t", "BF16", (8, 8)),))
    with pytest.raises(UsageError, match="do not hold t"):
        Ownership(layout, held)


@given(st.sets(st.integers(0, 40)))
def test_runs_cover_the_numbers(numbers: set[int]):
    runs = runs_of(np.array(sorted(numbers), np.int64))
    assert [n for first, count in runs for n in range(first, first + count)] == sorted(numbers)
    assert len(runs) == sum(n - 1 not in numbers for n in numbers)
