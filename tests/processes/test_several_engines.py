"""A node with two engines on one replica: versions, kills of either, rollouts meanwhile, sleep and wake."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from memory_kit import descendants, generates, prove, root_of, step

from codec.errors import UsageError
from node.engines.base import SamplingParams
from node.trainers.api import Swarm as Trainer
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, State, Swarm, swarm_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch") is None, reason="the engines need torch"),
    pytest.mark.usefixtures("executed"),  # the engines are found as the node's children
]

ENGINES = ("--engines", "2", "--device", "cpu", "--threads", "2", *LOOPBACK)
VERSIONS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The checkpoints of a random model, and of four training steps."""
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16

    base, steps = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("steps")
    save_bf16(random_model(TinyRecipe(vocabulary=64, hidden=64, inner=96, layers=2, seed=1)), base)
    found = [base]
    for number in range(1, VERSIONS + 1):
        found.append(step(found[-1], steps / str(number), number))
    return found


@pytest.fixture
def swarm(tmp_path: Path, folders: list[Path]) -> Iterator[Swarm]:
    """A seed, and a node both of whose engines are ready."""
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(folders[0])
        swarm.start("node", "join", swarm.ticket(), *ENGINES, "--model", str(folders[0]))
        swarm.until("node", both("ready"), STARTED_WITHIN_S)
        yield swarm


def both(*states: str) -> Callable[[State], bool]:
    """Condition on a node's state: its engines do this; one word: both do."""
    wanted = [*states] * (2 // len(states))
    return lambda state: [engine["state"] for engine in state["nodes"][0].get("engines", [])] == wanted


def engine_pid(swarm: Swarm, number: int) -> int:
    """The process of one of the node's engines."""
    name = "engine.sock" if number == 1 else f"engine{number}.sock"
    found = [pid for pid in descendants(swarm.pid("node")) if name in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(found) == 1
    return found[0]


def replica_maps(pid: int) -> set[str]:
    """The shared memory that a process maps, by its inode."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:swarm" in line}


class Rollouts:
    """Rollouts that a trainer takes in a thread of its own, until told to stop."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._ends = trainer, threading.Event()
        self.groups: list[Any] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                wanted = self._trainer.rollouts([[1, 2, 3], [4, 5]], 8, SamplingParams(max_tokens=24), timeout_s=120)
                self.groups += wanted
        except BaseException as error:
            self.error = error

    def __enter__(self) -> "Rollouts":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(180)
        assert self.error is None, self.error


@pytest.mark.long
def test_either_engine_may_be_killed_while_the_other_serves(swarm: Swarm, folders: list[Path]) -> None:
    first, second = engine_pid(swarm, 1), engine_pid(swarm, 2)
    assert replica_maps(first) & replica_maps(second), "both read the one replica of the node"
    with Trainer.attach(home=swarm.home("seed"), base=folders[0]) as trainer, Rollouts(trainer) as work:
        for number in (1, 2):
            swarm.publish(folders[number], "--wait")
            swarm.until("node", generates(number))
            swarm.until("node", both("ready"))
            assert prove(swarm) == root_of(folders[number]), "the root of both engines' bits"
        swarm.wait("there are rollouts", lambda: len(work.groups) > 3)

        os.kill(engine_pid(swarm, 1), signal.SIGKILL)
        swarm.until("node", both("starting", "ready"))
        before = len(work.groups)
        swarm.publish(folders[3], "--wait")
        swarm.until("node", generates(3))
        swarm.wait("the other one serves", lambda: len(work.groups) > before + 1)
        state = swarm.until("node", both("ready"), STARTED_WITHIN_S)
        assert [engine["restarts"] for engine in state["nodes"][0]["engines"]] == [1, 0]
        assert prove(swarm) == root_of(folders[3])

        os.kill(engine_pid(swarm, 2), signal.SIGSTOP)  # it hangs: it answers nothing, and is not ended
        swarm.publish(folders[4], "--wait")
        swarm.until("node", both("ready", "behind"))
        before = len(work.groups)
        swarm.wait("the other one serves", lambda: len(work.groups) > before + 1)
        os.kill(engine_pid(swarm, 2), signal.SIGCONT)
        state = swarm.until("node", both("ready"), STARTED_WITHIN_S)
        assert [engine["restarts"] for engine in state["nodes"][0]["engines"]] == [1, 0]
        assert prove(swarm) == root_of(folders[4])
    for group in work.groups:
        assert len(group.rollouts) == 8
    assert len({span.version for group in work.groups for one in group.rollouts for span in one.spans}) >= 3


def test_engines_sleep_while_a_trainer_needs_their_memory(swarm: Swarm, folders: list[Path]) -> None:
    node = swarm.home("node")
    with Trainer.attach(home=swarm.home("seed"), base=folders[0]) as trainer:
        list(trainer.rollouts([[1, 2, 3]], 4, SamplingParams(max_tokens=8), timeout_s=90))
        pids = [engine_pid(swarm, number) for number in (1, 2)]
        assert trainer.sleep(node, within_s=30) is True
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "their memory is free"
        assert trainer.sleep(node, within_s=30) is True, "it does nothing twice"
        state = swarm.until("node", both("asleep"))
        assert state["nodes"][0]["asleep"] is True
        assert state["nodes"][0]["engine"] is None

        # Versions are received, and wait for the engines; work waits too.
        for number in (1, 2):
            swarm.publish(folders[number], "--wait")
        swarm.until("node", lambda state: state["nodes"][0]["held"] == [0, 2])
        with Rollouts(trainer) as work:
            swarm.wait("it waits", lambda: swarm.seed_status().work.groups_open > 0)
            trainer.wake(node, within_s=STARTED_WITHIN_S)
            swarm.wait("it is done", lambda: len(work.groups) > 1)
        assert {span.version for group in work.groups for one in group.rollouts for span in one.spans} == {(0, 2)}
        swarm.until("node", both("ready"), STARTED_WITHIN_S)
        assert prove(swarm) == root_of(folders[2])
        state = swarm.state("node")
        assert [engine["restarts"] for engine in state["nodes"][0]["engines"]] == [0, 0], "nothing went wrong"

        # The commands do the same; running samples are given back where there is no time for them.
        with Rollouts(trainer) as work:
            swarm.wait("it works", lambda: len(work.groups) > 1)
            assert swarm.json("node", "sleep", "--within", "1s")["asleep"] is True
            swarm.publish(folders[3], "--wait")
            assert swarm.json("node", "wake", "--timeout", "3m") == {"asleep": False, "ready": True}
        swarm.until("node", generates(3), STARTED_WITHIN_S)

        with pytest.raises(UsageError, match="no engine here"):
            trainer.sleep(swarm.home("seed"))


@pytest.mark.long
def test_a_node_that_sleeps_ends_and_starts_awake(swarm: Swarm, folders: list[Path]) -> None:
    assert swarm.json("node", "sleep")["finished"] is True
    assert swarm.signal("node", signal.SIGTERM) == 143
    swarm.start("node", "join", swarm.ticket(), *ENGINES, "--model", str(folders[0]))
    swarm.until("node", both("ready"), STARTED_WITHIN_S)
