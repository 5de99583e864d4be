"""A node of real processes whose replica is the memory of a vLLM on two ranks (`--replica engine`)."""

import signal
from pathlib import Path

import pytest
from memory_kit import descendants, flip_bit, generates, prove, reads, root_of, step

from codec import Checkpoint
from scenarios.engines.engine_bench import SMALL
from scenarios.engines.engine_models import make_wide_norms
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, swarm_in

pytestmark = pytest.mark.vllm


def words(ticket: str, python: Path, *more: str) -> tuple[str, ...]:
    flags = tuple(f"--vllm-arg={flag}" for flag in SMALL)
    node = ("--engine", "vllm", "--replica", "engine", "--engine-port", "0", "--vllm-python", str(python))
    return ("join", ticket, *node, "--threads", "2", *flags, *LOOPBACK, *more)


@pytest.mark.long
def test_a_node_follows_with_its_two_ranks_as_the_replica(tied: Path, python: Path, tmp_path: Path) -> None:
    folders = [tied]
    for number in range(1, 5):
        folders.append(step(folders[-1], tmp_path / f"step_{number}", number))
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(tied)
        ticket = swarm.ticket()
        swarm.start("node", *words(ticket, python, "--tp", "2", "--model", str(tied)))
        swarm.until("node", generates(0), STARTED_WITHIN_S)
        for number in (1, 2):
            swarm.publish(folders[number], "--wait")
            swarm.until("node", generates(number))
            assert prove(swarm) == root_of(folders[number])
        assert reads(swarm.state("node"))["right"] >= 2 * Checkpoint.open(tied).layout.n_blocks
        assert reads(swarm.state("node"))["other"] == 0

        # A bit flips in a rank's memory: the next version is decoded from disk, and the engine is filled again.
        bits = Checkpoint.open(folders[2]).bits("model.layers.1.mlp.gate_proj.weight")[:256].tobytes()
        assert sum(flip_bit(pid, bits, 0) for pid in descendants(swarm.pid("node"))) >= 1
        assert swarm.own_status("node", prove=True).live_proven is False
        swarm.publish(folders[3], "--wait")
        swarm.until("node", lambda state: state["nodes"][0]["engine_reloads"] >= 1)
        swarm.until("node", generates(3))
        assert prove(swarm) == root_of(folders[3])

        assert swarm.signal("node", signal.SIGKILL) == -9
        swarm.publish(folders[4])
        swarm.start("node", *words(ticket, python, "--tp", "2"))
        swarm.until("node", generates(4), STARTED_WITHIN_S)
        assert prove(swarm) == root_of(folders[4])


@pytest.mark.long
def test_weights_in_another_form_are_refused_in_a_sentence(untied: Path, python: Path, tmp_path: Path) -> None:
    base = make_wide_norms(untied, tmp_path / "wide")
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(base)
        ended = swarm.command("node", *words(swarm.ticket(), python, "--model", str(base)), within_s=STARTED_WITHIN_S)
        assert ended.code == 2, ended
        last = ended.error_lines.splitlines()[-1]
        assert "--replica engine: vLLM keeps model." in last
        assert last.endswith("Use --replica disk, or ram where there is room.")
