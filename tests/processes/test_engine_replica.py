"""A node whose engine's memory is its replica: versions, joiners, restarts, kills, and a bit that flips there."""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from kit import check

from codec import Checkpoint, Replica, write_checkpoint
from codec.bits import Bits
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, State, Swarm, swarm_in

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="the engine needs torch")
ENGINE = ("--replica", "engine", "--device", "cpu", "--threads", "1", *LOOPBACK)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers, one of whose tensors has two blocks."""
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16

    folder = tmp_path_factory.mktemp("base")
    save_bf16(random_model(TinyRecipe(vocabulary=20_000, hidden=64, inner=96, layers=2, seed=1)), folder)
    return folder


def step(before: Path, after: Path, seed: int) -> Path:
    """Write the checkpoint after a training step: the lowest bit of 1 % of the elements is flipped."""
    checkpoint, rng = Checkpoint.open(before), np.random.default_rng(seed)

    def bits(name: str) -> Bits:
        changed = checkpoint.bits(name).copy()
        changed[rng.choice(changed.size, max(1, changed.size // 100), replace=False)] ^= 1
        return changed

    write_checkpoint(after, checkpoint.layout, bits, checkpoint.files)
    return after


def root_of(folder: Path) -> str:
    return Replica.from_checkpoint(Checkpoint.open(folder)).root.hex()


def generates(version: int) -> Callable[[State], bool]:
    """Condition on a node's state: replica and engine are at the version."""
    return lambda state: state["nodes"][0]["held"] == state["nodes"][0].get("engine") == [0, version]


def prove(swarm: Swarm, name: str) -> str:
    """The root of the engine's bits, which are those of its version."""
    own = swarm.own_status(name, prove=True)
    assert own.live_proven is True
    assert isinstance(own.live_root, str)
    return own.live_root


def reads(state: State) -> dict[str, int]:
    return state["nodes"][0]["live_reads"]


def disk_bytes(swarm: Swarm, pattern: str) -> int:
    """The disk space of the files in the node's home that match."""
    return sum(path.stat().st_blocks * 512 for path in swarm.home("node").glob(pattern))


def engine_pid(swarm: Swarm) -> int:
    node = swarm.running["node"].pid
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == node:
                return int(stat.parent.name)
    raise AssertionError("the node has no engine")


def flip_bit(pid: int, values: np.ndarray) -> int:
    """Flip a bit of the first of these values wherever a process has them in memory; returns in how many places."""
    wanted, found = values.tobytes(), 0
    maps = Path(f"/proc/{pid}/maps").read_text()
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for start, end in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw-p", maps, re.MULTILINE):
            memory.seek(int(start, 16))
            try:
                data = memory.read(int(end, 16) - int(start, 16))
            except OSError:
                continue
            at = data.find(wanted)
            while at >= 0:
                memory.seek(int(start, 16) + at + 2)
                memory.write(bytes([data[at + 2] ^ 1]))
                found, at = found + 1, data.find(wanted, at + 1)
    return found


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The base, and the checkpoints of five training steps."""
    folders = [base]
    for number in range(1, 6):
        folders.append(step(folders[-1], tmp_path_factory.mktemp("steps") / str(number), number))
    return folders


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
            assert prove(swarm, "node") == root_of(folders[number])
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
        os.kill(engine_pid(swarm), signal.SIGKILL)
        swarm.until("node", lambda state: state["nodes"][0]["engine_restarts"] == 1)
        swarm.until("node", generates(2), STARTED_WITHIN_S)
        swarm.publish(folders[3], "--wait")
        swarm.until("node", generates(3))
        assert prove(swarm, "node") == root_of(folders[3])

        # A clean end, and a start without the folder's help.
        assert swarm.signal("node", signal.SIGTERM) == 143
        swarm.publish(folders[4])
        swarm.start("node", "join", ticket, *ENGINE)
        swarm.until("node", generates(4), STARTED_WITHIN_S)
        assert prove(swarm, "node") == root_of(folders[4])


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
            assert prove(swarm, "node") == root_of(folders[number])


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


def test_a_bit_that_flips_in_the_engines_memory_is_found_and_repaired(tmp_path: Path, folders: list[Path]) -> None:
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(folders[0])
        swarm.start("node", "join", swarm.ticket(), *ENGINE, "--model", str(folders[0]))
        swarm.until("node", generates(0), STARTED_WITHIN_S)
        name = "model.layers.1.mlp.down_proj.weight"
        words = Checkpoint.open(folders[0]).bits(name)[:256].astype(np.uint32) << 16
        assert flip_bit(engine_pid(swarm), words.view(np.float32)) >= 1
        own = swarm.own_status("node", prove=True)
        assert own.live_proven is False

        # The next version is decoded all the same, from disk; then the engine is filled again.
        swarm.publish(folders[1], "--wait")
        swarm.until("node", lambda state: state["nodes"][0]["engine_reloads"] >= 1)
        swarm.until("node", generates(1))
        assert prove(swarm, "node") == root_of(folders[1])
        assert reads(swarm.state("node"))["other"] >= 1
        swarm.publish(folders[2], "--wait")
        swarm.until("node", generates(2))
        assert prove(swarm, "node") == root_of(folders[2])


def test_what_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        words = ("join", "swarm1x", "--replica", "engine", "--engine", "none")
        check(swarm.command("a", *words), 2, "--replica engine: there is no engine")
