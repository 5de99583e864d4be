"""SkyRL's control plane publishes what it has written, and its client gets tokens from the gateway.

SkyRL 0.4.0 is for Python 3.12 and newer, but the few files of it that are imported here run on 3.11 too.
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


@pytest.fixture(autouse=True)
def _for_any_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_IGNORE_REQUIRES_PYTHON", "1")


@pytest.mark.long
def test_skyrl_trains_on_the_swarm_and_a_lost_node_costs_no_sample(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with (
        drawing(tmp_path, *GATEWAY, names=("lost", "stays")) as (swarm, base, gateway),
        control_of(swarm.home("seed")) as url,
    ):
        words = swarm.home("seed"), url, gateway, base, out, swarm.pid("lost"), swarm.home("stays")
        report = train(swarm, "skyrl_run.py", *words, name="skyrl")
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
