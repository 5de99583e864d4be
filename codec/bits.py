"""What a number looks like as bits: the dtypes of safetensors, and the order in which floats stand on the number line.

The codec never computes with weights. It sees each as an unsigned integer of the same width, so that -0, denormals and
every NaN survive. The *ordinal* of a float is its place on the line, -0 just below +0: one step of the ordinal is one
unit in the last place, across exponents and through zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["DTYPES", "Bits", "DType", "from_ordinal", "ordinal"]

Bits = NDArray[np.unsignedinteger[Any]]
"""Weights as flat unsigned integers: uint8, uint16, uint32 or uint64."""


@dataclass(frozen=True, slots=True)
class DType:
    """One element type of safetensors.

    `exponent_shift`, `exponent_mask`: `(bits >> shift) & mask` is the biased exponent; None where there is none, and
    for 64-bit floats, which no policy ships in bulk.
    """

    name: str
    itemsize: int
    exponent_shift: int | None = None
    exponent_mask: int | None = None
    is_float: bool = False

    @property
    def bits(self) -> np.dtype[Any]:
        """The numpy unsigned integer type of the same width, little endian as in the file."""
        return np.dtype(f"<u{self.itemsize}")

    @property
    def width(self) -> int:
        """Bits in an element."""
        return 8 * self.itemsize


_TABLE = (
    DType("BF16", 2, 7, 0xFF, True),
    DType("F16", 2, 10, 0x1F, True),
    DType("F32", 4, 23, 0xFF, True),
    DType("F64", 8, None, None, True),
    DType("F8_E4M3", 1, 3, 0x0F, True),
    DType("F8_E5M2", 1, 2, 0x1F, True),
    DType("F8_E8M0", 1),
    DType("C64", 8),
    DType("I8", 1),
    DType("U8", 1),
    DType("I16", 2),
    DType("U16", 2),
    DType("I32", 4),
    DType("U32", 4),
    DType("I64", 8),
    DType("U64", 8),
    DType("BOOL", 1),
)

DTYPES: Final[Mapping[str, DType]] = MappingProxyType({dtype.name: dtype for dtype in _TABLE})
"""Every dtype that a layout may name, by its name in safetensors."""


def ordinal(bits: Bits, dtype: DType) -> Bits:
    """The place of each element on the number line, as an unsigned integer of the same width (two's complement).

    A negative float's magnitude bits are flipped, so that -0 is -1 and the order is total: a bijection on all patterns.
    Integers are their own ordinals.
    """
    if not dtype.is_float:
        return bits.copy()
    flip = dtype.bits.type((1 << (dtype.width - 1)) - 1)
    sign = bits >> dtype.bits.type(dtype.width - 1)
    return bits ^ (sign * flip)


def from_ordinal(ordinals: Bits, dtype: DType) -> Bits:
    """The bits whose ordinal this is. The map is its own inverse: flipping keeps the sign bit."""
    return ordinal(ordinals, dtype)
