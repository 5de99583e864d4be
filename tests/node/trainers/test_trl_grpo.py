"""TRL's GRPOTrainer, and Unsloth and axolotl, which start it, all unchanged, really train on a swarm of processes, and
lose no sample when a node is killed."""

from pathlib import Path
from typing import Any

import pytest
from published_kit import adapters, check_lossless, drawing, train

STEPS, BATCH = 3, 32
NODES = ("lost", "stays")


def run(
    tmp_path: Path,
    *adapter: str,
    seed: tuple[str, ...] = (),
    script: str = "trl_grpo_run.py",
    name: str = "trainers",
) -> dict[str, Any]:
    with drawing(tmp_path, seed=seed, names=NODES) as (swarm, base, _):
        where = swarm.home("seed"), base, STEPS, tmp_path / "out"
        report = train(swarm, script, *where, swarm.pid("lost"), swarm.home("stays"), *adapter, name=name)
        assert swarm.running["lost"].poll() is not None, "the node was not killed"
    assert report["steps"] == STEPS
    check_lossless(report, STEPS, BATCH)
    assert [row["version"] for row in report["versions"]] == list(range(2, STEPS + 2)), "the first has the base's bits"
    return report


def check_roots(report: dict[str, Any]) -> None:
    roots = [row["want"] for row in report["versions"]]
    assert [row["root"] for row in report["versions"]] == roots, "the weights are not the trainer's, rounded"
    assert len(set(roots)) == STEPS


@pytest.mark.slow
def test_grpo_trainer_trains_on_the_swarm(tmp_path: Path) -> None:
    check_roots(run(tmp_path))


@adapters
@pytest.mark.long
def test_grpo_trainer_trains_an_adapter_on_the_swarm(tmp_path: Path) -> None:
    report = run(tmp_path, "math", seed=("--adapters", "2", "--adapter-rank", "8"))
    assert [row["own"] for row in report["versions"]] == list(range(2, STEPS + 2))
    assert all(row["changed"] > 100 for row in report["versions"]), "more than the version's number"


@pytest.mark.long
def test_unsloths_grpo_trainer_trains_on_the_swarm(tmp_path: Path) -> None:
    check_roots(run(tmp_path, script="unsloth_run.py", name="unsloth"))


@pytest.mark.long
def test_axolotl_trains_on_the_swarm_by_its_own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_IGNORE_REQUIRES_PYTHON", "1")
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    check_roots(run(tmp_path, script="axolotl_run.py", name="axolotl"))
