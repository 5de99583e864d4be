"""The formats' bytes stay what they are, and a second implementation in exact fractions computes the same."""

import struct
from pathlib import Path

import numpy as np
import plain_formats
import pytest
from make_golden import MODEL, model_part

from codec.formats.quantise import quantise
from codec.formats.spec import FORMATS, Format, Matrix

GOLDEN = Path(__file__).with_name("golden")
ROWS, COLUMNS = 130, 141
BITS = np.frombuffer((GOLDEN / "bits").read_bytes(), "<u2")


def stored(form: Format) -> tuple[bytes, bytes]:
    data = (GOLDEN / form.name).read_bytes()
    (size,) = struct.unpack_from("<I", data)
    return data[4 : 4 + size], data[4 + size :]


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_codes_and_scales_are_the_frozen_bytes(form: Format) -> None:
    band = quantise(BITS, Matrix(1, ROWS, COLUMNS), form)
    assert (band.codes.tobytes(), band.scales.tobytes()) == stored(form)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
@pytest.mark.slow
def test_the_plain_implementation_computes_the_frozen_bytes(form: Format) -> None:
    tile = form.tile_rows, form.tile_columns
    codes, scales = plain_formats.quantise(BITS.tolist(), ROWS, COLUMNS, form.element, tile, form.powers)
    found = plain_formats.stored_codes(codes, form.element), plain_formats.stored_scales(scales, form.powers)
    assert found == stored(form)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_a_models_part_is_the_frozen_bytes(form: Format) -> None:
    assert model_part(form) == (GOLDEN / f"{form.name}.model").read_bytes()


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_the_plain_implementation_chooses_the_same_tensors_and_computes_the_frozen_part(form: Format) -> None:
    stored, at = b"", 0
    for tensor in MODEL.tensors:
        *planes, rows, columns = (1, *tensor.shape) if len(tensor.shape) == 1 else tensor.shape
        chosen = plain_formats.format_of(form.name, [tensor.name, *tensor.aliases], tensor.dtype, tensor.shape)
        codes_bytes = scales_bytes = b""
        for _ in range(planes[0] if planes else 1):
            bits = BITS[at : at + rows * columns].tolist()
            at += rows * columns
            if chosen is None:
                continue
            element, tile, *power = chosen.split("-")
            codes, scales = plain_formats.quantise(
                bits, rows, columns, element, plain_formats.TILES[tile], power == ["e8"]
            )
            codes_bytes += plain_formats.stored_codes(codes, element)
            scales_bytes += plain_formats.stored_scales(scales, power == ["e8"])
        stored += codes_bytes + scales_bytes
    assert stored == (GOLDEN / f"{form.name}.model").read_bytes()
