"""verl's published classes, unchanged, publish to a swarm of processes and draw tokens from it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.status.query import ask
from scenarios.environments import environment

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
STEPS = 2


@pytest.fixture
def kit():
    sys.path.insert(0, str(HERE.parent / "processes"))
    import kit

    return kit


def test_verl_publishes_and_draws(kit, tmp_path: Path) -> None:
    from node.trainers.grpo.tiny import tiny_folder

    base = tiny_folder(lambda line: None)
    python = environment("trainers", HERE / "trainers.txt", inherit=True)
    port = kit.free_port()
    with kit.swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        ticket = swarm.ticket()
        swarm.start("node", "join", ticket, "--engine", "transformers", "--threads", "1", *kit.LOOPBACK)
        swarm.start("gateway", "gateway", "--home", str(swarm.home("seed")), "--at", f"127.0.0.1:{port}")
        swarm.until("seed", lambda state: len(state["nodes"]) == 1 and state["nodes"][0]["engine"] is not None)
        environ = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # six processes import the same large packages
        words = [str(swarm.home("seed")), str(base), f"http://127.0.0.1:{port}"]
        done = subprocess.run(
            [python, HERE / "verl_run.py", *words], env=environ, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-3000:] + swarm.log("gateway")
        report = json.loads(done.stdout.strip().splitlines()[-1])
        state = ask(swarm.home("seed"))
        assert state["head"] == [0, STEPS]
        assert swarm.state("node")["nodes"][0]["root"] == state["root"]
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
