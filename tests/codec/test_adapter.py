"""The configuration tensor of an adapter's slot: what is encoded is read back, and nothing else is read."""

import contextlib
import json
from typing import Any

import pytest
from codec_kit import at_least
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.adapter import CONFIG_BYTES, AdapterConfig, AdapterModule, AdapterSlots
from codec.errors import PeerError, UsageError
from codec.layout import Layout, TensorSpec

MODEL = Layout(
    (
        TensorSpec("model.embed_tokens.weight", "BF16", (100, 64), ("lm_head.weight",)),
        TensorSpec("model.layers.0.mlp.up_proj.weight", "BF16", (128, 64)),
        TensorSpec("model.layers.0.norm.weight", "BF16", (64,)),
        TensorSpec("model.layers.0.q_proj.weight", "F32", (32, 64)),
    )
)
MODULES = (AdapterModule("model.layers.0.mlp.up_proj", 8), AdapterModule("model.layers.0.q_proj", 4))
CONFIG = AdapterConfig("math-1", MODEL.hash, 8, 16.0, MODULES, {"peft_type": "LORA", "r": 8, "x": None}, 3)
WIDTH = 128 + 64 + 32 + 64

names = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
configs = st.builds(
    AdapterConfig,
    name=names,
    base=st.binary(min_size=32, max_size=32),
    rank=st.integers(1, 1024),
    alpha=st.floats(allow_nan=False, allow_infinity=False),
    modules=st.dictionaries(names, st.integers(1, 1024), min_size=1, max_size=6).map(
        lambda found: tuple(AdapterModule(*item) for item in sorted(found.items()))
    ),
    peft=st.dictionaries(texts, json_values, max_size=4),
    version=st.integers(0, 2**64 - 1),
)


@settings(max_examples=at_least(100))
@given(configs)
def test_a_configuration_is_read_back(config: AdapterConfig) -> None:
    data = config.to_bytes()
    assert len(data) == CONFIG_BYTES
    assert AdapterConfig.from_bytes(data) == config
    assert AdapterConfig.from_bytes(data).to_bytes() == data  # type: ignore[union-attr]


def test_a_new_version_changes_only_its_own_bytes() -> None:
    old, new = CONFIG.to_bytes(), AdapterConfig(**{**_fields(CONFIG), "version": 2**64 - 1}).to_bytes()
    assert {at for at in range(CONFIG_BYTES) if old[at] != new[at]} <= set(range(4, 12))


def _fields(config: AdapterConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("name", "base", "rank", "alpha", "modules", "peft", "version")}


def test_zeros_are_an_empty_slot() -> None:
    assert AdapterConfig.from_bytes(bytes(CONFIG_BYTES)) is None


@settings(max_examples=at_least(200))
@given(st.data())
def test_changed_bytes_are_refused_or_are_the_encoding_of_what_is_read(data: st.DataObject) -> None:
    raw = bytearray(CONFIG.to_bytes())
    used = 12 + int.from_bytes(raw[:4], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, used + 8))
        raw[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PeerError):
        found = AdapterConfig.from_bytes(bytes(raw))
        assert (bytes(CONFIG_BYTES) if found is None else found.to_bytes()) == bytes(raw)


@settings(max_examples=at_least(100))
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_read(body: bytes) -> None:
    raw = (len(body).to_bytes(4, "little") + bytes(8) + body).ljust(CONFIG_BYTES, b"\0")
    with contextlib.suppress(PeerError):
        AdapterConfig.from_bytes(raw)
    with contextlib.suppress(PeerError):
        AdapterConfig.from_bytes(body.ljust(CONFIG_BYTES, b"\0"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 60000,
        b'{"a":' * 10000,
        b"1" * 60000,
        b"null",
        b'{"alpha":1e999,"base":"","modules":[],"name":"a","peft":{},"rank":1}',
        b'{"alpha":NaN,"base":"","modules":[],"name":"a","peft":{},"rank":1}',
        b'{"alpha":1.0}',
        "\ufeff{}".encode(),
        json.dumps({"alpha": 1.0}).encode("utf-16"),
    ],
)
def test_what_is_no_configuration_is_refused(body: bytes) -> None:
    with pytest.raises(PeerError, match="adapter"):
        AdapterConfig.from_bytes((len(body).to_bytes(4, "little") + b"\1" * 8 + body).ljust(CONFIG_BYTES, b"\0"))


@pytest.mark.parametrize("size", [0, CONFIG_BYTES - 1, CONFIG_BYTES + 1])
def test_the_tensor_has_one_size(size: int) -> None:
    with pytest.raises(PeerError, match="bytes"):
        AdapterConfig.from_bytes(bytes(size))


def _changed(**values: Any) -> bytes:
    fields = {
        "alpha": 16.0, "base": MODEL.hash.hex(), "modules": ["a", ["b", 4]], "name": "n", "peft": {}, "rank": 8,
    } | values  # fmt: skip
    body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return (len(body).to_bytes(4, "little") + bytes(8) + body).ljust(CONFIG_BYTES, b"\0")


def test_the_json_that_others_are_compared_with_is_read() -> None:
    assert AdapterConfig.from_bytes(_changed()) is not None


@pytest.mark.parametrize(
    "values",
    [
        {"alpha": 16}, {"alpha": "16"}, {"base": "00"}, {"base": MODEL.hash.hex().upper()}, {"base": 5},
        {"modules": []}, {"modules": ["b", "a"]}, {"modules": ["a", "a"]}, {"modules": [["a", 8]]},
        {"modules": [["a", 0]]}, {"modules": [["a", 1025]]}, {"modules": [["a"]]}, {"modules": [5]},
        {"modules": [["a", True]]}, {"modules": ["a/b"]}, {"modules": "ab"}, {"modules": None}, {"modules": {"a": 1}},
        {"name": ""}, {"name": "a b"}, {"name": "a" * 65}, {"name": None}, {"peft": []}, {"peft": "x"},
        {"rank": 0}, {"rank": 1025}, {"rank": 8.0}, {"rank": True}, {"more": 1},
    ],
)  # fmt: skip
def test_each_field_is_validated(values: dict[str, Any]) -> None:
    with pytest.raises(PeerError, match="adapter"):
        AdapterConfig.from_bytes(_changed(**values))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"name": "a/b"}, "its name"),
        ({"rank": 0}, "rank"),
        ({"rank": 2000}, "rank"),
        ({"alpha": float("nan")}, "alpha"),
        ({"version": 2**64}, "version"),
        ({"modules": ()}, "no module"),
        ({"modules": MODULES[::-1]}, "sorted"),
        ({"peft": {"x": float("inf")}}, "JSON"),
        ({"peft": {"x": {1, 2}}}, "JSON"),
        ({"peft": {"x": "\ud800"}}, "JSON"),
        ({"peft": {"x": "y" * CONFIG_BYTES}}, "adapt fewer modules"),
    ],
)
def test_what_cannot_be_encoded_is_said(values: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        AdapterConfig(**(_fields(CONFIG) | values)).to_bytes()


def test_slots_have_room_for_all_linear_layers() -> None:
    slots = AdapterSlots.reserve(MODEL, 2, 8)
    assert slots.elements == 8 * WIDTH
    assert AdapterSlots.reserve(MODEL, 2, 1).elements == -(-WIDTH // 64) * 64
    CONFIG.check_fits(MODEL, slots)
    for count, rank in ((0, 1), (65, 1), (1, 0), (1, 1025)):
        with pytest.raises(UsageError, match="1 to"):
            AdapterSlots.reserve(MODEL, count, rank)
    with pytest.raises(UsageError, match="no linear layer"):
        AdapterSlots.reserve(Layout((TensorSpec("norm.weight", "BF16", (5,)),)), 1, 1)


def test_the_tensors_lie_one_after_another() -> None:
    found = CONFIG.tensors(MODEL)
    assert [(tensor.name, tensor.shape) for tensor in found] == [
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", (8, 64)),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight", (128, 8)),
        ("base_model.model.model.layers.0.q_proj.lora_A.weight", (4, 64)),
        ("base_model.model.model.layers.0.q_proj.lora_B.weight", (32, 4)),
    ]
    at = 0
    for tensor in found:
        assert tensor.offset == at
        at += tensor.elements
    assert at <= AdapterSlots.reserve(MODEL, 1, 8).elements


def test_an_adapter_that_does_not_fit_is_refused() -> None:
    slots = AdapterSlots.reserve(MODEL, 1, 4)
    with pytest.raises(UsageError, match="rank 8"):
        CONFIG.check_fits(MODEL, slots)
    other = Layout(MODEL.tensors[1:])
    with pytest.raises(UsageError, match="another base"):
        CONFIG.check_fits(other, slots)
    with pytest.raises(PeerError, match="another model"):
        CONFIG.tensors(other)
    for module in ("model.layers.0.norm", "nothing"):
        config = AdapterConfig(**(_fields(CONFIG) | {"modules": (AdapterModule(module, 4),)}))
        with pytest.raises(PeerError, match="modules"):
            config.tensors(MODEL)
        with pytest.raises(UsageError, match="does not fit"):
            config.check_fits(MODEL, slots)


@pytest.mark.parametrize(
    "tensors",
    [
        (TensorSpec("~adapter/00/weights", "BF16", (64,)),),
        (TensorSpec("~adapter/01/config", "U8", (CONFIG_BYTES,)), TensorSpec("~adapter/01/weights", "BF16", (288,))),
        (TensorSpec("~adapter/00/config", "U8", (5,)), TensorSpec("~adapter/00/weights", "BF16", (320,))),
        (TensorSpec("~adapter/00/config", "U8", (CONFIG_BYTES,)), TensorSpec("~adapter/00/weights", "F32", (320,))),
    ],
)
def test_slots_of_another_shape_are_refused(tensors: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(PeerError, match="adapters"):
        AdapterSlots.of(Layout((*MODEL.tensors, *tensors)))
