"""A node whose engine's memory is its replica: versions, joiners, restarts, kills, and a bit that flips there."""

import os
import shutil
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from kit import check
from memory_kit import descendants, flip_bit, generates, prove, reads, root_of, step

from codec import Checkpoint
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, State, Swarm, swarm_in

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="the engine needs torch"),
    pytest.mark.usefixtures("executed"),  # the engine is found as the node's child
]
ENGINE = ("--replica", "engine", "--device", "cpu", "--threads", "1", *LOOPBACK)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers, one of whose tensors has two blocks."""
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16

    folder = tmp_path_factory.mktemp("base")
    save_bf16(random_model(TinyRecipe(vocabulary=20_000, hidden=64, inner=96, layers=2, seed=1)), folder)
    return folder


def disk_bytes(swarm: Swarm, pattern: str) -> int:
    """The disk space of the files in the node's home that match."""
    return sum(path.stat().st_blocks * 512 for path in swarm.home("node").glob(pattern))


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The base, and the checkpoints of five training steps."""
    folders = [base]
    for number in range(1, 6):
        folders.append(step(folders[-1], tmp_path_factory.mktemp("steps") / str(number), number))
    return folders


@pytest.mark.slow
@pytest.mark.long
def test_versions_are_decoded_and_served_from_the_engines_memory(tmp_path: Path, folders: list[Path]) -> None:
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(folders[0])
        ticket = swarm.ticket()
        swarm.start("node", "join", ticket, *ENGINE, "--model", str(folders[0]))
        swarm.until("node", generates(0), STARTED_WITHIN_S)
        model_bytes = Checkpoint.open(folders[0]).layout.nbytes
        swarm.wait("the engine's file is given back", lambda: disk_bytes(swarm, "swarm-*/replica") < model_bytes / 10)
        for number in (1, 2):
            swarm.publish(folders[number], "--wait")
            swarm.until("node", generates(number))
            assert prove(swarm) == root_of(folders[number])
        state = swarm.state("node")
        blocks = Checkpoint.open(folders[0]).layout.n_blocks
        assert reads(state)["right"] >= 2 * blocks
        assert "replica" not in state["nodes"][0]["memory"]["parts"]
        assert state["nodes"][0]["memory"]["parts"]["blocks read from the engine"] > 0

        # A machine without the model gets blocks from the node, which reads them back out of its engine.
        swarm.node("joiner", ticket)
        swarm.until("joiner", lambda state: state["nodes"][0]["root"] == root_of(folders[2]))
        served = reads(swarm.state("node"))["right"] - reads(state)["right"]
        assert served > blocks / 2

        # The engine's process ends: the next one is filled from disk.
        os.kill(next(descendants(swarm.pid("node"))), signal.SIGKILL)
        swarm.until("node", lambda state: state["nodes"][0]["engine_restarts"] == 1)
        swarm.until("node", generates(2), STARTED_WITHIN_S)
        swarm.publish(folders[3], "--wait")
        swarm.until("node", generates(3))
        assert prove(swarm) == root_of(folders[3])

        # A clean end, and a start without the folder's help.
        assert swarm.signal("node", signal.SIGTERM) == 143
        swarm.publish(folders[4])
        swarm.start("node", "join", ticket, *ENGINE)
        swarm.until("node", generates(4), STARTED_WITHIN_S)
        assert prove(swarm) == root_of(folders[4])


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_version_leaves_a_node_that_proves_itself(
    tmp_path: Path, folders: list[Path]
) -> None:
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(folders[0])
        ticket = swarm.ticket()
        words = ("join", ticket, *ENGINE, "--model", str(folders[0]))
        swarm.start("node", *words)
        swarm.until("node", generates(0), STARTED_WITHIN_S)
        moments: list[Callable[[State], bool]] = [
            lambda state: state["nodes"][0]["received_bytes"] > received,  # its first bytes are there
            lambda state: state["nodes"][0]["held"] == [0, 2],  # the replica is the version, the engine perhaps not
        ]
        for number, moment in enumerate(moments, 1):
            received = swarm.state("node")["nodes"][0]["received_bytes"]
            swarm.publish(folders[number])
            swarm.until("node", moment)
            assert swarm.signal("node", signal.SIGKILL) == -9
            swarm.start("node", *words)
            swarm.until("node", generates(number), STARTED_WITHIN_S)
            assert prove(swarm) == root_of(folders[number])


@pytest.mark.long
def test_a_base_folder_that_is_gone_is_written_again_from_the_engine(tmp_path: Path, folders: list[Path]) -> None:
    base = shutil.copytree(folders[0], tmp_path / "base")
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(folders[0])
        swarm.start("node", "join", swarm.ticket(), *ENGINE, "--model", str(base))
        swarm.until("node", generates(0), STARTED_WITHIN_S)
        swarm.publish(folders[1], "--wait")
        received = swarm.until("node", generates(1))["nodes"][0]["received_bytes"]
        shutil.rmtree(base)
        swarm.until_there("node", "swarm-*/anchors/0.1/model.safetensors")
        assert "replica_damaged" not in swarm.log("node")
        model_bytes = Checkpoint.open(folders[0]).layout.nbytes
        assert swarm.state("node")["nodes"][0]["received_bytes"] - received < model_bytes / 10


@pytest.mark.long
def test_a_bit_that_flips_in_the_engines_memory_is_found_and_repaired(tmp_path: Path, folders: list[Path]) -> None:
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(folders[0])
        swarm.start("node", "join", swarm.ticket(), *ENGINE, "--model", str(folders[0]))
        swarm.until("node", generates(0), STARTED_WITHIN_S)
        name = "model.layers.1.mlp.down_proj.weight"
        values = Checkpoint.open(folders[0]).bits(name)[:256].astype(np.uint32) << 16  # float32, as the engine has them
        assert flip_bit(next(descendants(swarm.pid("node"))), values.tobytes(), 2) >= 1
        own = swarm.own_status("node", prove=True)
        assert own.live_proven is False

        # The next version is decoded all the same, from disk; then the engine is filled again.
        swarm.publish(folders[1], "--wait")
        swarm.until("node", lambda state: state["nodes"][0]["engine_reloads"] >= 1)
        swarm.until("node", generates(1))
        assert prove(swarm) == root_of(folders[1])
        assert reads(swarm.state("node"))["other"] >= 1
        swarm.publish(folders[2], "--wait")
        swarm.until("node", generates(2))
        assert prove(swarm) == root_of(folders[2])


def test_what_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        words = ("join", "swarm1x", "--replica", "engine", "--engine", "none")
        check(swarm.command("a", *words), 2, "--replica engine: there is no engine")
