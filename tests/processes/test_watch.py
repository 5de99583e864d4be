"""`seed --watch` publishes the checkpoints that a trainer writes, and no incomplete ones."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit import checkpoint, root_of, step, weights

from scenarios.harness.swarm import State, Swarm, swarm_in

WORDS = [weights()]
for number in range(1, 5):
    WORDS.append(step(WORDS[-1], number))

pytestmark = pytest.mark.slow


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    checkpoint(tmp_path / "base", WORDS[0])
    (tmp_path / "runs").mkdir()
    with swarm_in(tmp_path) as swarm:
        yield swarm


def _sealed(number: int) -> Callable[[State], bool]:
    root = root_of(WORDS[number])
    return lambda state: state["root"] == root


def _cut(folder: Path, whole: Path) -> None:
    """Copy a checkpoint with only the first half of its weights file."""
    shutil.copytree(whole, folder)
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)


def test_whole_checkpoints_are_published_and_incomplete_ones_are_not(swarm: Swarm, tmp_path: Path) -> None:
    swarm.seed(tmp_path / "base", "--watch", str(tmp_path / "runs"), "--watch-quiet", "1s")
    checkpoint(tmp_path / "runs" / "step_1", WORDS[1])
    swarm.until("seed", _sealed(1))
    whole = checkpoint(tmp_path / "step_2", WORDS[2])
    _cut(tmp_path / "runs" / "step_2", whole)
    swarm.until_logged("seed", "not_published")
    assert swarm.state("seed")["head"] == [0, 1]
    shutil.copy(whole / "model.safetensors", tmp_path / "runs" / "step_2")
    swarm.until("seed", _sealed(2))
    checkpoint(tmp_path / "runs" / "other", weights(3, 1000))  # of another model: logged and ignored
    swarm.until_logged("seed", "another model")
    assert swarm.signal("seed") == 143


def test_a_marker_starts_publication_and_a_restart_does_not_go_back(swarm: Swarm, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    words = ("--watch", str(runs), "--watch-marker", "STABLE")
    (checkpoint(runs / "step_1", WORDS[1]) / "STABLE").touch()
    swarm.seed(tmp_path / "base", *words)
    swarm.until("seed", _sealed(1))
    checkpoint(runs / "step_2", WORDS[2])  # complete, but without the marker
    assert swarm.signal("seed") == 143
    swarm.seed(tmp_path / "base", *words)
    (checkpoint(runs / "step_3", WORDS[3]) / "STABLE").touch()
    state = swarm.until("seed", _sealed(3))
    assert state["head"] == [0, 2]
    assert swarm.signal("seed") == 143
