"""Whole runs: each in a process of its own, because a run needs fixed hashes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KEPT = sorted((Path(__file__).parent / "schedules").glob("*.json"))
LONG = {"the_last_copy_was_on_its_way", "the_replay_waited_for_dropped_chunks", "worked_before_the_welcome"}


def hunt(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "scenarios.hunt", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_short_hunt_finds_nothing_and_a_seed_gives_the_same_run() -> None:
    first, again = (hunt("--seed", "5", "--runs", "1", "--nodes", "2", "--virtual", "20") for _ in range(2))
    assert first["violations"] == []
    assert first["steps"] > 1000
    assert sum(first["faults"].values()) > 3
    assert first["starts_looked_at"] >= 1
    assert {key: first[key] for key in ("steps", "faults", "coverage")} == {
        key: again[key] for key in ("steps", "faults", "coverage")
    }


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=pytest.mark.long if p.stem in LONG else ()) for p in KEPT]
)
@pytest.mark.slow
def test_what_a_hunt_once_found_stays_repaired(path: Path) -> None:
    assert hunt("--schedule", str(path))["violations"] == []
