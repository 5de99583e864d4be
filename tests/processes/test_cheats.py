"""Nodes that cheat and checkers that lie, among honest ones and under real GRPO steps: real processes and engines."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scenarios.verification.cheating import LIES
from scenarios.verification.cheats import HARMLESS, act_out

torch = pytest.mark.skipif(find_spec("torch") is None, reason="engines and trainer need torch")
AUTHORS = ("stale", "best_of_two", "no_end")
CHECKERS = ("judges_all_false", "judges_nan", "judges_longer", "judges_another_version")
MOST_TOKENS = 2048
"""Checked of each cheat. Texts have some ten tokens here, and a sample is judged by one to three nodes."""


def found(result: dict[str, Any], attacks: Sequence[str]) -> dict[str, str]:
    """Why each node is in quarantine, by its attack. Nobody else is, and no sample was judged too late."""
    assert result["honest_in_quarantine"] == {}
    assert result["judged"] > 0
    rows = result["rows"]
    assert sorted(row["attack"] for row in rows) == sorted(attacks)
    assert not [row for row in rows if "failed" in row], rows
    return {row["attack"]: row["why"] for row in rows}


@pytest.mark.long
@torch
def test_cheating_authors_and_lying_checkers_are_found_and_harm_nobody(tmp_path: Path) -> None:
    attacks = (*AUTHORS, *CHECKERS)
    why = found(act_out(tmp_path, attacks, honest=4, most_tokens=MOST_TOKENS), attacks)
    for attack, sentence in why.items():
        assert (sentence == "harmless") is (attack in HARMLESS)
        assert ("opinions" in sentence) is (attack in LIES and attack not in HARMLESS)


@pytest.mark.long
@torch
def test_cheats_that_run_vllm_are_found(tmp_path: Path) -> None:
    attacks = ("stale", "temperature")
    why = found(act_out(tmp_path, attacks, engine="vllm", honest=3, cheats=1, most_tokens=MOST_TOKENS), attacks)
    assert "harmless" not in why.values()
