"""A real vLLM holds and computes the same as a fresh vLLM of the same checkpoint, or refuses before it serves."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scenarios.conformance.on_vllm import FAMILIES, ORDER, Host, run_cell

FEW = [
    ("gemma2", "bf16", True, "exact", ""),  # written in place; its loader knows no head in addition to the embedding
    ("qwen3", "f32", False, "exact", ""),  # has another dtype in vLLM: loaded by module
    ("gpt2", "f16", True, "exact", ""),  # transposed when it is loaded
    ("gpt_oss", "f16", False, "exact", ""),  # its attention copies the sinks at the first step
    ("mixtral", "bf16", False, "exact", ""),  # repacked by vLLM's kernel for CPUs
    ("falcon_h1", "bf16", False, "refused", "cannot be written in place"),  # computed by its loader
    ("phi", "bf16", False, "refused", "no place for the checkpoint's lm_head.bias"),
]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    from scenarios.engines.vllm_environment import vllm_python

    made = Host(vllm_python(), tmp_path_factory.mktemp("host") / "vllm.log")
    yield made
    made.stop()


@pytest.mark.vllm
@pytest.mark.parametrize(("family", "stored", "tied", "outcome", "why"), FEW)
def test_a_cell_of_each_kind(
    host: Host, family: str, stored: str, tied: bool, outcome: str, why: str, tmp_path: Path
) -> None:
    cell = run_cell(host, family, stored, tied=tied, folder=tmp_path)
    assert cell.outcome == outcome, cell.why
    assert why in cell.why
    assert cell.fused == (cell.tensors if stored == "f32" else 8 if family == "gpt_oss" else 0)


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(host: Host, family: str, tmp_path: Path) -> None:
    cells = [run_cell(host, family, stored, tied=tied, folder=tmp_path) for stored, tied in ORDER]
    assert [cell for cell in cells if cell.outcome == "WRONG"] == []
