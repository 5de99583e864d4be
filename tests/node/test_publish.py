"""A folder of checkpoints' way to the seed, without a network."""

import os
from pathlib import Path

import pytest
from seed_kit import LAYOUT, FakeSeed, random_replica, running

from codec import write_checkpoint
from codec.errors import UsageError
from node.publish import publish_folder, stamp


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "step_1", LAYOUT, random_replica(seed=1).bits, {})
    return tmp_path / "step_1"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_the_seed_has_the_folders_bits(home: Path, folder: Path) -> None:
    with running(home, FakeSeed(random_replica())) as seed:
        report = publish_folder(home, folder, step=1)
        assert (report["version"], report["root"]) == (1, random_replica(seed=1).root.hex())
        assert seed.seed.receiver.root == random_replica(seed=1).root


def test_a_checkpoint_that_changes_while_it_is_read_is_not_published(home: Path, folder: Path) -> None:
    before = stamp(folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    with running(home, FakeSeed(random_replica())) as seed:
        with pytest.raises(UsageError, match="written to while it was read"):
            publish_folder(home, folder, as_it_was=before)
        assert seed.seed.attempts == []
