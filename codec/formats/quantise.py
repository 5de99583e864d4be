"""Bits to codes and back, for whole rows of one matrix: in full, or only where elements changed.

A *band* is a run of rows of one plane that begins with a row of tiles and ends with one, or with the plane. Everything
here takes bands, so a caller chooses how much memory a call needs.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits
from codec.formats.spec import Format, Matrix
from codec.kernels.quantise import (
    FP8,
    INT4,
    INT8,
    code_elements,
    dequantise_rows,
    mark_stale,
    quantise_rows,
)
from codec.scratch import Positions

__all__ = ["Band", "bf16_of", "dequantise", "quantise", "requantise", "warm_up"]

_KINDS: Final = {"int4": INT4, "int8": INT8, "fp8": FP8}


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """The codes and scales of whole rows of a matrix. `codes`: uint8, flat. `scales`: flat, uint32 (bits of
    single-precision floats) or uint8 (exponents plus 127), as the format stores them."""

    codes: NDArray[np.uint8]
    scales: Bits


def _kernel_scales(scales: Bits, form: Format) -> NDArray[np.uint32]:
    """The scales as bits of single-precision floats, which is how the kernels take them. An exponent of 255 (NaN in
    F8_E8M0), which no encoder writes, becomes infinity."""
    return scales.astype(np.uint32) << np.uint32(23) if form.powers else scales.astype(np.uint32)


def _stored_scales(scales: NDArray[np.uint32], form: Format) -> Bits:
    return (scales >> np.uint32(23)).astype(np.uint8) if form.powers else scales


def _rows(size: int, matrix: Matrix) -> int:
    rows, rest = divmod(size, matrix.columns)
    assert rest == 0
    assert rows <= matrix.rows
    return rows


def _tile(matrix: Matrix, form: Format) -> tuple[int, int, int, NDArray[np.uint32]]:
    """Columns of the matrix, rows and columns of a tile, and scratch for one row of a tile."""
    columns = matrix.tile_columns(form)
    return matrix.columns, form.tile_rows, columns, np.empty(max(2, columns), np.uint32)


def _tiles(rows: int, matrix: Matrix, form: Format) -> int:
    return -(-rows // form.tile_rows) * matrix.grid(form)[1]


def quantise(bits: Bits, matrix: Matrix, form: Format) -> Band:
    """Codes and scales of a band. `bits`: uint16, the bf16 bits of its rows."""
    rows = _rows(bits.size, matrix)
    tiles = _tiles(rows, matrix, form)
    codes = np.zeros(rows * matrix.row_bytes(form), np.uint8)
    scales = np.empty(tiles, np.uint32)
    columns, tile_rows, tile_columns, words = _tile(matrix, form)
    every = np.ones(tiles, np.bool_)
    quantise_rows(
        np.ascontiguousarray(bits), rows, columns, tile_rows, tile_columns, every, _KINDS[form.element], form.powers,
        codes, scales, words,
    )  # fmt: skip
    return Band(codes, _stored_scales(scales, form))


def requantise(old: Bits, new: Bits, positions: Positions, band: Band, matrix: Matrix, form: Format) -> Band:
    """What `quantise(new)` gives, in time that grows with the number of changes.

    `old`, `new`: uint16, the bits of the band's rows. `positions`: where they differ. `band`: that of `old`, which does
    not change. A tile is computed in full only if its scale may have changed; else its changed elements alone are.
    """
    rows = _rows(new.size, matrix)
    assert old.size == new.size
    kind = _KINDS[form.element]
    columns, tile_rows, tile_columns, words = _tile(matrix, form)
    codes, scales = band.codes.copy(), _kernel_scales(band.scales, form)
    stale = np.zeros(_tiles(rows, matrix, form), np.bool_)
    old, new = np.ascontiguousarray(old), np.ascontiguousarray(new)
    mark_stale(old, new, positions, columns, tile_rows, tile_columns, kind, form.powers, scales, stale)
    code_elements(new, positions, columns, tile_rows, tile_columns, kind, scales, stale, codes)
    quantise_rows(new, rows, columns, tile_rows, tile_columns, stale, kind, form.powers, codes, scales, words)
    return Band(codes, _stored_scales(scales, form))


def dequantise(band: Band, matrix: Matrix, form: Format) -> NDArray[np.float32]:
    """What a band's codes stand for, flat: code value x scale in single precision, rounded to nearest."""
    rows = _rows(band.codes.size // matrix.row_bytes(form) * matrix.columns, matrix)
    values = np.empty(rows * matrix.columns, np.float32)
    columns, tile_rows, tile_columns, _ = _tile(matrix, form)
    scales = _kernel_scales(band.scales, form)
    dequantise_rows(
        np.ascontiguousarray(band.codes), rows, columns, tile_rows, tile_columns, _KINDS[form.element], scales, values
    )  # fmt: skip
    return values


def bf16_of(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bf16 bits of floats, rounded to nearest with ties to even; a NaN becomes 0x7FC0."""
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, np.uint16(0x7FC0), rounded)


def warm_up(form: Format) -> None:
    """Compile or load every kernel that a format needs, so that no later call waits for it."""
    matrix = Matrix(1, 1, 2)
    old, new = np.array([0x3F80, 0x3F00], np.uint16), np.array([0x3F80, 0x3F01], np.uint16)
    band: Any = requantise(old, new, np.array([1], np.uint32), quantise(old, matrix, form), matrix, form)
    dequantise(band, matrix, form)
