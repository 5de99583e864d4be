"""Packing deltas into chunks, and the sizes that follow from F."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.chunk import MAX_CHUNK_BYTES, BlockDelta
from codec.pack import MIN_CHUNK_BYTES, Packer, chunk_target, piece_target


@pytest.mark.parametrize(
    ("payload", "chunk", "piece"),
    [
        (0, 64 << 10, 16 << 10),
        (250_000, 64 << 10, 16 << 10),
        (30_000_000, 117_187, 16 << 10),
        ((100 << 20) - 1, 409_599, 64 << 10),  # rounded to the nearest: one byte less must not halve the size
        (110_000_000, 429_687, 64 << 10),
        (10**10, 1 << 20, 256 << 10),
    ],
)
def test_sizes(payload: int, chunk: int, piece: int) -> None:
    assert chunk_target(payload) == chunk
    assert piece_target(payload) == piece


def test_few_nodes_get_larger_pieces() -> None:
    assert piece_target(10 << 20, 8) == 64 << 10
    assert piece_target(100 << 20, 8) == piece_target(100 << 20, 16) == 256 << 10
    assert piece_target(100 << 20, 17) == piece_target(100 << 20) == 64 << 10


@pytest.mark.parametrize(
    ("mbit", "piece"),
    [(1000, 256 << 10), (200, 256 << 10), (100, 128 << 10), (25, 32 << 10), (1, 16 << 10), (0, 16 << 10)],
)
def test_no_piece_takes_long_to_send(mbit: float, piece: int) -> None:
    assert piece_target(100 << 20, 8, mbit) == piece


@given(st.lists(st.integers(1, 100_000), max_size=60), st.integers(MIN_CHUNK_BYTES, MAX_CHUNK_BYTES))
def test_every_delta_goes_into_one_chunk(sizes: list[int], target: int) -> None:
    packer = Packer(target)
    deltas = [BlockDelta(i, 0, bytes(32), bytes(size)) for i, size in enumerate(sizes)]
    full = [chunk for delta in deltas for chunk in packer.add(delta)] + packer.flush()
    assert packer.flush() == []
    assert sorted(delta.block for chunk in full for delta in chunk) == list(range(len(sizes)))
    for chunk in full:
        assert len(chunk) == 1 or sum(len(delta.payload) for delta in chunk) <= target


def test_a_full_chunk_is_returned_at_once() -> None:
    packer = Packer(100)
    small, large = BlockDelta(0, 0, bytes(32), bytes(60)), BlockDelta(1, 2, bytes(32), bytes(500))
    assert packer.add(small) == []
    assert packer.add(large) == [[large]]
    assert packer.add(small) == [[small]]
    assert packer.flush() == [[small]]


def test_very_small_deltas_do_not_overfill_a_header() -> None:
    packer = Packer(MAX_CHUNK_BYTES)
    full = [chunk for i in range(20_000) for chunk in packer.add(BlockDelta(i, 0, bytes(32), b"x"))]
    assert [len(chunk) for chunk in full] == [8192, 8192]
