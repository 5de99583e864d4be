"""The base that codes stand for: each block alone as whole tensors give it, and what a version changes in it."""

import numpy as np
import pytest
from test_part import BASE, EVERY, Change, Model

from codec.bits import Bits
from codec.formats.dequantised import DequantisedBase
from codec.formats.quantise import Band, bf16_of, dequantise
from codec.formats.spec import FORMATS, Format, is_quantised
from codec.staging import StagedBlock


def whole(model: Model) -> dict[str, Bits]:
    """Every tensor of the base as its codes stand for it, plane by plane."""
    found = {spec.name: model.tensors[spec.name].copy() for spec in BASE}
    for tensor in model.part.tensors:
        planes = tensor.matrix.planes
        codes = model.tensors[tensor.codes.name].reshape(planes, -1)
        scales = model.tensors[tensor.scales.name].reshape(planes, -1)
        bands = [Band(codes[plane].view(np.uint8), scales[plane]) for plane in range(planes)]
        values = [dequantise(band, tensor.matrix, tensor.form) for band in bands]
        found[tensor.base.name] = bf16_of(np.concatenate(values))
    return found


@EVERY
def test_each_block_alone_is_that_of_whole_tensors(form: Format) -> None:
    model = Model(form)
    model.quantise()
    base, expected = DequantisedBase(model.layout, form), whole(model)
    for block in range(base.layout.n_blocks):
        spec = base.layout.block(block)
        bits = base.block(block, model.read)
        assert np.array_equal(bits, expected[spec.name][spec.start : spec.start + spec.count]), (block, spec)


@EVERY
@pytest.mark.slow
def test_what_a_version_touches_leads_to_its_bits(form: Format) -> None:
    model = Model(form)
    model.quantise()
    base, before = DequantisedBase(model.layout, form), whole(model)
    rng = np.random.default_rng(8)
    changes: dict[int, Change] = {}
    for block, spec in model.blocks(of_format=False):
        positions = np.flatnonzero(rng.random(spec.count) < 0.002).astype(np.uint32)
        bits = model.block(block)[positions] ^ rng.choice(np.array([1, 0x80, 0x100], np.uint16), positions.size)
        changes[block] = Change(positions, bits)
    staged = []
    for tensor in model.part.touched(changes):
        for each in model.part.update(tensor, model.read, changes):
            assert each.old is not None
            positions = np.flatnonzero(each.old != each.new).astype(np.uint32)
            staged.append(StagedBlock(each.block, positions, each.new[positions].copy(), bytes(32), bytes(32)))
    kept = [block for block in changes if not is_quantised(BASE[model.layout.block(block).tensor], form)]
    staged += [StagedBlock(b, changes[b].positions, changes[b].bits, bytes(32), bytes(32)) for b in kept]
    for change in staged:
        model.block(change.block)[change.positions] = change.bits

    after, reached = whole(model), {name: bits.copy() for name, bits in before.items()}
    for touched in base.touched(staged, model.read):
        spec = base.layout.block(touched.block)
        assert np.array_equal(touched.bits, after[spec.name][spec.start : spec.start + spec.count])
        reached[spec.name][spec.start + touched.positions.astype(np.int64)] = touched.bits[touched.positions]
    for name, bits in after.items():
        assert np.array_equal(reached[name], bits), name
    assert any(not np.array_equal(before[name], after[name]) for name in after)


def test_a_change_of_the_bf16_bits_that_a_holder_lacks_is_not_its_change() -> None:
    model = Model(FORMATS["int4-group-e8"])
    model.quantise()
    block = model.layout.blocks_of(BASE[1].name)[0]
    change = StagedBlock(block, np.zeros(1, np.uint32), np.zeros(1, np.uint16), bytes(32), bytes(32))
    assert list(DequantisedBase(model.layout, model.part.form).touched([change], model.read)) == []
