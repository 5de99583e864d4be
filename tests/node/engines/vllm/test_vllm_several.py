"""A node with two real vLLMs on one replica: versions in both, the loss of one, sleep and wake."""

import os
import signal
from pathlib import Path

import pytest
from memory_kit import descendants, generates, prove, root_of, step

from node.engines.base import SamplingParams
from node.trainers.api import Swarm as Trainer
from scenarios.engines.engine_bench import SMALL
from scenarios.harness.swarm import LOOPBACK, State, Swarm, swarm_in

pytestmark = [pytest.mark.vllm, pytest.mark.long]

WITHIN_S = 900.0
"""For two vLLMs to start at the same time on a busy machine."""


def states(*wanted: str):
    def met(state: State) -> bool:
        return [engine["state"] for engine in state["nodes"][0].get("engines", [])] == list(wanted)

    return met


def processes(swarm: Swarm, socket: str) -> list[int]:
    """The driver of the engine at this socket, and the processes of its vLLM."""
    found: list[int] = []
    for pid in descendants(swarm.pid("node")):
        if socket in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]:
            found += [pid, *descendants(pid)]
    return found


def draw(trainer: Trainer) -> set[tuple[int, int]]:
    """The versions that drew some rollouts."""
    groups = list(trainer.rollouts([[5, 6, 7], [8, 9]], 6, SamplingParams(max_tokens=12), timeout_s=WITHIN_S))
    assert [len(group.rollouts) for group in groups] == [6, 6]
    return {span.version for group in groups for rollout in group.rollouts for span in rollout.spans}


def test_two_vllms_of_one_node_follow_fail_and_sleep(untied: Path, python: Path, tmp_path: Path) -> None:
    folders = [untied]
    for number in range(1, 5):
        folders.append(step(folders[-1], tmp_path / f"step_{number}", number))
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(untied)
        flags = tuple(f"--vllm-arg={flag}" for flag in SMALL)
        node = ("--engine", "vllm", "--engines", "2", "--vllm-python", str(python), "--engine-port", "0", *flags)
        swarm.start("node", "join", swarm.ticket(), *node, "--model", str(untied), *LOOPBACK)
        state = swarm.until("node", states("ready", "ready"), WITHIN_S)
        assert len(set(state["nodes"][0]["engine_urls"])) == 2
        sockets = [str(swarm.home("node") / name) for name in ("engine.sock", "engine2.sock")]
        with Trainer.attach(home=swarm.home("seed"), base=untied) as trainer:
            assert draw(trainer) == {(0, 0)}
            for number in (1, 2):
                swarm.publish(folders[number], "--wait")
                swarm.until("node", generates(number), WITHIN_S)
                swarm.until("node", states("ready", "ready"), WITHIN_S)
                assert prove(swarm) == root_of(folders[number]), "the root of both"

            os.kill(processes(swarm, sockets[0])[-1], signal.SIGKILL)
            swarm.until("node", states("starting", "ready"), WITHIN_S)
            swarm.publish(folders[3], "--wait")
            swarm.until("node", generates(3), WITHIN_S)
            assert draw(trainer) == {(0, 3)}
            state = swarm.until("node", states("ready", "ready"), WITHIN_S)
            assert [engine["restarts"] for engine in state["nodes"][0]["engines"]] == [1, 0]
            assert prove(swarm) == root_of(folders[3])

            running = [pid for socket in sockets for pid in processes(swarm, socket)]
            assert trainer.sleep(swarm.home("node"), within_s=60) is True
            assert not any(Path(f"/proc/{pid}").exists() for pid in running), "no process of either is left"
            swarm.publish(folders[4], "--wait")
            trainer.wake(swarm.home("node"), within_s=WITHIN_S)
            assert draw(trainer) == {(0, 4)}
            swarm.until("node", states("ready", "ready"), WITHIN_S)
            assert prove(swarm) == root_of(folders[4])
