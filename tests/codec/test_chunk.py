"""Chunks: only signed headers and pieces are accepted; everything else is refused before it is decoded."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from codec_kit import KEY, opened
from hypothesis import given
from hypothesis import strategies as st

from codec.chunk import (
    CODER_RAW,
    MAX_BODY_BYTES,
    MAX_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    BlockDelta,
    Chunk,
    ChunkKey,
    chunk_id,
    open_header,
    seal_chunk,
    verify_piece,
)
from codec.errors import PeerError, SwarmError
from codec.sign import SIGNATURE_BYTES, Key
from codec.varint import Writer

ROOT, LAYOUT_HASH = bytes(32), bytes(range(32))


def chunk_of(*sizes: int, first: int = 3, piece_bytes: int = 16384) -> Chunk:
    rng = np.random.default_rng(sum(sizes))
    deltas = [BlockDelta(first + 2 * i, i % 3, rng.bytes(32), rng.bytes(size)) for i, size in enumerate(sizes)]
    return seal_chunk(ChunkKey(1, 2, 3, 4), ROOT, LAYOUT_HASH, deltas, KEY, piece_bytes)


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=20), st.sampled_from([14, 15, 16, 17]))
def test_headers_round_trip(sizes: list[int], log_piece: int) -> None:
    chunk = chunk_of(*sizes, piece_bytes=1 << log_piece)
    header = opened(chunk)
    assert header.swarm == KEY.public
    assert header.key == ChunkKey(1, 2, 3, 4)
    assert (header.parent_root, header.layout_hash) == (ROOT, LAYOUT_HASH)
    assert header.piece_bytes == 1 << log_piece
    assert [entry.length for entry in header.blocks] == sizes
    assert [entry.block for entry in header.blocks] == [3 + 2 * i for i in range(len(sizes))]
    assert [entry.coder for entry in header.blocks] == [i % 3 for i in range(len(sizes))]
    assert header.body_bytes == len(chunk.body) == sum(sizes)
    assert b"".join(header.payloads(chunk.body)) == chunk.body
    spans = [header.piece_range(i) for i in range(header.n_pieces)]
    assert [i for span in spans for i in (span.start, span.stop)][:: len(spans) * 2 - 1] == [0, sum(sizes)]
    assert all(a.stop == b.start for a, b in itertools.pairwise(spans))


def test_order_of_deltas_does_not_matter() -> None:
    deltas = [BlockDelta(i, 0, bytes([i]) * 32, bytes([i]) * 9) for i in range(5)]
    key = ChunkKey(0, 1, 0, 0)
    one = seal_chunk(key, ROOT, LAYOUT_HASH, deltas, KEY)
    assert seal_chunk(key, ROOT, LAYOUT_HASH, deltas[::-1], KEY) == one
    assert one.id == chunk_id(one.header)


def test_headers_are_small() -> None:
    """A header takes 34 bytes per block, 32 bytes per piece, and less than 250 bytes besides."""
    chunk = chunk_of(*[9000] * 7)
    assert len(chunk.header) < 250 + 7 * 36 + 4 * 32


def test_a_signature_of_another_authority_or_domain_is_refused() -> None:
    chunk = chunk_of(10)
    with pytest.raises(PeerError, match="signature"):
        open_header(chunk.header, Key.generate().public)
    body = chunk.header[SIGNATURE_BYTES:]
    with pytest.raises(PeerError, match="signature"):
        open_header(KEY.seal(b"swarm-node manifest 1", body), KEY.public)


def test_a_header_signed_for_another_swarm_is_refused() -> None:
    """A header that names one key is signed by another, as if a trainer signed another trainer's chunk again."""
    other = Key.generate()
    body = chunk_of(10).header[SIGNATURE_BYTES:]
    with pytest.raises(PeerError, match="swarm"):
        open_header(other.seal(b"swarm-node chunk 1", body), other.public)


@given(st.integers(0), st.integers(1, 255))
def test_every_altered_header_is_refused(at: int, flip: int) -> None:
    sealed = bytearray(chunk_of(100, 200).header)
    sealed[at % len(sealed)] ^= flip
    with pytest.raises(PeerError):
        open_header(bytes(sealed), KEY.public)


@given(st.integers(0), st.binary(max_size=4))
def test_signed_garbage_is_still_bounded(at: int, by: bytes) -> None:
    """A bug of the authority must not crash a node: every signed header decodes or raises `PeerError`."""
    body = bytearray(chunk_of(100, 200).header[SIGNATURE_BYTES:])
    at %= len(body)
    body[at : at + len(by)] = by
    try:
        header = open_header(KEY.seal(b"swarm-node chunk 1", bytes(body)), KEY.public)
    except SwarmError:
        return
    assert header.n_pieces == -(-header.body_bytes // header.piece_bytes)


@pytest.mark.parametrize("size", [0, 1, SIGNATURE_BYTES, MAX_HEADER_BYTES + 1])
def test_sizes_of_headers(size: int) -> None:
    with pytest.raises(PeerError):
        open_header(bytes(size), KEY.public)


@pytest.mark.parametrize(
    "deltas",
    [
        [],
        [BlockDelta(1, 0, bytes(32), b"")],
        [BlockDelta(1, 0, bytes(32), b"x"), BlockDelta(2, 0, bytes(32), bytes(MAX_CHUNK_BYTES))],
        [BlockDelta(1, CODER_RAW, bytes(32), bytes(MAX_BODY_BYTES + 1))],
    ],
    ids=["none", "empty payload", "two, too large", "one, too large"],
)
def test_a_header_that_receivers_refuse_is_never_signed(deltas: list[BlockDelta]) -> None:
    with pytest.raises(PeerError, match="chunk"):
        seal_chunk(ChunkKey(0, 0, 0, 0), ROOT, LAYOUT_HASH, deltas, KEY)


def test_one_raw_block_may_be_larger_than_a_chunk() -> None:
    chunk = seal_chunk(
        ChunkKey(0, 0, 0, 0), ROOT, LAYOUT_HASH, [BlockDelta(0, CODER_RAW, bytes(32), bytes(4 << 20))], KEY, 131072
    )
    assert opened(chunk).n_pieces == 32


def test_a_repeated_block_is_refused() -> None:
    out = Writer(b"SWC1" + KEY.public)
    for number in (0, 1, 0, 0):
        out.uint(number)
    out.raw(ROOT + LAYOUT_HASH)
    for number in (14, 2):
        out.uint(number)
    for gap in ((5, b"\x00"), (5, b"\xff" * 8 + b"\x7f")):  # no encoding expresses a gap of -1
        out.raw(gap[1])
        out.uint(30)
        out.raw(bytes(32))
    with pytest.raises(PeerError, match="chunk"):
        open_header(KEY.seal(b"swarm-node chunk 1", bytes(out.data)), KEY.public)


def test_pieces_are_verified() -> None:
    chunk = chunk_of(20_000, 20_000)
    header = open_header(chunk.header, KEY.public)
    good = chunk.body[16384:32768]
    verify_piece(header, 1, good)
    verify_piece(header, 1, memoryview(good))
    for index, piece, why in (
        (0, good, "hash"),
        (1, good[:-1], "length"),
        (1, good + b"x", "length"),
        (1, bytes([good[0] ^ 1]) + good[1:], "hash"),
        (3, good, "index"),
        (-1, good, "index"),
    ):
        with pytest.raises(PeerError, match=f"piece.{why}"):
            verify_piece(header, index, piece)
    with pytest.raises(IndexError):
        header.piece_range(3)


def test_headers_are_values() -> None:
    header = open_header(chunk_of(10).header, KEY.public)
    assert header == open_header(chunk_of(10).header, KEY.public)
    assert header != replace(header, parent_root=LAYOUT_HASH)
