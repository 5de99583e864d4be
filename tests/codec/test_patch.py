"""Weight patches for engines: written to a sealed memfd, and read back with every bound checked."""

import os

import numpy as np
import pytest
from codec_kit import LAYOUT, opened, publish, replica_of, stepped, weights
from hypothesis import given
from hypothesis import strategies as st

from codec import patch
from codec.bits import Bits
from codec.errors import PeerError
from codec.layout import Layout
from codec.patch import patch_hashes, read_patch, write_patch
from codec.staging import StagedChunk

OLD = weights()
NEW = stepped(OLD)


def staged() -> list[StagedChunk]:
    replica = replica_of(OLD)
    return [replica.stage(opened(chunk), chunk.body) for chunk in publish(replica, NEW)]


def patched(fd: int) -> dict[str, Bits]:
    bits = {name: array.copy() for name, array in OLD.items()}
    for name, indices, values in read_patch(fd):
        assert indices.dtype == np.int64
        assert np.all(np.diff(indices) > 0)
        assert values.dtype == bits[name].dtype
        bits[name][indices] = values
    return bits


@pytest.mark.parametrize("group", [1 << 22, 100])
def test_a_patched_engine_has_the_new_bits(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    monkeypatch.setattr(patch, "_GROUP", group)
    fd, nbytes = write_patch(reversed(staged()), LAYOUT)
    assert os.fstat(fd).st_size == nbytes
    for _ in range(2):  # a descriptor can be read twice
        found = patched(fd)
        assert all(np.array_equal(found[name], NEW[name]) for name in NEW)
    names = [name for name, _, _ in read_patch(fd)]
    assert names == sorted(names)
    assert (len(set(names)) == len(names)) == (group > 100)
    os.close(fd)


def test_a_patch_is_immutable() -> None:
    fd, _ = write_patch(staged(), LAYOUT)
    with pytest.raises(PermissionError):
        os.write(fd, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


def test_an_empty_patch() -> None:
    fd, nbytes = write_patch([], LAYOUT)
    assert list(read_patch(fd)) == []
    assert nbytes < 128
    os.close(fd)


def _written() -> bytes:
    fd, nbytes = write_patch(staged(), LAYOUT)
    try:
        return os.pread(fd, nbytes, 0)
    finally:
        os.close(fd)


GOOD = _written()


def memfd(data: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, data)
    return fd


@given(st.integers(0), st.binary(min_size=1, max_size=8), st.booleans())
def test_altered_bytes_are_refused_or_stay_in_bounds(at: int, by: bytes, head: bool) -> None:
    at %= 64 if head else len(GOOD)
    fd = memfd(GOOD[:at] + by + GOOD[at + len(by) :])
    try:
        for _, indices, values in read_patch(fd):
            assert indices.size == values.size > 0
            assert 0 <= indices[0] <= indices[-1] < 1 << 51
    except PeerError as error:
        assert str(error).startswith("patch")  # noqa: PT017 - either way is right
    finally:
        os.close(fd)


@pytest.mark.parametrize("length", [0, 7, 8, 20, 40, 100, -16, -1])
def test_a_truncated_patch_is_refused(length: int) -> None:
    fd = memfd(GOOD[:length])
    with pytest.raises(PeerError, match="patch"):
        list(read_patch(fd))
    os.close(fd)


def test_trailing_bytes_are_refused() -> None:
    fd = memfd(GOOD + b"\0")
    with pytest.raises(PeerError, match="bytes follow the last entry"):
        list(read_patch(fd))
    os.close(fd)


def test_a_patch_lists_the_hashes_of_each_block() -> None:
    fd, _ = write_patch(staged(), LAYOUT)
    replica = replica_of(OLD)
    predicted = replica.hashes.copy()
    for block, before, after in patch_hashes(fd, LAYOUT):
        assert predicted[block].tobytes() == before
        predicted[block] = np.frombuffer(after, np.uint8)
    assert (predicted == replica_of(NEW).hashes).all()
    with pytest.raises(PeerError, match=r"patch\.name"):
        list(patch_hashes(fd, Layout(LAYOUT.tensors[:1])))
    os.close(fd)
