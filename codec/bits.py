"""The dtypes of safetensors, and the order of their bit patterns on the number line.

The codec never computes with weights. It sees each as an unsigned integer of the same width, so that -0, denormals and
every NaN survive. The *ordinal* of a float is its rank on the number line, with -0 just below +0. One step of the
ordinal is one unit in the last place, also across exponents and through zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bits = NDArray[np.unsignedinteger[Any]]
    """Weights as flat unsigned integers: uint8, uint16, uint32 or uint64."""

__all__ = ["DTYPES", "Bits", "DType", "ordinal"]


def __getattr__(name: str) -> Any:
    """`Bits` at run time. A relay, which has no weights, imports this module and never numpy: 6 MB of memory."""
    if name != "Bits":
        raise AttributeError(f"module 'codec.bits' has no attribute {name!r}")
    import numpy as np
    from numpy.typing import NDArray

    return NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type of safetensors.

    `exponent_shift`, `exponent_mask`: `(bits >> shift) & mask` is the biased exponent. Both are None for types
    without an exponent, and for F64: policies hold few 64-bit floats, so the coders do not use their exponents.
    """

    name: str
    itemsize: int
    exponent_shift: int | None = None
    exponent_mask: int | None = None
    is_float: bool = False

    @property
    def bits(self) -> "np.dtype[Any]":
        """The numpy unsigned integer type of the same width, little endian as in the file."""
        import numpy as np

        return np.dtype(f"<u{self.itemsize}")

    @property
    def width(self) -> int:
        """Bits per element."""
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


def ordinal(bits: "Bits", dtype: DType) -> "Bits":
    """The rank of each element on the number line, as an unsigned integer of the same width (two's complement).

    The magnitude bits of a negative float are flipped, so that -0 becomes -1 and the order is total. The map is a
    bijection on all bit patterns. An integer is its own ordinal.
    """
    if not dtype.is_float:
        return bits.copy()
    flip = dtype.bits.type((1 << (dtype.width - 1)) - 1)
    sign = bits >> dtype.bits.type(dtype.width - 1)
    return bits ^ (sign * flip)
