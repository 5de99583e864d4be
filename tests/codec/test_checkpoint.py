"""Checkpoint folders: every sharding gives the same layout; a damaged header raises `UsageError`."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from codec_kit import LAYOUT, at_least, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.checkpoint import Checkpoint, is_model_file, write_checkpoint
from codec.errors import PeerError, UsageError
from codec.layout import FileSpec, Layout, TensorSpec

TIED = json.dumps({"tie_word_embeddings": True}).encode()
FILES = {"config.json": TIED, "tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}"}


def safetensors(path: Path, table: object, data: bytes = b"", length: int | None = None) -> Path:
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("shard_bytes", [10**9, 100_000, 1])
def test_any_sharding_gives_the_same(tmp_path: Path, shard_bytes: int) -> None:
    bits = weights()
    write_checkpoint(tmp_path / "model", LAYOUT, bits.__getitem__, FILES, shard_bytes)
    found = Checkpoint.open(tmp_path / "model")
    assert found.layout.tensors == LAYOUT.tensors
    assert found.layout.hash == Checkpoint.open(tmp_path / "model").layout.hash
    assert [file.name for file in found.layout.files] == sorted(FILES)
    assert found.files == FILES
    assert found.names == tuple(tensor.name for tensor in LAYOUT.tensors)
    for name in found.names:
        assert np.array_equal(found.bits(name), bits[name])
    assert np.array_equal(found.bits("lm_head.weight"), bits["model.embed_tokens.weight"])
    with pytest.raises(KeyError):
        found.bits("nothing")


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    layout = Layout((TensorSpec("a", "F32", (3, 5)), TensorSpec("b", "I64", ()), TensorSpec("c", "U8", (0,))))
    bits = weights(layout)
    write_checkpoint(tmp_path / "m", layout, bits.__getitem__, {})
    found = library.load_file(tmp_path / "m" / "model.safetensors")
    assert {name: array.shape for name, array in found.items()} == {"a": (3, 5), "b": (), "c": (0,)}
    assert np.array_equal(found["a"].reshape(-1).view(np.uint32), bits["a"])


def test_one_file(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "x.safetensors", {"w": entry("BF16", [3], 0, 6)}, b"abcdef")
    found = Checkpoint.open(path)
    assert found.bits("w").tobytes() == b"abcdef"
    assert found.layout.files == ()


def test_unaligned_data(tmp_path: Path) -> None:
    table = {"flag": entry("BOOL", [1], 0, 1), "w": entry("F32", [2], 1, 9)}
    found = Checkpoint.open(safetensors(tmp_path / "x.safetensors", table, b"\1abcdefgh"))
    assert found.bits("w").tobytes() == b"abcdefgh"


def embedding(path: Path, head: bytes | None, config: dict[str, object]) -> Checkpoint:
    path.mkdir()
    table = {"model.embed_tokens.weight": entry("BF16", [2], 0, 4)}
    if head is not None:
        table["lm_head.weight"] = entry("BF16", [2], 4, 8)
    safetensors(path / "model.safetensors", table, b"abcd" + (head or b""))
    (path / "config.json").write_text(json.dumps(config))
    return Checkpoint.open(path)


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_tied_weights_are_stored_once_wherever_they_are_on_disk(tmp_path: Path, config: dict[str, object]) -> None:
    without, with_ = embedding(tmp_path / "a", None, config), embedding(tmp_path / "b", b"abcd", config)
    assert without.layout == with_.layout
    assert without.layout.tensors[0].aliases == ("lm_head.weight",)
    assert len(with_.layout.tensors) == 1


@pytest.mark.parametrize(
    ("head", "config"),
    [(b"abcd", {"tie_word_embeddings": False}), (b"abcd", {}), (b"abcx", {"tie_word_embeddings": True})],
)
def test_untied_weights_stay_two_tensors(tmp_path: Path, head: bytes, config: dict[str, object]) -> None:
    assert len(embedding(tmp_path / "a", head, config).layout.tensors) == 2


OK = {"w": entry("BF16", [3], 0, 6)}
DAMAGED: dict[str, tuple[object, bytes, int | None]] = {
    "not JSON": (b"{", b"", None),
    "not UTF-8": (b"\xff\xfe", b"", None),
    "a list": ([], b"", None),
    "nested without end": (b"[" * 100_000, b"", None),
    "header longer than the file": (OK, b"abcdef", 10**6),
    "header longer than allowed": (OK, b"abcdef", 2**63),
    "entry not an object": ({"w": 3}, b"", None),
    "no dtype": ({"w": {"shape": [], "data_offsets": [0, 2]}}, b"ab", None),
    "unknown dtype": ({"w": entry("F3", [1], 0, 2)}, b"ab", None),
    "dtype not a string": ({"w": {**entry("F32", [1], 0, 4), "dtype": ["F32"]}}, b"abcd", None),
    "negative size": ({"w": entry("BF16", [-1], 0, 2)}, b"ab", None),
    "size not an integer": ({"w": entry("BF16", [True], 0, 2)}, b"ab", None),
    "size a float": ({"w": {**OK["w"], "shape": [3.0]}}, b"abcdef", None),
    "huge sizes": ({"w": entry("BF16", [2**40, 2**40], 0, 2)}, b"ab", None),
    "backwards": ({"w": entry("BF16", [3], 6, 0)}, b"abcdef", None),
    "beyond the file": ({"w": entry("BF16", [3], 2, 8)}, b"abcdef", None),
    "other size than the shape's": ({"w": entry("BF16", [2], 0, 6)}, b"abcdef", None),
    "three offsets": ({"w": {**OK["w"], "data_offsets": [0, 6, 6]}}, b"abcdef", None),
    "impossible name": ({"a\nb": OK["w"]}, b"abcdef", None),
}


@pytest.mark.parametrize(("table", "data", "length"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_headers_are_refused(tmp_path: Path, table: object, data: bytes, length: int | None) -> None:
    path = safetensors(tmp_path / "x.safetensors", table, data, length)
    with pytest.raises(UsageError, match="is damaged, or is not a checkpoint"):
        Checkpoint.open(path)


@settings(max_examples=at_least(200))
@given(st.integers(0), st.binary(min_size=1, max_size=4))
def test_an_altered_header_is_refused_or_read_in_bounds(
    tmp_path_factory: pytest.TempPathFactory, at: int, by: bytes
) -> None:
    header = json.dumps({**OK, "__metadata__": {"format": "pt"}}).encode()
    at %= len(header)
    altered = header[:at] + by + header[at + len(by) :]
    path = safetensors(tmp_path_factory.getbasetemp() / "altered.safetensors", altered, b"abcdef")
    try:
        found = Checkpoint.open(path)
    except UsageError:
        return
    for name in found.names:
        found.bits(name)


@pytest.mark.parametrize("size", [0, 3, 8])
def test_very_short_files(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(UsageError):
        Checkpoint.open(path)


def test_a_missing_and_an_empty_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        Checkpoint.open(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"no \.safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", ".hidden", "", "missing.safetensors"])
def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(UsageError):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"w": 3}}'])
def test_a_damaged_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UsageError, match="index"):
        Checkpoint.open(tmp_path)


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    """transformers loads the single file, vLLM those of the index. One of the two is left over from an earlier save."""
    safetensors(tmp_path / "model-00001-of-00001.safetensors", OK, b"abcdef")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    assert Checkpoint.open(tmp_path).names
    safetensors(tmp_path / "model.safetensors", OK, b"ABCDEF")
    with pytest.raises(UsageError, match="two checkpoints"):
        Checkpoint.open(tmp_path)
    index.unlink()
    assert Checkpoint.open(tmp_path).names


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        safetensors(tmp_path / name, OK, b"abcdef")
    with pytest.raises(UsageError, match="two files hold 'w'"):
        Checkpoint.open(tmp_path)


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("me")
    with pytest.raises(UsageError, match="exists already"):
        write_checkpoint(tmp_path, LAYOUT, weights().__getitem__, {})
    assert os.listdir(tmp_path) == ["keep"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def bits(name: str) -> np.ndarray:
        raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match="No space left"):
        write_checkpoint(tmp_path / "out", LAYOUT, bits, {})
    assert os.listdir(tmp_path) == []


def test_files_are_checked_against_the_layout(tmp_path: Path) -> None:
    layout = Layout((), (FileSpec("config.json", 2, bytes(32)),))
    with pytest.raises(PeerError, match=r"config\.json"):
        write_checkpoint(tmp_path / "out", layout, weights().__getitem__, {"config.json": b"{}"})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", list(FILES))
def test_the_layout_commits_to_config_tokenizer_and_chat_template(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path / "a", LAYOUT, weights().__getitem__, FILES)
    write_checkpoint(tmp_path / "b", LAYOUT, weights().__getitem__, FILES | {name: FILES[name] + b" "})
    one, other = (Checkpoint.open(tmp_path / folder).layout for folder in "ab")
    assert one.same_tensors(other)
    assert [spec.name for spec in one.files] == sorted(FILES)
    assert one.hash != other.hash


def test_the_files_that_belong_to_a_model() -> None:
    yes = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "merges.txt", "vocab.json",
           "chat_template.jinja", "generation_config.json", "special_tokens_map.json", "qwen.tiktoken")  # fmt: skip
    no = ("model.safetensors", "model.safetensors.index.json", "optimizer.pt", "README.md", "trainer_state.json",
          "modeling_x.py", ".gitattributes")  # fmt: skip
    assert all(map(is_model_file, yes))
    assert not any(map(is_model_file, no))
