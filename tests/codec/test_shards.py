"""The rule that deals experts over ranks, and chunks that are cut by it: properties.

`tests/node/tools/test_shards.py` has examples by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.chunk import CODER_RICE, BlockDelta
from codec.errors import UsageError
from codec.layout import BLOCK_ELEMENTS, Layout, TensorSpec
from codec.pack import ClassPacker, Packer
from codec.shards import MAX_RANKS, Parallel, Shard, block_ranks

SHARDS = st.integers(2, MAX_RANKS)
DIVISIONS = SHARDS.flatmap(lambda shards: st.tuples(st.just(shards), st.sets(st.integers(0, shards - 1), min_size=1)))
SHARD = DIVISIONS.map(lambda found: Shard(found[0], tuple(sorted(found[1]))))
SIZES = st.integers(1, 3 * BLOCK_ELEMENTS // 1024)


@st.composite
def mixtures(draw: st.DrawFn) -> Layout:
    """Experts one by one or in one tensor, and what is no expert, in blocks of any number of experts."""
    tensors = [TensorSpec("router.weight", "BF16", (draw(SIZES), 1024))]
    for expert in range(draw(st.integers(0, 70))):
        tensors.append(TensorSpec(f"layers.0.experts.{expert}.w1", "BF16", (draw(SIZES), 1024)))
    if draw(st.booleans()):
        tensors.append(TensorSpec("layers.1.experts.w1", "BF16", (draw(st.integers(1, 130)), draw(SIZES), 64)))
    return Layout(tuple(sorted(tensors, key=lambda tensor: tensor.name)))


@given(mixtures(), SHARDS)
def test_each_block_is_needed_and_classes_are_few(layout: Layout, shards: int) -> None:
    found = block_ranks(layout, shards, Parallel.EXPERT)
    everyone = (1 << shards) - 1
    assert len(found) == layout.n_blocks
    assert all(0 < ranks <= everyone for ranks in found)
    assert len(set(found)) <= 2 * shards
    for ranks in set(found) - {everyone}:
        low = (ranks & -ranks).bit_length() - 1
        assert ranks in (1 << low, 3 << low)


@given(mixtures(), SHARDS)
def test_ranks_together_hold_the_model_and_each_its_own_experts(layout: Layout, shards: int) -> None:
    held = [Shard(shards, (rank,)).blocks(layout) for rank in range(shards)]
    assert sum(held).min(initial=1) >= 1
    experts = [tensor for tensor in layout.tensors if ".experts." in tensor.name and len(tensor.shape) == 2]
    for tensor in experts:
        rank = int(tensor.name.split(".experts.")[1].split(".")[0]) * shards // len(experts)
        for block in layout.blocks_of(tensor.name):
            assert [bool(each[block]) for each in held] == [other == rank for other in range(shards)]
    for tensor in layout.tensors:
        if len(tensor.shape) == 3:  # rank r has the experts from r * count // shards on
            count, size = tensor.shape[0], tensor.elements // tensor.shape[0]
            for index, block in enumerate(layout.blocks_of(tensor.name)):
                first = index * BLOCK_ELEMENTS // size
                last = (min((index + 1) * BLOCK_ELEMENTS, tensor.elements) - 1) // size
                for rank in range(shards):
                    span = range(rank * count // shards, (rank + 1) * count // shards)
                    if set(span) & set(range(first, last + 1)):
                        assert held[rank][block]
        elif ".experts." not in tensor.name:
            assert all(each[block] for each in held for block in layout.blocks_of(tensor.name))


@given(mixtures(), SHARD)
def test_several_ranks_hold_what_each_of_them_holds(layout: Layout, shard: Shard) -> None:
    together = shard.blocks(layout)
    apart = sum(Shard(shard.shards, (rank,)).blocks(layout) for rank in shard.ranks)
    assert (together == (apart > 0)).all()


@given(SHARD, SHARD)
def test_a_shard_covers_another_of_its_division_with_no_other_rank(one: Shard, other: Shard) -> None:
    assert one.covers(one)
    assert one.covers(other) == (one.shards == other.shards and set(other.ranks) <= set(one.ranks))


@given(SHARD)
def test_a_shard_is_named_and_read_back(shard: Shard) -> None:
    assert Shard.parse(str(shard)) == shard
    assert Shard.parse("1,0/2") == Shard(2, (0, 1))


@pytest.mark.parametrize(
    "text",
    ["", "3", "/4", "3/", "4/4", "0/1", "0/0", "0/65", "-1/4", "0,0/4", "0;1/4", "0,/4", "0/4/4", "x/4", "9" * 99],
)
def test_what_names_no_shard_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Shard.parse(text)


@pytest.mark.parametrize("ranks", [(), (1, 0), (0, 0), (4,)])
def test_ranks_that_cannot_be_are_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        Shard(4, ranks)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000)), max_size=60), st.integers(1, 4000))
def test_no_chunk_has_blocks_of_two_classes(blocks: list[tuple[int, int]], target: int) -> None:
    deltas = [BlockDelta(block, CODER_RICE, bytes(32), bytes(size)) for block, (_, size) in enumerate(blocks)]
    classes = [wanted for wanted, _ in blocks]
    packer = ClassPacker(target, classes)
    chunks = [chunk for delta in deltas for chunk in packer.add(delta)]
    rest = packer.flush()
    assert len(rest) <= len(set(classes))
    assert all(len({classes[delta.block] for delta in chunk}) == 1 for chunk in chunks + rest)
    assert sorted(delta.block for chunk in chunks + rest for delta in chunk) == list(range(len(deltas)))
    assert packer.flush() == []

    one, plain = ClassPacker(target), Packer(target)
    assert [one.add(delta) for delta in deltas] == [plain.add(delta) for delta in deltas]
    one.target_bytes = plain.target_bytes = 4000
    assert (one.flush(), one.target_bytes) == (plain.flush(), 4000)
