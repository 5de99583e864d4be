"""Trainers that hold a model in parts publish it whole: released packages train on two ranks over gloo."""

from pathlib import Path
from typing import Any

import pytest
from published_kit import check_lossless, drawing, train_ranks

pytestmark = pytest.mark.long
STEPS = 3
SAMPLES = 8 * 4
"""A step: prompts by samples of each, as `recipe_kit` draws them."""


def run(tmp_path: Path, name: str, script: str) -> dict[str, Any]:
    with drawing(tmp_path, names=("lost", "stays")) as (swarm, base, _):
        report = train_ranks(swarm, name, script, base, tmp_path / "out", STEPS)
    check_lossless(report, STEPS, SAMPLES)
    assert [row["root"] for row in report["versions"]] == [row["want"] for row in report["versions"]]
    assert all(row["changed"] > 0 for row in report["versions"])
    return report


def test_deepspeed_zero3_trains_on_the_swarm(tmp_path: Path) -> None:
    report = run(tmp_path, "deepspeed", "zero3_run.py")
    assert [row["version"] for row in report["versions"]] == list(range(1, STEPS + 1))


def test_megatron_core_trains_on_the_swarm(tmp_path: Path) -> None:
    report = run(tmp_path, "megatron", "megatron_run.py")
    assert report["first"] < 1e-4, "the base's logits, by transformers and by Megatron"
    assert all(row["logits"] < 1e-4 for row in report["versions"]), "the published weights mean the same to both"
