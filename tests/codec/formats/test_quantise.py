"""Quantising: equal to the plain implementation for any bits, and the same in full as for changed elements alone."""

import numpy as np
import plain_formats
import pytest
from codec_kit import at_least, bf16, rl_step
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from codec.formats.quantise import Band, bf16_of, dequantise, quantise, requantise
from codec.formats.spec import FORMATS, Format, Matrix

FORMS = st.sampled_from(sorted(FORMATS.values(), key=lambda form: form.name))
EVERY = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
EDGES = [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF, 0x3F80, 0xBFC0]
ANY_BITS = st.one_of(st.sampled_from(EDGES), st.integers(0, 0xFFFF), st.integers(0x3C00, 0x3D80))


def same(one: Band, other: Band) -> bool:
    return np.array_equal(one.codes, other.codes) and np.array_equal(one.scales, other.scales)


@settings(max_examples=at_least(150))
@given(FORMS, st.integers(1, 5), st.integers(1, 9), st.data())
def test_any_bits_give_what_the_plain_implementation_gives(
    form: Format, rows: int, columns: int, data: st.DataObject
) -> None:
    bits = data.draw(st.lists(ANY_BITS, min_size=rows * columns, max_size=rows * columns))
    band = quantise(np.array(bits, np.uint16), Matrix(1, rows, columns), form)
    tile = form.tile_rows, form.tile_columns
    codes, scales = plain_formats.quantise(bits, rows, columns, form.element, tile, form.powers)
    assert band.codes.tobytes() == plain_formats.stored_codes(codes, form.element)
    assert band.scales.tobytes() == plain_formats.stored_scales(scales, form.powers)


@EVERY
def test_codes_stand_for_what_the_plain_implementation_says(form: Format) -> None:
    rows, columns = 3, 150
    bits = bf16(np.random.default_rng(1).standard_normal(rows * columns) * 0.02)
    matrix = Matrix(1, rows, columns)
    values = dequantise(quantise(bits, matrix, form), matrix, form)
    tile = form.tile_rows, form.tile_columns
    codes, scales = plain_formats.quantise(bits.tolist(), rows, columns, form.element, tile, form.powers)
    across = matrix.grid(form)[1]
    for row in range(rows):
        for column in range(columns):
            at = row // form.tile_rows * across + column // matrix.tile_columns(form)
            expected = plain_formats.dequantised(codes[row][column], scales[at], form.element)
            assert float(values[row * columns + column]) == float(expected)


@EVERY
def test_an_element_is_off_by_half_a_step_at_most(form: Format) -> None:
    matrix = Matrix(1, 256, 384)
    bits = bf16(np.random.default_rng(2).standard_normal(256 * 384) * 0.02)
    exact = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    values = dequantise(quantise(bits, matrix, form), matrix, form)
    largest = np.abs(exact).max()
    step = {"fp8": largest / 14, "int8": largest / 127, "int4": largest / 7}[form.element]
    assert np.abs(values - exact).max() <= step * (1.01 if form.powers else 0.51)


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if form.powers], ids=lambda form: form.name)
def test_powers_of_two_give_values_that_bf16_holds_exactly(form: Format) -> None:
    matrix = Matrix(1, 4, 256)
    bits = bf16(np.random.default_rng(3).standard_normal(1024) * 0.02)
    values = dequantise(quantise(bits, matrix, form), matrix, form)
    again = (bf16_of(values).astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert np.array_equal(again, values)


def test_torch_casts_to_the_same_fp8_codes_but_for_the_sign_of_zero() -> None:
    torch = pytest.importorskip("torch")
    bits = bf16(np.random.default_rng(4).standard_normal((64, 300)) * 0.02).reshape(-1)
    values = torch.from_numpy((bits.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(64, 300).copy())
    scales = values.abs().amax(1, keepdim=True) / 448
    cast = (values / scales).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(-1)
    band = quantise(bits, Matrix(1, 64, 300), FORMATS["fp8-channel"])
    assert np.array_equal(band.codes, np.where(cast == 0x80, 0, cast))


@settings(max_examples=at_least(60))
@given(FORMS, st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32), st.floats(0, 0.2))
def test_changed_elements_alone_give_what_everything_gives(
    form: Format, rows: int, columns: int, seed: int, density: float
) -> None:
    rng = np.random.default_rng(seed)
    matrix = Matrix(1, rows, columns)
    old = bf16(rng.standard_normal(rows * columns) * 0.02)
    new = old.copy()
    places = np.flatnonzero(rng.random(old.size) < density)
    new[places] = np.where(rng.random(places.size) < 0.9, new[places] + np.uint16(1), rng.choice(EDGES, places.size))
    assert same(changed_alone(old, new, matrix, form), quantise(new, matrix, form))


def changed_alone(old: NDArray[np.uint16], new: NDArray[np.uint16], matrix: Matrix, form: Format) -> Band:
    positions = np.flatnonzero(old != new).astype(np.uint32)
    return requantise(old, new, positions, quantise(old, matrix, form), matrix, form)


@EVERY
def test_a_hundred_steps_one_after_the_other_do_not_drift(form: Format) -> None:
    rng = np.random.default_rng(5)
    matrix = Matrix(1, 130, 260)
    master = (rng.standard_normal(130 * 260) * 0.02).astype(np.float32)
    bits = bf16(master)
    band = quantise(bits, matrix, form)
    for _ in range(100):
        master -= (2.4e-6 * rng.standard_normal(master.size)).astype(np.float32)
        after = bf16(master)
        band = requantise(bits, after, np.flatnonzero(bits != after).astype(np.uint32), band, matrix, form)
        bits = after
    assert same(band, quantise(bits, matrix, form))


def test_powers_of_two_change_far_less_than_float_scales() -> None:
    old, new = rl_step(1 << 18)
    matrix = Matrix(1, 512, 512)
    for name in ("fp8-block", "fp8-channel", "int8-channel", "int4-group"):
        changed = [
            np.count_nonzero(quantise(old, matrix, form).codes != quantise(new, matrix, form).codes)
            for form in (FORMATS[name], FORMATS[f"{name}-e8"])
        ]
        assert changed[1] <= changed[0]
