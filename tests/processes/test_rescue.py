"""The weights of a swarm whose seed, with its disk, is lost: out of any node's home, bit for bit."""

import shutil
from pathlib import Path

import pytest
from kit import check, checkpoint, holds, root_of, step, weights

from codec import Checkpoint
from scenarios.harness.swarm import swarm_on

pytestmark = pytest.mark.slow

FIRST = weights(tensors=6, elements=40_000)
SECOND = step(FIRST, 1)
THIRD = step(SECOND, 2)


def test_a_lost_seeds_weights_come_back_from_a_node(tmp_path: Path) -> None:
    with swarm_on(tmp_path / "swarm", checkpoint(tmp_path / "base", FIRST), nodes=1) as swarm:
        for number, words in enumerate((SECOND, THIRD)):
            swarm.publish(checkpoint(tmp_path / f"step{number}", words), "--wait")
        swarm.until("node0", holds(root_of(THIRD)))
        peer_id = swarm.state("seed")["swarm"]
        swarm.kill("seed")
        shutil.rmtree(swarm.home("seed"))
        shutil.rmtree(tmp_path / "step1")

        written = swarm.json("node0", "rescue", str(tmp_path / "rescued"))
        assert written["swarm"] == peer_id
        assert (written["version"], written["newest"]) == ([0, 2], [0, 2])
        assert written["root"] == root_of(THIRD)
        assert_has(tmp_path / "rescued", THIRD)

        older = swarm.json("node0", "rescue", str(tmp_path / "older"), "--version", "1", "--swarm", peer_id)
        assert older["root"] == root_of(SECOND)
        assert_has(tmp_path / "older", SECOND)

        check(swarm.command("node0", "rescue", str(tmp_path / "older")), 2, "exists already")
        check(swarm.command("node0", "rescue", str(tmp_path / "no"), "--version", "9"), 2, "does not lead to version 9")
        check(swarm.command("node0", "rescue", str(tmp_path / "no"), "--swarm", "seed"), 2, "is no PeerId")
        check(swarm.command("other", "rescue", str(tmp_path / "no")), 2, "holds no version")
        assert not (tmp_path / "no").exists()


def assert_has(folder: Path, words: list) -> None:
    found = Checkpoint.open(folder)
    assert len(found.layout.tensors) == len(words)
    for spec, tensor in zip(found.layout.tensors, words, strict=True):
        assert (found.bits(spec.name) == tensor).all(), spec.name
    assert (folder / "config.json").exists()
