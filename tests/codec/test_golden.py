"""Golden vectors: frozen bytes must always decode, with this codec and with a decoder that shares no code with it."""

import struct
from pathlib import Path

import numpy as np
import pytest
from codec_kit import KEY, differing, replica_of
from plain_decoder import Model, read_layout

from codec.bits import Bits
from codec.chunk import CODER_PCO, CODER_RICE, BlockDelta, ChunkHeader, chunk_id, open_header, seal_chunk
from codec.layout import Layout
from codec.manifest import open_manifest

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = Layout.from_bytes((GOLDEN / "layout").read_bytes())


def state(name: str) -> dict[str, Bits]:
    data = np.frombuffer((GOLDEN / name).read_bytes(), np.uint8)
    found = {}
    for tensor in LAYOUT.tensors:
        found[tensor.name] = data[: tensor.nbytes].view(tensor.type.bits)
        data = data[tensor.nbytes :]
    assert data.size == 0
    return found


def chunks(name: str) -> list[tuple[bytes, bytes]]:
    data = (GOLDEN / f"{name}.chunks").read_bytes()
    found = []
    while data:
        head, body = struct.unpack("<II", data[:8])
        found.append((data[8 : 8 + head], data[8 + head : 8 + head + body]))
        data = data[8 + head + body :]
    return found


@pytest.mark.parametrize("name", ["rice", "pco"])
def test_the_plain_decoder_yields_the_new_bits(name: str) -> None:
    model = Model(read_layout((GOLDEN / "layout").read_bytes()), LAYOUT.hash)
    model.load((GOLDEN / "old").read_bytes())
    before = model.root()
    for sealed, body in chunks(name):
        assert model.apply(sealed, body, KEY.public) == before
    assert model.dump() == (GOLDEN / "new").read_bytes()
    manifest = open_manifest((GOLDEN / f"{name}.manifest").read_bytes(), KEY.public)
    assert (manifest.parent_root, manifest.root) == (before, model.root())
    assert model.modes == {0, 1, 2, 3}, "every way to write a list of numbers stands in the golden files"
    assert model.coders == ({0, 2} if name == "rice" else {1, 2})
    assert model.gap_codes == (set() if name == "rice" else {0, 1})


@pytest.mark.parametrize("name", ["rice", "pco"])
def test_the_codec_yields_the_new_bits(name: str) -> None:
    old, new = state("old"), state("new")
    replica = replica_of(old, LAYOUT)
    manifest = open_manifest((GOLDEN / f"{name}.manifest").read_bytes(), KEY.public)
    assert replica.root == manifest.parent_root
    assert tuple(chunk_id(sealed) for sealed, _ in chunks(name)) == manifest.chunk_ids
    staged = [replica.stage(open_header(sealed, KEY.public), body) for sealed, body in chunks(name)]
    assert replica.predicted_root(staged) == manifest.root
    replica.scatter(staged)
    assert differing(replica, new) == []
    assert sum(part.changed for part in staged) == manifest.changed


@pytest.mark.parametrize(("name", "coder"), [("rice", CODER_RICE), ("pco", CODER_PCO)])
def test_the_encoder_still_writes_these_bytes(name: str, coder: int) -> None:
    """The format allows encoders to choose other codes; this encoder must not change them by accident."""
    old, new = state("old"), state("new")
    replica = replica_of(old, LAYOUT)
    for sealed, body in chunks(name):
        header: ChunkHeader = open_header(sealed, KEY.public)
        deltas: list[BlockDelta] = []
        for entry in header.blocks:
            spec = LAYOUT.block(entry.block)
            delta = replica.encode_block(entry.block, new[spec.name][spec.start : spec.start + spec.count], coder)
            assert delta is not None
            deltas.append(delta)
        again = seal_chunk(header.key, header.parent_root, header.layout_hash, deltas, KEY, header.piece_bytes)
        assert again.body == body
        assert again.header == sealed
