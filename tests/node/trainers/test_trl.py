"""TRL's own trainer and rollout worker, unchanged, really train on a swarm of processes, of which one is killed."""

from pathlib import Path
from typing import Any

import pytest
from published_kit import adapters, drawing, train

from node.status.query import ask

pytestmark = [pytest.mark.slow, pytest.mark.long]
STEPS = 3
NODES = ("lost", "stays")
GATEWAY = ("--model-name", "{base}", "--inexact-seeds")
"""TRL calls the model by its folder. It sends a seed with each request, which vLLM and SGLang cannot repeat exactly."""


def run(swarm: Any, base: Path, url: str, out: Path, *adapter: str) -> dict[str, Any]:
    """Train, and check that the killed node cost no step, and that the other one's engine runs on the last version."""
    words = swarm.home("seed"), base, url, STEPS, out, swarm.pid("lost"), swarm.home("stays"), *adapter
    report = train(swarm, "trl_run.py", *words)
    assert swarm.running["lost"].poll() is not None, "the node was not killed"
    assert report["steps"] == STEPS
    assert report["live"] == [report["root"]]
    return report


def test_trl_trains_on_the_swarm(tmp_path: Path) -> None:
    with drawing(tmp_path, *GATEWAY, names=NODES) as (swarm, base, url):
        report = run(swarm, base, url, tmp_path / "out")
        assert report["root"] == report["want"], "the bits are not the trainer's, rounded"
        # one at the start of training, which changes nothing, and one per step
        assert [row["version"] for row in report["publications"]] == list(range(1, STEPS + 2))
        assert report["publications"][0]["changed"] == 0
        assert all(row["changed"] > 0 for row in report["publications"][1:])
        status = ask(swarm.home("seed"))
        assert status.head == (0, STEPS + 1)
        assert swarm.state("stays")["nodes"][0]["root"] == status.root
        assert status.root == report["root"]


@adapters
def test_trl_trains_an_adapter_on_the_swarm(tmp_path: Path) -> None:
    room = ("--adapters", "2", "--adapter-rank", "8")
    with drawing(tmp_path, *GATEWAY, seed=room, names=NODES) as (swarm, base, url):
        before = swarm.seed_status().parts
        report = run(swarm, base, url, tmp_path / "out", "math")
        rows = report["publications"]
        assert [(row["version"], row["own"]) for row in rows] == [(n, n) for n in range(1, STEPS + 2)]
        assert all(row["changed"] > 100 for row in rows[1:]), "more than the version's number"
        after = swarm.seed_status().parts
        assert after.base_root == before.base_root, "the base did not change"
        (adapter,) = after.adapters
        assert (adapter.name, adapter.version, adapter.rank) == ("math", STEPS + 1, 4)
        assert swarm.state("stays")["nodes"][0]["root"] == ask(swarm.home("seed")).root
        work = swarm.seed_status().work
        assert work.accepted >= 4 * STEPS, "its samples were drawn through the gateway"
