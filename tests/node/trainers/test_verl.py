"""verl's published classes, unchanged, publish to a swarm of processes and get tokens from it."""

from pathlib import Path

import pytest
from published_kit import drawing, train

from node.status.query import ask

pytestmark = pytest.mark.slow
STEPS = 2


@pytest.mark.long
def test_verl_publishes_and_gets_tokens(tmp_path: Path) -> None:
    with drawing(tmp_path) as (swarm, base, url):
        report = train(swarm, "verl_run.py", swarm.home("seed"), base, url)
        status = ask(swarm.home("seed"))
        assert status.head == (0, STEPS)
        assert swarm.state("node")["nodes"][0]["root"] == status.root
    assert report["replicas"] == 1
    assert all(0.1 < row["swarm/density"] < 0.2 and row["swarm/bytes"] > 0 for row in report["metrics"])
    first, second = report["gathered"]
    assert first == second > 0, "a rank that does not publish takes part in every gathering too"
    assert report["plain"]["extra_fields"] == {
        "global_steps": STEPS, "min_global_steps": STEPS, "max_global_steps": STEPS,
    }  # fmt: skip
    for found, most in ((report["plain"], 16 + 8 - 4), (report["partial"], 5)):
        assert 0 < len(found["token_ids"]) == len(found["log_probs"]) <= most
        assert all(value < 0 for value in found["log_probs"])
        assert found["stop_reason"] in ("completed", "length")
    assert "top_k" in report["refused"]
    assert "image_data" in report["image"]
