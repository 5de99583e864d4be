"""TRL's own trainer and rollout worker, unchanged, really train on a swarm of processes."""

from pathlib import Path

import pytest
from published_kit import drawing, train

from node.status.query import ask

pytestmark = pytest.mark.slow
STEPS = 3


def test_trl_trains_on_the_swarm(tmp_path: Path) -> None:
    with drawing(tmp_path, "--model-name", "{base}") as (swarm, base, url):  # TRL's name for the model
        report = train(swarm, "trl_run.py", swarm.home("seed"), base, url, STEPS, tmp_path / "out")
        assert report["steps"] == STEPS
        # one at the start of training, which changes nothing, and one per step
        assert [row["version"] for row in report["publications"]] == list(range(1, STEPS + 2))
        assert report["publications"][0]["changed"] == 0
        assert all(row["changed"] > 0 for row in report["publications"][1:])
        status = ask(swarm.home("seed"))
        assert status.head == (0, STEPS + 1)
        assert swarm.state("node")["nodes"][0]["root"] == status.root
