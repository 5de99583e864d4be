"""A node's bits, its engine's weights and its tokens, compared with transformers' own save and load."""

from pathlib import Path

import pytest

from scenarios.conformance.families import EVERYDAY, SHORT, families
from scenarios.conformance.models import STORED, run_cell

FEW = [("qwen3", "bf16", True), ("qwen3_moe", "bf16", False), ("gpt_oss", "mixed", False), ("mamba", "f16", True)]

BY_KIND = [
    ("mixtral", "f16", False),  # experts stored one by one, fused in the model, with other names
    ("deepseek_v3", "mixed", True),  # the same beside dense layers, with parameters that stay float32
    ("granitemoe", "bf16", True),  # experts stored fused
    ("jamba", "f16", True),  # experts in some layers, states in others
    ("olmo_hybrid", "bf16", False),  # tensors that are split when they are loaded
    ("gpt2", "f32", True),  # matrices stored transposed, names without a prefix
    ("phi3", "f16", False),  # projections stored fused
    ("bamba", "f32", False),  # its cache gives different logits, so none is used
    ("youtu", "bf16", True),  # a tensor that from_pretrained changes while it loads
    ("gemma3_text", "mixed", True),  # plain, with norms in float32
]
"""One cell for each way in which a model holds a checkpoint's tensors; each dtype, tied and untied, is among them."""


@pytest.mark.parametrize(("family", "stored", "tied"), FEW)
def test_a_few_cells(family: str, stored: str, tied: bool, tmp_path: Path) -> None:
    cell = run_cell(family, stored, tied=tied, folder=tmp_path)
    assert (cell.outcome, cell.why) == ("exact", "")
    assert (cell.fused > 0) == (family == "qwen3_moe")


@pytest.mark.conformance
@pytest.mark.parametrize(("family", "stored", "tied"), BY_KIND)
def test_a_cell_of_each_kind(family: str, stored: str, tied: bool, tmp_path: Path) -> None:
    cell = run_cell(family, stored, tied=tied, folder=tmp_path)
    assert cell.outcome == "exact", cell.why


@pytest.mark.conformance
@pytest.mark.long
@pytest.mark.parametrize("family", SHORT)
def test_families_that_are_often_trained(family: str, tmp_path: Path) -> None:
    """Cells that are stored tied and untied (where a family has both), and each dtype once."""
    cells = [run_cell(family, each, tied=i % 2 == 1, folder=tmp_path) for i, each in enumerate(STORED)]
    assert {cell.outcome for cell in cells} <= {"exact", "same"}, [(cell.stored, cell.why) for cell in cells]
    assert any(cell.outcome == "exact" for cell in cells)


def test_the_lists_name_only_families_of_the_library() -> None:
    assert len(SHORT) >= 40
    assert set(SHORT) | set(EVERYDAY) <= set(families())
