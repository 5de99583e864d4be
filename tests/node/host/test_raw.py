"""A file as a model: written, read back, and refused when it does not fit."""

import os
from pathlib import Path

import pytest
from seed_kit import LAYOUT

from codec import Checkpoint, Layout, Replica
from codec.errors import UsageError
from node.host.raw import check_raw, raw_content, write_raw, write_raw_base
from node.trainers.tensors.file_blocks import RawBlocks


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Checkpoint.open(write_raw_base(tmp_path / "raw", 3_000_000)).layout


def test_the_base_is_an_empty_file_and_is_not_rewritten(tmp_path: Path, layout: Layout) -> None:
    folder = tmp_path / "raw"
    assert write_raw_base(folder, 3_000_000) == folder
    replica = Replica.from_checkpoint(Checkpoint.open(folder), layout)
    assert len(raw_content(replica)) == 0
    with pytest.raises(UsageError, match="--raw-mb"):
        write_raw_base(folder, 2_000_000)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 3_000_000])
def test_a_file_round_trips(tmp_path: Path, layout: Layout, size: int) -> None:
    file, out = tmp_path / "in", tmp_path / "out"
    file.write_bytes(bytes(range(256)) * (size // 256) + bytes(size % 256))
    out.write_bytes(b"an older one, longer" * 10**6)
    replica = Replica.create(layout)
    blocks = RawBlocks(file, layout)
    for block in reversed(range(layout.n_blocks)):
        replica._writable(block)[:] = blocks.block(block)
    blocks.check_unchanged()
    blocks.close()
    write_raw(raw_content(replica), out)
    assert out.read_bytes() == file.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "raw"]


@pytest.mark.parametrize(
    ("capacity", "parts"),
    [(1, 1), ((64 << 10) + 1, 2), (1 << 20, 16), (100 << 20, 256), (512 << 20, 512), (8 << 30, 4096)],
)
def test_a_small_file_has_many_blocks_and_a_large_one_a_bounded_layout(
    tmp_path: Path, capacity: int, parts: int
) -> None:
    layout = Checkpoint.open(write_raw_base(tmp_path / "other", capacity)).layout
    assert check_raw(layout) == capacity
    assert len(layout.tensors) == parts + 1


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, layout: Layout) -> None:
    (tmp_path / "large").write_bytes(bytes(3_000_001))
    with pytest.raises(UsageError, match="3,000,001"):
        RawBlocks(tmp_path / "large", layout)
    with pytest.raises(UsageError, match="Cannot read"):
        RawBlocks(tmp_path / "not there", layout)
    with pytest.raises(UsageError, match="carries a policy"):
        RawBlocks(tmp_path / "large", LAYOUT)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, layout: Layout) -> None:
    file = tmp_path / "in"
    file.write_bytes(bytes(3_000_000))
    blocks = RawBlocks(file, layout)
    os.utime(file, ns=(1, 1))
    with pytest.raises(UsageError, match="written to while it was read"):
        blocks.check_unchanged()
    os.truncate(file, 2_000_000)
    with pytest.raises(UsageError, match="written to while it was read"):
        [blocks.block(block) for block in range(layout.n_blocks)]
