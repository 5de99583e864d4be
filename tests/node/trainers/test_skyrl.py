"""SkyRL's control plane publishes what it has written, and its client gets tokens from the gateway.

SkyRL's releases on the package index for Python 3.11 have no deltas. `SKYRL_SOURCE=CLONE pytest -m slow
tests/node/trainers/test_skyrl.py` runs its own publisher and client, at `COMMIT`, from a clone.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from published_kit import drawing

from node.status.query import ask
from scenarios.harness.environments import environment

HERE: Final = Path(__file__).parent
COMMIT: Final = "a9564572eb8e91076be43c1bd5e4615e3de17265"
SOURCE: Final = os.environ.get("SKYRL_SOURCE")


@contextmanager
def control_of(home: Path) -> Iterator[str]:
    words = ["-m", "node.trainers.skyrl", "--at", "127.0.0.1:0", "--home", str(home)]
    process = subprocess.Popen(
        [environment("skyrl", HERE / "skyrl.txt", inherit=True), *words], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[2])},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def train(tmp_path: Path, *words: str, source: Path | None) -> dict[str, Any]:
    environ = {name: value for name, value in os.environ.items() if name != "SKYRL_SOURCE"}
    environ |= {"PYTHONPATH": str(HERE.parents[2])} | ({} if source is None else {"SKYRL_SOURCE": str(source)})
    python = environment("skyrl", HERE / "skyrl.txt", inherit=True)
    done = subprocess.run(
        [python, HERE / "skyrl_run.py", *words], env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture
def source(tmp_path: Path) -> Path | None:
    """SkyRL's own code at `COMMIT`, if there is a clone."""
    if SOURCE is None:
        return None
    folder = tmp_path / "source"
    folder.mkdir()
    archive = subprocess.run(["git", "archive", COMMIT, "skyrl"], cwd=SOURCE, capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
    return folder


@pytest.mark.slow
def test_skyrl_publishes_and_gets_tokens_while_a_node_is_lost(tmp_path: Path, source: Path | None) -> None:
    with drawing(tmp_path, names=("lost", "stays")) as (swarm, base, gateway), control_of(swarm.home("seed")) as url:
        out = tmp_path / "out"
        out.mkdir()
        report = train(tmp_path, url, gateway, str(base), str(out), str(swarm.pid("lost")), source=source)
        status = ask(swarm.home("seed"))
        assert status.head == (0, 4), "the base, and SkyRL's three"
        assert status.root == report["wanted"][-1]
        swarm.until("stays", lambda state: state["nodes"][0]["root"] == status.root)
        assert swarm.own_status("stays", prove=True).live_root == status.root
        assert report["drawn"] == 3 * 16
        skipped = {"target_version": 9, "sync_dir": str(out)}
        answer = httpx.post(f"{url}/fetch_weights", json=skipped)
        assert (answer.status_code, "no version of SkyRL" in answer.text) == (400, True)
        assert httpx.post(f"{url}/init_weight_transfer_engine", json={"init_info": {}}).status_code == 400
    assert len(set(report["wanted"])) == 3
