"""Two ranks of FSDP2 train by GRPO over a seed and three nodes: every engine has the trainer's bits at each step, also
when the trainer is killed and resumed, and when it goes back."""

import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "processes"))

pytest.importorskip("torch")
from kit import swarm_in
from ranks_kit import Running

pytestmark = pytest.mark.slow
STEPS = 10
KILLED_AFTER = 3


def test_ten_steps_a_kill_and_a_way_back(tmp_path: Path, base: Path):
    keep = tmp_path / "keep"
    keep.mkdir()
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        ticket = swarm.ticket("--nodes", "3")
        nodes = ["a", "b", "c"]
        for name in nodes:
            words = ("join", ticket, "--model", str(base), "--listen", "127.0.0.1:0", "--threads", "1")
            swarm.start(name, *words, OMP_NUM_THREADS="1")
        for name in nodes:
            swarm.until(name, lambda state: state["nodes"][0].get("engine") == [0, 0], within_s=120.0)
        homes = [str(swarm.home(name)) for name in nodes]
        args = ("grpo_ranks:train", str(swarm.home("seed")), str(base), str(keep), homes, STEPS)

        first = Running(2, *args)
        try:
            deadline = time.monotonic() + 150.0
            while len(list(keep.glob(f"done{KILLED_AFTER:04}.*"))) < 2:
                assert time.monotonic() < deadline
                if any(process.poll() is not None for process in first.processes):
                    first.results()
                time.sleep(0.02)
        finally:
            first.kill()  # SIGKILL, in the middle of the next step

        second = Running(2, *args)
        try:
            lead, follow = second.results(within_s=240.0)
        finally:
            second.kill()

    assert [{**row, "engines": None, "by": None} for row in lead[:-1]] == [
        {**row, "engines": None, "by": None} for row in follow
    ]
    resumed, *rows, last = lead
    assert resumed["step"] >= KILLED_AFTER
    assert resumed["engines"] == [resumed["root"].hex()] * 3
    (back,) = [row for row in rows if "back" in row]
    published = [row for row in rows if "back" not in row]
    epoch = resumed["resumed"][0]
    assert back["back"] == (epoch + 1, 4)
    assert [row["version"] for row in published] == [
        *((epoch, v) for v in range(resumed["resumed"][1] + 1, 7)),
        *((epoch + 1, v) for v in range(5, STEPS + 1)),
    ]
    for row in (*published, back):
        assert row["engines"] == [row["root"].hex()] * 3, "every engine's live bits are the trainer's"
    for row in published:
        assert row["root"] == row["gathered"]
        assert row["rollouts"] == 16
        epoch_now, version = row["version"]
        assert all(drawn in ((epoch_now, version - 1), (epoch_now, version - 2)) for drawn in row["drawn_from"])
    assert len({row["root"] for row in published}) == len(published) >= STEPS - KILLED_AFTER
    assert max(row["by"] for row in published) >= 2, "several nodes' rollouts are taken"
    state = last["state"]
    assert state["error"] is None
    assert [node["version"] for node in state["nodes"]] == [(epoch + 1, STEPS)] * 3
    assert [node["lag_versions"] for node in state["nodes"]] == [0, 0, 0]
