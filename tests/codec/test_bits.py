"""Dtypes, and the ordinals of floats: a bijection on all patterns, in the order in which numpy sorts floats."""

import numpy as np
import pytest

from codec.bits import DTYPES, ordinal


@pytest.mark.parametrize("name", ["BF16", "F16", "I16", "U16", "F8_E4M3", "F8_E5M2", "I8", "BOOL"])
def test_every_pattern_has_an_ordinal_of_its_own(name: str) -> None:
    dtype = DTYPES[name]
    patterns = np.arange(1 << dtype.width).astype(dtype.bits)
    assert np.unique(ordinal(patterns, dtype)).size == patterns.size


def test_ordinals_are_in_the_order_of_the_numbers() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    values = patterns.view(np.float16)
    finite = patterns[np.isfinite(values)]
    places = ordinal(finite, DTYPES["F16"]).view(np.int16)
    assert np.all(np.diff(finite[np.argsort(places)].view(np.float16)) >= 0)


@pytest.mark.parametrize(("name", "zero", "below"), [("BF16", 0, 0x8000), ("F32", 0, 1 << 31), ("F64", 0, 1 << 63)])
def test_minus_zero_is_one_below_zero(name: str, zero: int, below: int) -> None:
    dtype = DTYPES[name]
    places = ordinal(np.array([zero, below], dtype.bits), dtype).view(f"i{dtype.itemsize}")
    assert places.tolist() == [0, -1]


def test_one_step_is_one_unit_in_the_last_place_across_exponents() -> None:
    values = np.array([0x3F7F, 0x3F80, 0x3F81], np.uint16)  # just below 1, 1, just above
    assert np.diff(ordinal(values, DTYPES["BF16"])).tolist() == [1, 1]


@pytest.mark.parametrize("name", list(DTYPES))
def test_table(name: str) -> None:
    dtype = DTYPES[name]
    assert dtype.bits.itemsize == dtype.itemsize == dtype.width // 8
    if dtype.exponent_mask:
        assert dtype.exponent_shift is not None
        assert dtype.exponent_mask << dtype.exponent_shift < 1 << (dtype.width - 1)  # the sign bit is above it
