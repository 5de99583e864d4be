"""Two ranks of FSDP2 train with GRPO over a seed and three nodes, one of which runs vLLM or SGLang. Every engine has
the trainer's bits at each step, also after the trainer is killed and resumed, and after a rollback."""

import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
from published_kit import engine_words
from ranks_kit import Running

from scenarios.harness.swarm import swarm_in

STEPS = 10
KILLED_AFTER = 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose attention heads have 64 elements, as vLLM requires."""
    from node.trainers.grpo.tiny import TinyRecipe, make_tiny

    recipe = TinyRecipe(letters=3, hidden=128, inner=64, layers=2, heads=2, kv_heads=1, steps=2, rows=8, spread=0.1)
    make_tiny(folder := tmp_path_factory.mktemp("policy"), recipe, lambda line: None)
    return folder


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.long]),
    ],
)
def test_ten_steps_with_a_kill_and_a_rollback(tmp_path: Path, policy: Path, engine: str) -> None:
    keep, base = tmp_path / "keep", policy
    keep.mkdir()
    server = engine_words(engine)
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        ticket = swarm.ticket("--nodes", "3")
        nodes = ["a", "b", "c"]
        for name in nodes:
            words = ("join", ticket, "--model", str(base), "--listen", "127.0.0.1:0", "--threads", "1")
            swarm.start(name, *words, *(server if name == "c" else ()), OMP_NUM_THREADS="1")
        for name in nodes:
            swarm.until(name, lambda state: state["nodes"][0].get("engine") == [0, 0], within_s=300.0)
        homes = [str(swarm.home(name)) for name in nodes]
        args = ("grpo_ranks:train", str(swarm.home("seed")), str(base), str(keep), homes, STEPS)

        first = Running(2, *args)
        try:
            deadline = time.monotonic() + 400.0
            while len(list(keep.glob(f"done{KILLED_AFTER:04}.*"))) < 2:
                assert time.monotonic() < deadline
                if any(process.poll() is not None for process in first.processes):
                    first.results()
                time.sleep(0.02)
        finally:
            first.kill()  # SIGKILL, in the middle of the next step

        second = Running(2, *args)
        try:
            lead, follow = second.results(within_s=600.0)
        finally:
            second.kill()

    assert [{**row, "engines": None} for row in lead[:-1]] == [{**row, "engines": None} for row in follow]
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
    state = last["state"]
    assert last["accepted_of"] == 3, "rollouts of every node were accepted"
    assert state["error"] is None
    assert [node["version"] for node in state["nodes"]] == [(epoch + 1, STEPS)] * 3
    assert [node["lag_versions"] for node in state["nodes"]] == [0, 0, 0]
