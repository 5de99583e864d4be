"""SkyRL's control plane publishes what it has written, and its client gets tokens from the gateway.

SkyRL's releases on the package index for Python 3.11 have no deltas. `SKYRL_SOURCE=CLONE pytest -m long
tests/node/trainers/test_skyrl.py` runs its own publisher and client, at `COMMIT`, from a clone.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest
from published_kit import check_live, drawing, train

from node.status.query import ask
from scenarios.harness.environments import environment

HERE: Final = Path(__file__).parent
COMMIT: Final = "a9564572eb8e91076be43c1bd5e4615e3de17265"
SOURCE: Final = os.environ.get("SKYRL_SOURCE")
STEPS: Final = 3
GATEWAY: Final = ("--model-name", "{base}", "--max-lag", "0")


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


@pytest.mark.long
def test_skyrl_trains_on_the_swarm_and_a_lost_node_costs_no_sample(tmp_path: Path, source: Path | None) -> None:
    out = tmp_path / "out"
    out.mkdir()
    own = {} if source is None else {"SKYRL_SOURCE": str(source)}
    with (
        drawing(tmp_path, *GATEWAY, names=("lost", "stays")) as (swarm, base, gateway),
        control_of(swarm.home("seed")) as url,
    ):
        words = swarm.home("seed"), url, gateway, base, out, swarm.pid("lost"), swarm.home("stays")
        report = train(swarm, "skyrl_run.py", *words, name="skyrl", **own)
        assert swarm.running["lost"].poll() is not None, "the node was not killed"
        assert ask(swarm.home("seed")).head == (0, STEPS + 1), "the base, and a version for each step"
        skipped = {"target_version": 9, "sync_dir": str(out)}
        answer = httpx.post(f"{url}/fetch_weights", json=skipped)
        assert (answer.status_code, "no version of SkyRL" in answer.text) == (400, True)
        assert httpx.post(f"{url}/init_weight_transfer_engine", json={"init_info": {}}).status_code == 400
    assert report["drawn"] == [8 * 4] * STEPS
    assert [row["root"] for row in report["versions"]] == [row["want"] for row in report["versions"]]
    assert len({row["want"] for row in report["versions"]}) == STEPS
    check_live(report, STEPS)
