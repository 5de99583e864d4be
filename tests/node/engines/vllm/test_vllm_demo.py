"""The demo with vLLM in the nodes: a swarm that trains, while one node is killed and one joins without a checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.long]


def test_a_swarm_trains_on_rollouts_of_vllms(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done = subprocess.run(
        [sys.executable, "-m", "node.cli", "demo", "--engine", "vllm", "--nodes", "2", "--steps", "4",
         "--vllm-python", str(python), "--json"],
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["roots_equal"]
    assert report["engines_equal"]
    assert report["rollouts_accepted"] == 4 * 128
    assert [node["killed"] for node in report["nodes"]] == [False, True, False] or report["nodes"][0]["killed"]
    assert all(node["engine_root"] == report["trainer_root"] for node in report["nodes"] if not node["killed"])
    assert all(step["commit_pause_ms"] is not None for step in report["steps"])
