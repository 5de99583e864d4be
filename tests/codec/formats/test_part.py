"""A format's part: all of its blocks, one of them, and those that a version changes agree."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from codec_kit import bf16
from numpy.typing import NDArray

from codec.bits import Bits
from codec.formats.part import FormatPart, reader_of
from codec.formats.quantise import quantise
from codec.formats.spec import FORMATS, Format, format_tensors
from codec.layout import BLOCK_ELEMENTS, BlockSpec, Layout, TensorSpec

EVERY = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
BASE = (
    TensorSpec("model.embed_tokens.weight", "BF16", (2200, 1001), ("lm_head.weight",)),
    TensorSpec("model.layers.0.mlp.experts.gate_up_proj", "BF16", (3, 300, 1024)),
    TensorSpec("model.layers.0.mlp.up_proj.weight", "BF16", (1100, 1111)),
    TensorSpec("model.layers.0.mlp.wide.weight", "BF16", (2, BLOCK_ELEMENTS + 3)),
    TensorSpec("model.layers.0.self_attn.o_proj.weight", "BF16", (3, 3)),
)


@dataclass
class Change:
    positions: NDArray[np.uint32]
    bits: Bits


class Model:
    """All tensors in memory: a source of blocks, which can be written."""

    def __init__(self, form: Format, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        tensors = (*BASE, *format_tensors(Layout(BASE), form))
        self.layout = Layout(tuple(sorted(tensors, key=lambda tensor: tensor.name)))
        self.tensors: dict[str, Bits] = {
            tensor.name: np.zeros(tensor.elements, tensor.type.bits)
            if tensor.name.startswith("~")
            else bf16(rng.standard_normal(tensor.elements) * 0.02)
            for tensor in self.layout.tensors
        }
        self.read = reader_of(self)
        self.part = FormatPart(self.layout, form)

    @property
    def hashes(self) -> NDArray[np.uint8]:
        return np.zeros((self.layout.n_blocks, 32), np.uint8)

    def block(self, block: int) -> Bits:
        spec = self.layout.block(block)
        return self.tensors[spec.name][spec.start : spec.start + spec.count]

    def blocks(self, of_format: bool) -> list[tuple[int, BlockSpec]]:
        every = ((block, self.layout.block(block)) for block in range(self.layout.n_blocks))
        return [(block, spec) for block, spec in every if spec.name.startswith("~") == of_format]

    def quantise(self) -> None:
        for tensor in self.part.tensors:
            for found in self.part.compute(tensor, self.read):
                self.block(found.block)[:] = found.new

    def matches_whole_tensors(self) -> bool:
        """Whether the part is what quantising each plane of each tensor at once gives."""
        for tensor in self.part.tensors:
            bits = self.tensors[tensor.base.name].reshape(tensor.matrix.planes, -1)
            bands = [quantise(plane, tensor.matrix, tensor.form) for plane in bits]
            for spec, wanted in ((tensor.codes, [b.codes for b in bands]), (tensor.scales, [b.scales for b in bands])):
                if self.tensors[spec.name].tobytes() != b"".join(each.tobytes() for each in wanted):
                    return False
        return True


@EVERY
def test_all_blocks_are_those_of_whole_tensors_and_each_can_be_computed_alone(form: Format) -> None:
    model = Model(form)
    model.quantise()
    assert model.matches_whole_tensors()
    for block, _ in model.blocks(of_format=True):
        assert np.array_equal(model.part.block(block, model.read), model.block(block)), block


@EVERY
def test_a_version_changes_the_blocks_that_differ_and_no_others(form: Format) -> None:
    model = Model(form)
    model.quantise()
    rng = np.random.default_rng(6)
    for step in range(4):
        changes: dict[int, Any] = {}
        for block, spec in model.blocks(of_format=False):
            if rng.random() < 0.6:
                positions = np.flatnonzero(rng.random(spec.count) < 0.01).astype(np.uint32)
                bits = model.block(block)[positions] ^ np.uint16(1)
                bits[:step] = rng.integers(0, 1 << 16, min(step, bits.size))
                changes[block] = Change(positions, bits)
        before = {block: model.block(block).copy() for block, _ in model.blocks(of_format=True)}
        found = {}
        for tensor in model.part.touched(changes):
            for each in model.part.update(tensor, model.read, changes):
                assert np.array_equal(each.old, before[each.block])
                found[each.block] = each.new.copy()
        for block, change in changes.items():
            model.block(block)[change.positions] = change.bits
        for block, bits in found.items():
            model.block(block)[:] = bits
        assert model.matches_whole_tensors()
        differing = {block for block, bits in before.items() if not np.array_equal(bits, model.block(block))}
        assert set(found) == differing


def test_tensors_whose_blocks_did_not_change_are_not_touched() -> None:
    model = Model(FORMATS["int8-channel-e8"])
    embedding, experts = (model.layout.blocks_of(tensor.name)[0] for tensor in BASE[:2])
    nothing = Change(np.empty(0, np.uint32), np.empty(0, np.uint16))
    assert model.part.touched({embedding: nothing}) == []
    assert [tensor.base for tensor in model.part.touched({experts: nothing})] == [BASE[1]]
