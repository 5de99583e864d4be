"""What a node holds, what its engine computes with and what it draws, against transformers' own save and load."""

from pathlib import Path

import pytest

from scenarios.conformance.families import EVERYDAY, SHORT, families
from scenarios.conformance.models import STORED, run_cell

FEW = [("qwen3", "bf16", True), ("qwen3_moe", "bf16", False), ("gpt_oss", "mixed", False), ("mamba", "f16", True)]


@pytest.mark.parametrize(("family", "stored", "tied"), FEW)
def test_a_few_cells(family: str, stored: str, tied: bool, tmp_path: Path) -> None:
    cell = run_cell(family, stored, tied=tied, folder=tmp_path)
    assert (cell.outcome, cell.why) == ("exact", "")
    assert (cell.fused > 0) == (family == "qwen3_moe")


@pytest.mark.conformance
@pytest.mark.parametrize("family", SHORT)
def test_the_families_that_people_train(family: str, tmp_path: Path) -> None:
    """One cell that is stored tied, one that is not (where a family has both), and each dtype once."""
    cells = [run_cell(family, each, tied=i % 2 == 1, folder=tmp_path) for i, each in enumerate(STORED)]
    assert {cell.outcome for cell in cells} <= {"exact", "same"}, [(cell.stored, cell.why) for cell in cells]
    assert any(cell.outcome == "exact" for cell in cells)


def test_the_lists_name_what_the_library_has() -> None:
    assert len(SHORT) >= 40
    assert set(SHORT) | set(EVERYDAY) <= set(families())
