"""`delta` and `apply` on two checkpoint folders: exact results, true sizes, and an error text for every mistake."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from codec.bits import Bits
from codec.checkpoint import Checkpoint, write_checkpoint
from codec.chunk import CODER_PCO, CODER_RICE
from codec.errors import UsageError
from codec.layout import Layout, TensorSpec
from node.tools.delta import DeltaReport, apply, delta, render

LAYOUT = Layout(
    (
        TensorSpec("b.weight", "BF16", (700, 1600)),
        TensorSpec("c.empty", "BF16", (0, 5)),
        TensorSpec("d.scalar", "F32", ()),
        TensorSpec("model.embed_tokens.weight", "BF16", (300, 64), ("lm_head.weight",)),
    )
)
CONFIG = json.dumps({"tie_word_embeddings": True}).encode()


def bf16(values: np.ndarray) -> Bits:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def states() -> tuple[dict[str, Bits], dict[str, Bits]]:
    rng = np.random.default_rng(0)
    old: dict[str, Bits] = {}
    new: dict[str, Bits] = {}
    for tensor in LAYOUT.tensors:
        master = (rng.standard_normal(tensor.elements) * 0.02).astype(np.float32)
        step = (2.4e-7 * rng.standard_normal(tensor.elements)).astype(np.float32)
        if tensor.dtype == "BF16":
            old[tensor.name], new[tensor.name] = bf16(master), bf16(master - step)
        else:
            old[tensor.name], new[tensor.name] = master.view(np.uint32), (master - step).view(np.uint32)
    return old, new


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OLD in many shards, NEW in one, with another tokenizer."""
    root = tmp_path_factory.mktemp("delta")
    old, new = states()
    write_checkpoint(root / "old", LAYOUT, old.__getitem__, {"config.json": CONFIG, "tokenizer.json": b"{}"}, 30_000)
    files = {"config.json": CONFIG, "tokenizer.json": b'{"new": 1}', "chat_template.jinja": b"{{ x }}"}
    write_checkpoint(root / "new", LAYOUT, new.__getitem__, files)
    return root


@pytest.fixture(scope="module")
def report(folders: Path) -> DeltaReport:
    return delta(folders / "old", folders / "new", out=folders / "step.delta", up_mbit=100, nodes=10)


def test_the_sizes_in_the_report(folders: Path, report: DeltaReport) -> None:
    old, new = states()
    assert report.exact
    assert report.changed == sum(int((old[name] != new[name]).sum()) for name in old)
    assert report.elements == sum(tensor.elements for tensor in LAYOUT.tensors)
    assert report.density == report.changed / report.elements
    assert report.full_bytes == LAYOUT.full_bytes
    assert report.bits_per_change == 8 * report.delta_bytes / report.changed
    assert 6.8 < report.bits_per_change < 7.6  # includes all overhead of a very small model
    assert report.delta_bytes <= os.path.getsize(folders / "step.delta")
    assert min(report.encode_gb_s, report.decode_gb_s) > 0


def test_the_times_in_the_report(report: DeltaReport) -> None:
    """100 Mbit/s are 12.5 MB/s. A star sends N copies; the swarm's uplinks share them."""
    assert report.star_full_s == pytest.approx(10 * report.full_bytes / 12.5e6)
    assert report.star_delta_s == pytest.approx(10 * report.delta_bytes / 12.5e6)
    assert report.swarm_s == pytest.approx(report.delta_bytes / 12.5e6)


def test_apply_writes_new_with_its_small_files(folders: Path, report: DeltaReport, tmp_path: Path) -> None:
    root = apply(folders / "old", folders / "step.delta", tmp_path / "out")
    new, out = Checkpoint.open(folders / "new"), Checkpoint.open(tmp_path / "out")
    assert out.layout == new.layout
    assert out.files == new.files
    assert all(np.array_equal(out.bits(name), new.bits(name)) for name in new.names)
    assert len(root) == 32


@pytest.mark.parametrize("coder", [CODER_RICE, CODER_PCO])
def test_both_coders_and_progress(folders: Path, coder: int) -> None:
    seen: list[tuple[float, float]] = []
    found = delta(
        folders / "old", folders / "new", coder=coder, progress=lambda done, total: seen.append((done, total))
    )
    assert found.exact
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_nothing_changed(folders: Path, tmp_path: Path) -> None:
    found = delta(folders / "old", folders / "old", out=tmp_path / "none.delta")
    assert (found.changed, found.chunks, found.exact) == (0, 0, True)
    apply(folders / "old", tmp_path / "none.delta", tmp_path / "out")
    assert Checkpoint.open(tmp_path / "out").layout == Checkpoint.open(folders / "old").layout


def test_two_models(folders: Path, tmp_path: Path) -> None:
    layout = Layout((*LAYOUT.tensors[:2], TensorSpec("d.scalar", "F32", (1,)), LAYOUT.tensors[3]))
    old, _ = states()
    write_checkpoint(tmp_path / "other", layout, old.__getitem__, {"config.json": CONFIG})
    with pytest.raises(UsageError, match=r"not two versions of one model: 'd\.scalar'"):
        delta(folders / "old", tmp_path / "other")
    with pytest.raises(UsageError, match="another model"):
        apply(tmp_path / "other", folders / "step.delta", tmp_path / "out")


def test_another_base(folders: Path, report: DeltaReport, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="another version"):
        apply(folders / "new", folders / "step.delta", tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_out_is_never_overwritten(folders: Path, report: DeltaReport, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        delta(folders / "old", folders / "new", out=folders / "step.delta")
    with pytest.raises(UsageError, match="exists already"):
        apply(folders / "old", folders / "step.delta", folders / "new")


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "magic": flip(3),
    "public key": flip(20),
    "layout": flip(100),
    "a body": lambda data: flip(len(data) - 2000)(data),
    "manifest": flip(-5),
    "cut short": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "bytes too many": lambda data: data + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_files(folders: Path, report: DeltaReport, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    bad = tmp_path / "bad.delta"
    bad.write_bytes(damage((folders / "step.delta").read_bytes()))
    with pytest.raises(UsageError, match="damaged"):
        apply(folders / "old", bad, tmp_path / "out")
    assert os.listdir(tmp_path) == ["bad.delta"]


def test_no_such_file(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Cannot read"):
        apply(folders / "old", tmp_path / "nothing", tmp_path / "out")


def test_the_table(report: DeltaReport) -> None:
    text = render(report)
    assert "bits a change" in text
    assert "yes: decoded" in text
    assert "to 10 nodes" in text
    assert "this is a bug" in render(replace(report, exact=False))
    plain_report = json.loads(json.dumps(report.to_dict()))
    keys = {
        "bits_per_change",
        "ratio",
        "encode_gb_s",
        "decode_gb_s",
        "exact",
    }  # those of python -m scenarios.bench.codec
    assert keys <= plain_report.keys()
    assert "leb128" in plain_report["anchors"]
    for way in plain_report["anchors"].values():
        assert keys == way.keys()
        assert way["exact"]


def test_what_changed_of_each_expert(tmp_path: Path) -> None:
    """Three experts one by one in a layer, four in one tensor in another: shares, in the table and as JSON."""
    stored = [TensorSpec(f"model.layers.0.mlp.experts.{e}.up.weight", "BF16", (4, 50)) for e in range(3)]
    layout = Layout(
        (*stored, TensorSpec("model.layers.1.mlp.experts.up", "BF16", (4, 25, 2)), TensorSpec("norm", "BF16", (9,)))
    )
    old = {tensor.name: np.full(tensor.elements, 0x3F80, np.uint16) for tensor in layout.tensors}
    new = {name: bits.copy() for name, bits in old.items()}
    new["model.layers.0.mlp.experts.1.up.weight"][:20] ^= 1
    new["model.layers.1.mlp.experts.up"][[0, 49, 50, 150]] ^= 1
    new["norm"][0] ^= 1
    for name, words in (("old", old), ("new", new)):
        write_checkpoint(tmp_path / name, layout, words.__getitem__, {"config.json": CONFIG})
    found = delta(tmp_path / "old", tmp_path / "new")
    plain = found.to_dict()["experts"]
    assert plain == {
        "count": 7, "touched": 4, "untouched": 3, "min": 0.0, "median": 0.02, "max": 0.1,
        "layers": {
            "model.layers.0.mlp": {"elements": [200, 200, 200], "changed": [0, 20, 0]},
            "model.layers.1.mlp": {"elements": [50, 50, 50, 50], "changed": [2, 1, 0, 1]},
        },
    }  # fmt: skip
    text = render(found)
    assert "4 of 7 changed, in 2 layers" in text
    assert "0, 2 and 10 % changed (least, median, most)" in text


def test_a_model_without_experts_has_none_in_its_report(report: DeltaReport) -> None:
    assert report.experts is None
    assert "experts" not in render(report)
