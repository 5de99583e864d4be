"""What a step costs in formats, of two checkpoints: the figures and the command."""

import json
from pathlib import Path

import numpy as np
import pytest

from codec import Layout, TensorSpec, write_checkpoint
from codec.bits import Bits
from codec.errors import UsageError
from codec.formats.spec import FORMATS
from node.cli.app import run
from node.tools.format_sizes import render, sizes_of_step

LAYOUT = Layout(
    (
        TensorSpec("a.embed_tokens.weight", "BF16", (64, 256)),
        TensorSpec("b.experts.up_proj", "BF16", (2, 100, 256)),
        TensorSpec("c.up_proj.weight", "BF16", (300, 256)),
        TensorSpec("d.norm.weight", "BF16", (256,)),
    )
)


def checkpoint(folder: Path, flipped: float) -> Path:
    def bits(name: str) -> Bits:
        spec, rng = LAYOUT.tensor(name), np.random.default_rng(len(name))
        values = (0.02 * rng.standard_normal(spec.elements)).astype(np.float32)
        found = (values.view(np.uint32) >> 16).astype(np.uint16)
        return found ^ (rng.random(spec.elements) < flipped).astype(np.uint16)

    write_checkpoint(folder, LAYOUT, bits, {})
    return folder


@pytest.mark.slow
def test_a_holder_of_int4_receives_less_and_holds_less(tmp_path: Path) -> None:
    old, new = checkpoint(tmp_path / "0", 0), checkpoint(tmp_path / "1", 0.02)
    int4, fp8 = sizes_of_step(old, new, [FORMATS["int4-group-e8"], FORMATS["fp8-channel"]])
    assert int4.bf16_bytes == fp8.bf16_bytes
    assert 0 < int4.kept_bytes < fp8.kept_bytes  # fp8 formats leave the embedding in bf16 too
    assert int4.format_bytes < fp8.format_bytes < fp8.bf16_bytes
    assert int4.of_bf16 == (int4.format_bytes + int4.kept_bytes) / int4.bf16_bytes < 0.5
    assert int4.held < fp8.held < 0.6
    assert 0 < int4.changed_codes < fp8.changed_codes
    assert "int4-group-e8" in render([int4, fp8])


def test_an_equal_checkpoint_costs_nothing(tmp_path: Path) -> None:
    old = checkpoint(tmp_path / "0", 0)
    (sizes,) = sizes_of_step(old, old, [FORMATS["int8-channel-e8"]])
    assert (sizes.format_bytes, sizes.kept_bytes, sizes.bf16_bytes, sizes.changed_codes) == (0, 0, 0, 0)


def test_the_command_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = checkpoint(tmp_path / "0", 0), checkpoint(tmp_path / "1", 0.02)
    assert run(["delta", str(old), str(new), "--format", "int4-group-e8", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["formats"]
    assert (row["form"], row["codes"] > 0) == ("int4-group-e8", True)
    assert run(["delta", str(old), str(new), "--format", "int4"]) == 2
    assert "no format 'int4'" in capsys.readouterr().err
    assert run(["delta", "--shapes", "qwen3-8b", "--format", "int4-group-e8"]) == 2
    assert "leave out --shapes" in capsys.readouterr().err


def test_another_model_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", Layout((LAYOUT.tensors[2],)), lambda name: np.zeros(76800, np.uint16), {})
    with pytest.raises(UsageError, match="not two versions of one model"):
        sizes_of_step(checkpoint(tmp_path / "0", 0), tmp_path / "other", [FORMATS["fp8-block"]])
