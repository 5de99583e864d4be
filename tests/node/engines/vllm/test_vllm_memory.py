"""A node of real processes whose replica is the memory of a vLLM on two ranks (`--replica engine`)."""

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from codec import Checkpoint, Replica, write_checkpoint
from codec.bits import Bits
from scenarios.engines.engine_bench import SMALL
from scenarios.engines.engine_models import make_wide_norms
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, State, swarm_in

pytestmark = pytest.mark.vllm


def step(before: Path, after: Path, seed: int) -> Path:
    """Write the checkpoint after a training step: the lowest bit of 1 % of the elements is flipped."""
    checkpoint, rng = Checkpoint.open(before), np.random.default_rng(seed)

    def bits(name: str) -> Bits:
        changed = checkpoint.bits(name).copy()
        changed[rng.choice(changed.size, max(1, changed.size // 100), replace=False)] ^= 1
        return changed

    write_checkpoint(after, checkpoint.layout, bits, checkpoint.files)
    return after


def generates(version: int) -> Callable[[State], bool]:
    return lambda state: state["nodes"][0]["held"] == state["nodes"][0].get("engine") == [0, version]


def words(ticket: str, python: Path, *more: str) -> tuple[str, ...]:
    flags = tuple(f"--vllm-arg={flag}" for flag in SMALL)
    node = ("--engine", "vllm", "--replica", "engine", "--engine-port", "0", "--vllm-python", str(python))
    return ("join", ticket, *node, "--threads", "2", *flags, *LOOPBACK, *more)


def test_a_node_follows_with_its_two_ranks_as_the_replica(tied: Path, python: Path, tmp_path: Path) -> None:
    folders = [tied]
    for number in range(1, 4):
        folders.append(step(folders[-1], tmp_path / f"step_{number}", number))
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(tied)
        ticket = swarm.ticket()
        swarm.start("node", *words(ticket, python, "--tp", "2", "--model", str(tied)))
        swarm.until("node", generates(0), STARTED_WITHIN_S)
        for number in (1, 2):
            swarm.publish(folders[number], "--wait")
            swarm.until("node", generates(number))
            own = swarm.own_status("node", prove=True)
            expected = Replica.from_checkpoint(Checkpoint.open(folders[number])).root.hex()
            assert (own.live_root, own.live_proven) == (expected, True)
        blocks = Checkpoint.open(tied).layout.n_blocks
        reads = swarm.state("node")["nodes"][0]["live_reads"]
        assert reads["right"] >= 2 * blocks
        assert reads["other"] == 0

        assert swarm.signal("node", signal.SIGKILL) == -9
        swarm.publish(folders[3])
        swarm.start("node", *words(ticket, python, "--tp", "2"))
        swarm.until("node", generates(3), STARTED_WITHIN_S)
        expected = Replica.from_checkpoint(Checkpoint.open(folders[3])).root.hex()
        assert swarm.own_status("node", prove=True).live_root == expected


def test_weights_in_another_form_are_refused_in_a_sentence(untied: Path, python: Path, tmp_path: Path) -> None:
    base = make_wide_norms(untied, tmp_path / "wide")
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(base)
        ended = swarm.command("node", *words(swarm.ticket(), python, "--model", str(base)), within_s=STARTED_WITHIN_S)
        assert ended.code == 2, ended
        last = ended.error_lines.splitlines()[-1]
        assert "--replica engine: vLLM keeps model." in last
        assert last.endswith("Use --replica disk, or ram where there is room.")
