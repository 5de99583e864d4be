"""`delta --shapes --shards`: which ranks need which blocks, by hand and against every weight of small models."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from codec.bits import DTYPES
from codec.chunk import BlockDelta, ChunkKey, seal_chunk
from codec.layout import BLOCK_ELEMENTS, Layout, TensorSpec
from codec.manifest import Manifest
from codec.pack import piece_target
from codec.shards import Parallel, block_ranks, exact_bytes, has_experts, per_rank
from codec.sign import Key
from codec.staging import encode
from node.tools.made_up import amplitude_of, made_up_norm, made_up_step
from node.tools.packed import Packed, pack
from node.tools.reckon import reckon, render
from node.tools.shapes import Kind, Shapes

MIXTURE = Shapes(
    "a small mixture",
    (
        Kind("model.embed_tokens.weight", (3000, 1024)),
        Kind("model.layers.{layer}.self_attn.q_proj.weight", (2048, 1024), layers=2),
        Kind("model.layers.{layer}.self_attn.o_proj.weight", (1024, 2048), layers=2),
        Kind("model.layers.{layer}.mlp.gate.weight", (8, 1024), layers=2),
        Kind("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", (1500, 1024), layers=2, experts=8),
        Kind("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", (1024, 1500), layers=2, experts=8),
        Kind("model.layers.{layer}.mlp.shared_experts.up_proj.weight", (1024, 1024), layers=2),
        Kind("model.norm.weight", (1024,)),
    ),
)


def layout_of(name: str, *shape: int) -> Layout:
    return Layout((TensorSpec(name, "BF16", shape),))


def test_rows_give_each_rank_a_run_of_blocks() -> None:
    """Blocks of 1024 rows: 4 ranks of 1500 rows have the bounds 1500, 3000, 4500, and a block across one is for two."""
    layout = layout_of("layers.0.up_proj.weight", 6000, 1024)
    assert block_ranks(layout, 4, Parallel.TENSOR) == [0b0001, 0b0011, 0b0110, 0b0100, 0b1100, 0b1000]
    assert block_ranks(layout, 4, Parallel.EXPERT) == [0b1111] * 6
    assert exact_bytes(layout, 4, Parallel.TENSOR) == [1500 * 1024 * 2] * 4


def test_columns_put_every_rank_into_every_block() -> None:
    layout = layout_of("layers.0.down_proj.weight", 1024, 6002)
    assert block_ranks(layout, 4, Parallel.TENSOR) == [0b1111] * 6
    assert exact_bytes(layout, 4, Parallel.TENSOR) == [1024 * 2 * columns for columns in (1500, 1501, 1500, 1501)]


def test_an_expert_is_of_one_rank_and_what_is_no_expert_is_of_all() -> None:
    names = [f"layers.0.experts.{expert}.w1.weight" for expert in range(4)]
    layout = Layout(tuple(TensorSpec(name, "BF16", (8, 8)) for name in (*names, "layers.0.router.weight")))
    assert has_experts(layout)
    assert block_ranks(layout, 2, Parallel.EXPERT) == [0b01, 0b01, 0b10, 0b10, 0b11]
    assert exact_bytes(layout, 2, Parallel.EXPERT) == [3 * 128] * 2


def test_experts_that_are_stored_in_one_tensor_are_cut_between_experts() -> None:
    layout = layout_of("layers.0.experts.up_proj", 4, 1024, 1024)
    assert has_experts(layout)
    assert block_ranks(layout, 4, Parallel.EXPERT) == [0b0001, 0b0010, 0b0100, 0b1000]
    assert block_ranks(layout, 4, Parallel.TENSOR) == [0b1111] * 4
    assert sum(exact_bytes(layout, 4, Parallel.TENSOR)) == layout.full_bytes


@pytest.mark.parametrize("name", ["model.norm.weight", "layers.0.mixer.weight", "layers.0.qkv_proj.weight"])
def test_a_tensor_that_is_not_known_to_be_divided_is_needed_by_all(name: str) -> None:
    layout = layout_of(name, *((64,) if "norm" in name else (64, 8)))
    assert block_ranks(layout, 8, Parallel.TENSOR) == [0xFF]
    assert exact_bytes(layout, 8, Parallel.TENSOR) == [layout.full_bytes] * 8


def test_empty_tensors_and_more_ranks_than_rows() -> None:
    assert block_ranks(layout_of("up_proj.weight", 0, 8), 4, Parallel.TENSOR) == []
    assert exact_bytes(layout_of("up_proj.weight", 0, 8), 4, Parallel.TENSOR) == [0] * 4
    layout = layout_of("up_proj.weight", 2, 8)
    assert sum(exact_bytes(layout, 4, Parallel.TENSOR)) == layout.full_bytes
    assert block_ranks(layout, 4, Parallel.TENSOR) == [0b1110]


@pytest.mark.parametrize("shards", [2, 3, 8])
@pytest.mark.parametrize("rows", [1, 5, 1023, 2500])
def test_a_rank_has_all_blocks_with_one_of_its_rows_and_no_others(rows: int, shards: int) -> None:
    columns = 1500
    found = block_ranks(layout_of("up_proj.weight", rows, columns), shards, Parallel.TENSOR)
    bounds = [rank * rows // shards for rank in range(shards + 1)]
    owner = np.searchsorted(bounds[1:], np.arange(rows), side="right")
    for block, ranks in enumerate(found):
        first, last = block * BLOCK_ELEMENTS, min((block + 1) * BLOCK_ELEMENTS, rows * columns) - 1
        needed = {int(rank) for rank in owner[first // columns : last // columns + 1]}
        assert needed <= {rank for rank in range(shards) if ranks >> rank & 1}
        assert {min(needed), max(needed)} == {(ranks & -ranks).bit_length() - 1, ranks.bit_length() - 1}


@cache
def coded(shapes: Shapes, density: float) -> tuple[list[BlockDelta], int]:
    """A really coded step of a small model, and how many elements it changes."""
    rng, found, changed, block = np.random.default_rng(5), list[BlockDelta](), 0, 0
    for tensor in shapes.layout.tensors:
        if len(tensor.shape) == 1:
            old = new = made_up_norm(tensor.elements)
        else:
            old, new = made_up_step(*tensor.shape, amplitude_of(density), rng)
        changed += int(np.count_nonzero(old != new))
        for start in range(0, tensor.elements, BLOCK_ELEMENTS):
            span = slice(start, start + BLOCK_ELEMENTS)
            delta = encode(block, old[span], new[span], DTYPES["BF16"])
            found += [delta] if delta else []
            block += 1
    return found, changed


def sealed_bytes(packed: Packed, body_bytes: int) -> Iterator[tuple[int, int]]:
    """Bytes of each sealed chunk: header and body."""
    for seq, deltas in enumerate(packed.chunks):
        key = ChunkKey(0, 1, 0, seq)
        chunk = seal_chunk(key, bytes(32), bytes(32), deltas, Key(bytes(32)), piece_target(body_bytes))
        yield len(chunk.header), len(chunk.body)


@pytest.mark.parametrize("parallel", list(Parallel))
@pytest.mark.slow
def test_the_reckoned_share_is_that_of_sealed_chunks(parallel: Parallel) -> None:
    """Every chunk of a really coded step is sealed, and each rank's bytes are counted."""
    deltas, changed = coded(MIXTURE, 0.02)
    body_bytes = sum(len(delta.payload) for delta in deltas)
    classes = block_ranks(MIXTURE.layout, 4, parallel)
    cut = pack(deltas, body_bytes, changed, classes)
    assert all(len({classes[delta.block] for delta in chunk}) == 1 for chunk in cut.chunks)
    assert sorted(delta.block for chunk in cut.chunks for delta in chunk) == [delta.block for delta in deltas]

    sizes = list(sealed_bytes(cut, body_bytes))
    ids = tuple(seq.to_bytes(32, "big") for seq in range(len(sizes)))
    total = sum(header + body for header, body in sizes)
    roots = (bytes(32), bytes(32), bytes(32))
    rest = sum(header for header, _ in sizes) + len(
        Manifest(bytes(32), 0, 1, 0, *roots, ids, total, changed).seal(Key(bytes(32)))
    )
    real = [
        rest
        + sum(body for (_, body), chunk in zip(sizes, cut.chunks, strict=True) if classes[chunk[0].block] >> rank & 1)
        for rank in range(4)
    ]
    share = reckon(MIXTURE, density=changed / MIXTURE.elements, shards=4).shares[parallel]
    assert share.delta_bytes == pytest.approx(max(real), rel=0.05)
    assert share.chunks == pytest.approx(len(cut.chunks), abs=2)
    uncut = pack(deltas, body_bytes, changed)
    assert len(uncut.chunks) <= len(cut.chunks) <= len(uncut.chunks) + len(set(classes))
    assert total < 1.01 * sum(map(sum, sealed_bytes(uncut, body_bytes)))


@pytest.mark.slow
def test_the_shares_of_a_mixture() -> None:
    found = reckon(MIXTURE, shards=4)
    layout = MIXTURE.layout
    experts, tensors = found.shares[Parallel.EXPERT], found.shares[Parallel.TENSOR]
    expert_bytes = 2 * 8 * 2 * 1500 * 1024 * 2
    assert experts.exact_bytes == layout.full_bytes - expert_bytes * 3 // 4 == experts.replica_bytes
    assert tensors.exact_bytes < experts.exact_bytes < tensors.replica_bytes < layout.full_bytes
    for share in (experts, tensors):
        assert share.delta_bytes <= share.uncut_delta_bytes <= found.delta_bytes
        assert share.delta_bytes / found.delta_bytes == pytest.approx(share.replica_bytes / layout.full_bytes, rel=0.05)
    text = render(found)
    assert "one of 4 ranks" in text
    assert "expert parallel" in text
    assert "one of" not in render(reckon(MIXTURE))


def test_bytes_are_summed_for_each_rank() -> None:
    assert per_rank({0b001: 5, 0b110: 7, 0b111: 100}, 3) == [105, 107, 107]
