"""verl's published classes, unchanged, publish to a swarm of processes and get tokens from it; a node is killed."""

from pathlib import Path

import pytest
from published_kit import drawing, train

from node.status.query import ask

pytestmark = pytest.mark.slow
STEPS = 2


@pytest.mark.long
def test_verl_publishes_and_gets_tokens(tmp_path: Path) -> None:
    with drawing(tmp_path, names=("lost", "stays")) as (swarm, base, url):
        words = swarm.home("seed"), base, url, swarm.pid("lost"), swarm.home("stays")
        report = train(swarm, "verl_run.py", *words)
        assert swarm.running["lost"].poll() is not None, "the node was not killed"
        status = ask(swarm.home("seed"))
        assert status.head == (0, STEPS)
        assert swarm.state("stays")["nodes"][0]["root"] == status.root == report["want"][-1]
    first, second = report["want"]
    assert first != second
    assert report["live"] == [[first, first], [second]], "the engines do not run on verl's bits"
    assert report["drawn"] == 16, "samples were lost with the node"
    assert report["replicas"] == 1
    assert all(0.1 < row["swarm/density"] < 0.2 and row["swarm/bytes"] > 0 for row in report["metrics"])
    own, other = report["gathered"]
    assert own == other > 0, "a rank that does not publish takes part in every gathering too"
    assert report["plain"]["extra_fields"] == {
        "global_steps": STEPS, "min_global_steps": STEPS, "max_global_steps": STEPS,
    }  # fmt: skip
    for found, most in ((report["plain"], 16 + 8 - 4), (report["partial"], 5)):
        assert 0 < len(found["token_ids"]) == len(found["log_probs"]) <= most
        assert all(value < 0 for value in found["log_probs"])
        assert found["stop_reason"] in ("completed", "length")
    assert "guided_grammar" in report["refused"]
    assert "image_data" in report["image"]
