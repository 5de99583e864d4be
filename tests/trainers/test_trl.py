"""TRL's own trainer and rollout worker, unchanged, really train on a swarm of processes."""

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
STEPS = 3


@pytest.fixture
def kit():
    sys.path.insert(0, str(HERE.parent / "processes"))
    import kit

    return kit


def test_trl_trains_on_the_swarm(kit, tmp_path: Path) -> None:
    from node.trainers.grpo.tiny import tiny_folder

    base = tiny_folder(lambda line: None)
    python = environment("trainers", HERE / "trainers.txt", inherit=True)
    port = kit.free_port()
    url = f"http://127.0.0.1:{port}"
    with kit.swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        ticket = swarm.ticket()
        swarm.start("node", "join", ticket, "--engine", "transformers", "--threads", "1", *kit.LOOPBACK)
        where = ("--home", str(swarm.home("seed")), "--at", f"127.0.0.1:{port}")
        swarm.start("gateway", "gateway", *where, "--model-name", str(base))  # what TRL calls the model
        swarm.until("seed", lambda state: len(state["nodes"]) == 1 and state["nodes"][0]["engine"] is not None)
        environ = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
        words = [swarm.home("seed"), base, url, str(STEPS), tmp_path / "out"]
        done = subprocess.run(
            [python, HERE / "trl_run.py", *map(str, words)], env=environ, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-3000:] + swarm.log("gateway")
        report = json.loads(done.stdout.strip().splitlines()[-1])
        assert report["steps"] == STEPS
        # one when training begins, which changes nothing, and one a step, which does
        assert [row["version"] for row in report["publications"]] == list(range(1, STEPS + 2))
        assert report["publications"][0]["changed"] == 0
        assert all(row["changed"] > 0 for row in report["publications"][1:])
        state = ask(swarm.home("seed"))
        assert state["head"] == [0, STEPS + 1]
        assert swarm.state("node")["nodes"][0]["root"] == state["root"]
