"""In a real control group with too little memory, each process says so in one sentence and is not killed."""

import contextlib
import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from kit import check, checkpoint, weights
from memory_kit import generates, prove, reads, root_of, step

from codec import Checkpoint
from node.settings import memory_plan
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, Swarm, swarm_in

LIMIT_BYTES = 1 << 30
GROUPS = (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
"""Folder under /sys/fs/cgroup and the file of the limit: version 2, version 1."""
ENTER = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"')


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of `LIMIT_BYTES`."""
    for controller, limit in GROUPS:
        folder = Path("/sys/fs/cgroup", controller, f"swarm-test-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / limit).exists():
                (folder / limit).write_text(str(LIMIT_BYTES))
                yield folder
                return
        finally:
            _remove(folder)
    pytest.skip("this machine lets us make no control group for memory")


def _remove(folder: Path) -> None:
    """Remove a control group; the kernel refuses while a killed process in it is still coming to its end."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
    folder.rmdir()


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(tmp_path / "swarm") as swarm:
        yield swarm


def test_a_seed_says_what_it_needs(swarm: Swarm, group: Path) -> None:
    ended = swarm.command("seed", "seed", "--raw-mb", "3000", *LOOPBACK, prefix=(*ENTER, str(group)))
    check(ended, 2, r"This seed needs 3\.\d GB \(3\.0 replica .* of memory, and [01]\.\d GB are free: .*--raw-mb")
    assert not any(swarm.home("seed").glob("swarm-*/anchors/*"))


@pytest.mark.slow
def test_a_relay_says_what_it_needs(swarm: Swarm, group: Path, tmp_path: Path) -> None:
    swarm.seed(checkpoint(tmp_path / "base", weights(tensors=2, elements=1000)))
    ticket = swarm.ticket()
    limit = next(path for _, name in GROUPS if (path := group / name).exists())
    limit.write_text(str(150 << 20))
    ended = swarm.command("relay", "relay", ticket, *LOOPBACK, prefix=(*ENTER, str(group)))
    check(ended, 2, r"This relay needs 0\.2 GB .* of memory, and 0\.[01] GB are free")


@pytest.mark.slow
def test_a_node_says_what_helps_while_nothing_is_reserved(swarm: Swarm, group: Path, tmp_path: Path) -> None:
    swarm.start("seed", "seed", "--raw-mb", "2000", *LOOPBACK, "--preset", "loopback")
    swarm.until("seed", lambda state: state["role"] == "seed")
    assert swarm.state("seed")["memory"]["needs_bytes"] > 2e9
    words = ("join", swarm.ticket(), "--engine", "none", "--replica", "ram", *LOOPBACK)
    ended = swarm.command("node", *words, prefix=(*ENTER, str(group)))
    check(ended, 2, r"This node needs 2\.\d GB \(2\.0 replica .* and [01]\.\d GB are free: --replica disk needs")


@pytest.mark.long
@pytest.mark.skipif(find_spec("torch") is None, reason="the engine needs torch")
def test_a_box_without_room_beside_its_engine_runs_with_the_engines_memory(
    group: Path, swarm: Swarm, tmp_path: Path
) -> None:
    from scenarios.engines.engine_models import make_qwen3

    base = make_qwen3(tmp_path / "base", hidden=1024, wide=3072, layers=11, vocabulary=512)
    folders = [base, step(base, tmp_path / "step_1", 1)]
    folders.append(step(folders[1], tmp_path / "step_2", 2))
    model_bytes = Checkpoint.open(base).layout.nbytes
    needs = memory_plan.node(model_bytes, on_disk=True, from_engine=True, engine="transformers").nbytes
    limit = next(path for _, name in GROUPS if (path := group / name).exists())
    limit.write_text(str(needs + round(0.7 * model_bytes)))  # what the process has used before it reckons comes on top
    swarm.seed(base)
    ticket = swarm.ticket()
    words = ("join", ticket, "--model", str(base), "--device", "cpu", "--threads", "1", *LOOPBACK)
    ended = swarm.command("node", *words, "--replica", "ram", prefix=(*ENTER, str(group)))
    check(ended, 2, r"This node needs \d\.\d GB \(.* replica \+ .* engine .* GB are free: --replica disk needs")

    swarm.start("node", *words, "--replica", "engine", prefix=(*ENTER, str(group)))
    swarm.until("node", generates(0), STARTED_WITHIN_S)
    for number in (1, 2):
        swarm.publish(folders[number], "--wait")
        state = swarm.until("node", generates(number))
        assert prove(swarm) == root_of(folders[number])
    assert reads(state)["right"] >= 2 * Checkpoint.open(base).layout.n_blocks
    without_engine = memory_plan.node(model_bytes, on_disk=True, from_engine=True).nbytes
    assert state["nodes"][0]["memory"]["used_bytes"] < without_engine, "no copy of the model beside the engine"
    assert state["nodes"][0]["engine_restarts"] == 0
