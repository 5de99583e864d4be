"""torchtitan's RL loop, from PyPI and unchanged, really trains on a swarm and loses no sample when a node is killed."""

import os
from pathlib import Path
from typing import Final

import pytest
from published_kit import HERE, drawing, train
from slime_kit import check_trained

from scenarios.engines.vllm_environment import LOCK
from scenarios.harness.environments import environment

STEPS: Final = 3


def vllm_packages() -> Path:
    """Those of vLLM for CPUs, which torchtitan imports before it does anything."""
    python = environment("vllm", LOCK)
    return next(python.parents[1].glob("lib/python*/site-packages"))


@pytest.mark.long
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_torchtitans_policy_trainer_trains_on_the_swarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor_parallel: int
) -> None:
    monkeypatch.setattr("published_kit.TRAINED_WITHIN_S", 600.0)  # five processes import torchtitan and vLLM first
    out = tmp_path / "out"
    path = os.pathsep.join(map(str, (HERE.parents[2], HERE, vllm_packages())))
    with drawing(tmp_path, "--max-lag", "0", names=("lost", "stays")) as (swarm, base, gateway):
        words = gateway, base, out, swarm.pid("lost"), swarm.home("stays"), tensor_parallel
        more = {"PYTHONPATH": path, "SWARM_HOME": str(swarm.home("seed"))}
        report = train(swarm, "titan_run.py", swarm.home("seed"), *words, name="torchtitan", **more)
        assert swarm.running["lost"].poll() is not None, "the node was not killed"
    report["drawn_at"] = [[f"0.{step + 1}" for step in steps] for steps in report["drawn_at"]]
    check_trained(report, STEPS)
