"""Manifests and state roots."""

from dataclasses import fields, replace

import numpy as np
import pytest
from codec_kit import KEY
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import PeerError
from codec.manifest import Manifest, open_manifest, state_root
from codec.sign import SIGNATURE_BYTES, Key

IDS = tuple(bytes([i]) * 32 for i in range(5))
MANIFEST = Manifest(KEY.public, 1, 2, 3, b"p" * 32, b"r" * 32, b"l" * 32, IDS, 10**12, 10**11)


def test_a_manifest_round_trips() -> None:
    assert open_manifest(MANIFEST.seal(KEY), KEY.public) == MANIFEST
    empty = replace(MANIFEST, chunk_ids=())
    assert open_manifest(empty.seal(KEY), KEY.public) == empty


def test_a_manifest_without_its_chunk_ids_is_at_most_a_kilobyte() -> None:
    huge = replace(MANIFEST, epoch=2**62, version=2**62, attempt=2**62, payload_bytes=2**62, changed=2**62)
    assert len(huge.seal(KEY)) - 32 * len(IDS) < 300


@given(st.integers(0), st.integers(1, 255))
def test_an_altered_manifest_is_refused(at: int, flip: int) -> None:
    sealed = bytearray(MANIFEST.seal(KEY))
    sealed[at % len(sealed)] ^= flip
    with pytest.raises(PeerError):
        open_manifest(bytes(sealed), KEY.public)


@given(st.integers(0), st.binary(max_size=4))
def test_signed_garbage_is_bounded(at: int, by: bytes) -> None:
    body = bytearray(MANIFEST.seal(KEY)[SIGNATURE_BYTES:])
    at %= len(body)
    body[at : at + len(by)] = by
    try:
        found = open_manifest(KEY.seal(b"swarm-node manifest 1", bytes(body)), KEY.public)
    except PeerError:
        return
    assert found.seal(KEY)[SIGNATURE_BYTES:] == body  # a manifest has one encoding


@pytest.mark.parametrize("cut", [1, 31, 32, 100, 250])
def test_a_truncated_manifest_is_refused(cut: int) -> None:
    body = MANIFEST.seal(KEY)[SIGNATURE_BYTES:-cut]
    with pytest.raises(PeerError, match="manifest"):
        open_manifest(KEY.seal(b"swarm-node manifest 1", body), KEY.public)


def test_a_manifest_of_another_swarm_is_refused() -> None:
    other = Key.generate()
    with pytest.raises(PeerError, match=r"manifest\.swarm"):
        open_manifest(MANIFEST.seal(other), other.public)
    with pytest.raises(PeerError, match="signature"):
        open_manifest(MANIFEST.seal(KEY), other.public)


def test_a_repeated_chunk_is_refused() -> None:
    with pytest.raises(PeerError, match="twice"):
        replace(MANIFEST, chunk_ids=(*IDS, IDS[0])).seal(KEY)


def test_every_field_is_signed() -> None:
    sealed = {MANIFEST.seal(KEY)}
    for field in fields(Manifest):
        value = getattr(MANIFEST, field.name)
        if field.name == "swarm":
            continue
        other = value + 1 if isinstance(value, int) else value[:-1] if isinstance(value, tuple) else b"x" * 32
        sealed.add(replace(MANIFEST, **{field.name: other}).seal(KEY))
    assert len(sealed) == len(fields(Manifest))


def test_roots_depend_on_layout_and_every_block() -> None:
    hashes = np.arange(96, dtype=np.uint8).reshape(3, 32)
    roots = {state_root(bytes(32), hashes), state_root(b"x" * 32, hashes), state_root(bytes(32), hashes[:2])}
    for block in range(3):
        other = hashes.copy()
        other[block, block] ^= 1
        roots.add(state_root(bytes(32), other))
    assert len(roots) == 6
