"""The whole demo: training, a SIGKILL, a joiner, and a comparison of all bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run_demo(home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node.cli", "demo", "--json", *flags]
    environment = os.environ | {"TMPDIR": str(home)}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)


def processes_that_mention(folder: Path) -> list[str]:
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    return [line for line in lines if f"{folder}/swarm-demo-" in line]


@pytest.mark.long
def test_a_kill_and_a_join(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--nodes", "3", "--steps", "4")
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)

    assert report["roots_equal"] is True
    assert report["engines_equal"] is True
    assert [node["killed"] for node in report["nodes"]].count(True) == 1
    assert len(report["nodes"]) == 4, "one joined during step 4"
    survivors = [node for node in report["nodes"] if not node["killed"]]
    assert {node["root"] for node in survivors} == {report["trainer_root"]}
    assert {node["engine_root"] for node in survivors} == {report["trainer_root"]}

    assert [step["version"] for step in report["steps"]] == [1, 2, 3, 4]
    wanted = sum(step["rollouts"] for step in report["steps"])
    assert report["rollouts_accepted"] >= wanted > 0
    for step in report["steps"]:
        assert 0 < step["density"] < 0.1
        assert step["delta_bytes"] < step["full_bytes"] / 20
        assert step["trainer_copies"] <= 1.1
        assert step["publish_to_all_s"] is not None
        assert step["commit_pause_ms"] is not None
    assert list(tmp_path.glob("swarm-demo-*")) == [], "no folder is left behind"
    assert processes_that_mention(tmp_path) == [], "no process is left behind"


def test_a_demo_with_one_node_is_refused(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--nodes", "1")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
