"""The codec benchmark: its data, baselines and bounds are correct, and the report has the documented keys."""

import json

import numpy as np
import pytest

from codec.bits import DTYPES
from codec.errors import UsageError
from node.tools.delta_baselines import BASELINES
from scenarios.bench.codec import main, report
from scenarios.bench.codec_bounds import Bounds
from scenarios.bench.codec_data import Part, checkpoints, fabricate, shapes
from scenarios.bench.codec_measure import measure, scaling

BF16 = DTYPES["BF16"]


@pytest.fixture(scope="module")
def parts() -> list[Part]:
    return list(fabricate("16m", 0.01, share=1 / 16))


def test_made_up_steps_have_the_requested_density(parts: list[Part]) -> None:
    changed = sum(int(np.count_nonzero(part.old != part.new)) for part in parts)
    assert changed / sum(part.old.size for part in parts) == pytest.approx(0.01, rel=0.15)


def test_true_shapes_stream_in_parts_of_whole_blocks() -> None:
    assert shapes("qwen3-8b").elements == 8_190_735_360
    first = next(iter(fabricate("qwen3-8b", 0.01)))
    assert first.name == "model.embed_tokens.weight"
    assert first.old.size == first.new.size == 8 << 20
    with pytest.raises(UsageError, match="no shapes"):
        next(iter(fabricate("qwen9", 0.01)))


@pytest.mark.parametrize("name", list(BASELINES))
def test_baselines_are_exact(name: str) -> None:
    """The changes have gaps of every size class: 0, 127, 128, 65534, 65535, 65536 and more."""
    there, back = BASELINES[name]
    old = np.zeros(400_000, np.uint16)
    new = old.copy()
    new[np.cumsum([0, 1, 128, 129, 65535, 65536, 65537, 140_000])] = 7
    words = old.copy()
    back(there(old, new, BF16), words)
    assert np.array_equal(words, new)


def test_bounds_of_known_data() -> None:
    """Every tenth element of one exponent moves up or down by one, which takes h(0.1) / 0.1 + 1 bits per change."""
    old = np.full(100_000, 0x3F80, np.uint16)
    new = old.copy()
    new[::10] = np.where(np.arange(10_000) % 2, 0x3F81, 0x3F7F)
    bounds = Bounds()
    bounds.add(old, new, BF16)
    entropy = -(0.1 * np.log2(0.1) + 0.9 * np.log2(0.9)) / 0.1 + 1
    assert bounds.naive() == pytest.approx(entropy, abs=0.01)
    assert bounds.conditional() == pytest.approx(entropy, abs=0.01)


def test_the_report(parts: list[Part]) -> None:
    row = report(measure(parts, 1 << 30, repeats=1), scaling(parts, repeats=1))
    assert row["exact"]
    assert row["bound_conditional"] < row["bits_per_change"] < row["bound_naive"]
    assert row["bits_per_change"] == pytest.approx(7.1, abs=0.5)
    for values in (row, *row["anchors"].values()):
        assert values["exact"]
        assert {"bits_per_change", "ratio", "encode_gb_s", "decode_gb_s"} <= set(values)
    assert row["anchors"]["leb128"]["bits_per_change"] > 20
    assert {"pco", "leb128"} <= set(row["anchors"])
    assert set(row["two_threads"]) == {"encode", "decode", "blake3"}
    assert json.dumps(row)


def test_invalid_arguments_give_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--old", "x"]) == 2
    assert "both --old and --new" in capsys.readouterr().err
    assert main(["--old", "/nothing", "--new", "/nothing"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_checkpoints_of_a_user(tmp_path, parts: list[Part]) -> None:
    from codec.checkpoint import write_checkpoint
    from codec.layout import Layout, TensorSpec

    part = parts[0]
    layout = Layout((TensorSpec("w", "BF16", (part.old.size,)),))
    write_checkpoint(tmp_path / "old", layout, lambda name: part.old, {})
    write_checkpoint(tmp_path / "new", layout, lambda name: part.new, {})
    (found,) = checkpoints(tmp_path / "old", tmp_path / "new")
    assert np.array_equal(found.old, part.old)
    assert np.array_equal(found.new, part.new)
