"""The codes as a checkpoint of packed int4: it stands for what the codes do, and a version leads to its bits."""

import json

import numpy as np
import pytest
from codec_kit import bf16
from numpy.typing import NDArray
from test_part import Change

from codec.bits import Bits
from codec.errors import UsageError
from codec.formats.dequantised import DequantisedBase
from codec.formats.packed import PackedBase
from codec.formats.part import FormatPart, reader_of
from codec.formats.spec import FORMATS, format_tensors
from codec.layout import BlockSpec, FileSpec, Layout, TensorSpec
from codec.parts import extended
from codec.staging import StagedBlock

FORM = FORMATS["int4-group-e8"]
CONFIG = json.dumps({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024}).encode()
LINEAR = "model.layers.0.mlp.up_proj"
BASE = Layout(
    (
        TensorSpec("model.embed_tokens.weight", "BF16", (50, 1024), ("lm_head.weight",)),
        TensorSpec(f"{LINEAR}.weight", "BF16", (8256, 1024)),
        TensorSpec("model.norm.weight", "BF16", (1024,)),
    ),
    (FileSpec("config.json", len(CONFIG), bytes(32)), FileSpec("tokenizer.json", 1, bytes(32))),
)
WHOLE = extended(BASE, formats=format_tensors(BASE, FORM))


class Memory:
    """All tensors of the whole model in memory: a source of blocks."""

    layout = WHOLE

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.tensors: dict[str, Bits] = {spec.name: np.zeros(spec.elements, spec.type.bits) for spec in WHOLE.tensors}
        for spec in BASE.tensors:
            self.tensors[spec.name] = bf16(rng.standard_normal(spec.elements) * 0.02)
        self.read, self.part = reader_of(self), FormatPart(WHOLE, FORM)
        for tensor in self.part.tensors:
            for found in self.part.compute(tensor, self.read):
                self.block(found.block)[:] = found.new

    @property
    def hashes(self) -> NDArray[np.uint8]:
        return np.zeros((WHOLE.n_blocks, 32), np.uint8)

    def block(self, block: int) -> Bits:
        spec = WHOLE.block(block)
        return self.tensors[spec.name][spec.start : spec.start + spec.count]


def whole(base: PackedBase | DequantisedBase, memory: Memory) -> dict[str, Bits]:
    """Every tensor that the engine has, from its blocks."""
    found: dict[str, list[Bits]] = {}
    for block in range(base.layout.n_blocks):
        spec: BlockSpec = base.layout.block(block)
        bits = base.block(block, memory.read)
        assert (bits.dtype, bits.size) == (spec.dtype.bits, spec.count)
        found.setdefault(spec.name, []).append(bits.copy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def test_packed_tensors_stand_for_what_the_codes_do() -> None:
    memory = Memory()
    tensors = whole(PackedBase(WHOLE, FORM, CONFIG), memory)
    expected = whole(DequantisedBase(WHOLE, FORM), memory)
    rows, columns = WHOLE.tensor(f"{LINEAR}.weight").shape
    words = tensors.pop(f"{LINEAR}.weight_packed").reshape(rows, columns // 8, 1)
    scales = tensors.pop(f"{LINEAR}.weight_scale").astype(np.uint32) << np.uint32(16)
    codes = (words >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)).astype(np.int32) - 8
    values = codes.reshape(rows, columns // 128, 128) * scales.view(np.float32).reshape(rows, columns // 128, 1)
    assert np.array_equal(bf16(values.reshape(-1)), expected.pop(f"{LINEAR}.weight"))
    assert tensors.keys() == expected.keys()  # all others are those of the dequantised base
    assert all(np.array_equal(tensors[name], bits) for name, bits in expected.items())


@pytest.mark.slow
def test_a_version_leads_to_its_bits() -> None:
    memory, rng = Memory(), np.random.default_rng(1)
    base = PackedBase(WHOLE, FORM, CONFIG)
    before = whole(base, memory)
    changes: dict[int, Change] = {}
    for block in range(BASE.n_blocks):
        bits = memory.block(block)
        positions = np.flatnonzero(rng.random(bits.size) < 0.001).astype(np.uint32)
        flips = rng.choice(np.array([1, 0x80, 0x100], np.uint16), positions.size)
        changes[block] = Change(positions, bits[positions] ^ flips)
    (norm,) = WHOLE.blocks_of("model.norm.weight")
    staged = [StagedBlock(norm, changes[norm].positions, changes[norm].bits, bytes(32), bytes(32))]
    for tensor in memory.part.touched(changes):
        for each in memory.part.update(tensor, memory.read, changes):
            assert each.old is not None
            positions = np.flatnonzero(each.old != each.new).astype(np.uint32)
            staged.append(StagedBlock(each.block, positions, each.new[positions].copy(), bytes(32), bytes(32)))
    for change in staged:
        memory.block(change.block)[change.positions] = change.bits

    after, names = whole(base, memory), set()
    for touched in base.touched(staged, memory.read):
        spec = base.layout.block(touched.block)
        names.add(spec.name)
        assert np.array_equal(touched.bits, after[spec.name][spec.start : spec.start + spec.count])
        before[spec.name][spec.start + touched.positions.astype(np.int64)] = touched.bits[touched.positions]
    assert all(np.array_equal(before[name], bits) for name, bits in after.items())
    assert names == after.keys()


def test_the_config_names_what_is_packed() -> None:
    base = PackedBase(WHOLE, FORM, CONFIG)
    config = json.loads(base.files["config.json"])
    section = config.pop("quantization_config")
    assert config == json.loads(CONFIG)
    assert (section["quant_method"], section["format"]) == ("compressed-tensors", "pack-quantized")
    assert section["ignore"] == ["lm_head", "model.embed_tokens", "model.norm"]
    files = {file.name: file for file in base.layout.files}
    assert files["tokenizer.json"] == BASE.files[1]
    assert files["config.json"].size == len(base.files["config.json"])


@pytest.mark.parametrize(
    ("form", "shape", "config", "text"),
    [
        ("int4-group", (64, 128), CONFIG, "computes with the codes of int4-group. Use --format int4-group-e8"),
        ("int4-group-e8", (64, 192), CONFIG, "no kernel takes a.weight packed .* and 128 columns"),
        ("int4-group-e8", (48, 128), CONFIG, "multiples of 32 rows"),
        ("int4-group-e8", (64, 128), b"{", "config.json cannot be read"),
        ("int4-group-e8", (64, 128), b'{"quantization_config": {}}', "names a quantisation of its own"),
    ],
)
def test_what_no_engine_takes_packed_is_refused(form: str, shape: tuple[int, int], config: bytes, text: str) -> None:
    base = Layout((TensorSpec("a.weight", "BF16", shape),))
    layout = extended(base, formats=format_tensors(base, FORMATS[form]))
    with pytest.raises(UsageError, match=text):
        PackedBase(layout, FORMATS[form], config)
