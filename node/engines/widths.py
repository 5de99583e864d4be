"""A checkpoint's bits as those of a live tensor of the same or another dtype, and back.

    the same dtype            the bits
    bf16 or f16 in f32        the float32 of equal value: exact, and the way back is checked
    any other pair of floats  rounded as `from_pretrained` does, which torch does; there is no way back

Bits are moved through integers and never computed with where that can be, so -0, NaN payloads and denormals arrive as
they were.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from node.models.dtypes import TORCH_DTYPES

__all__ = ["INTEGERS", "Width", "width_of"]

INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes an element: the type that a live tensor's bits are moved as."""

Bits = NDArray[Any]


class Width:
    """One pair of dtypes: in the checkpoint, and live. `exact`: the live bits say which the checkpoint's are."""

    def __init__(self, stored: str, live: torch.dtype) -> None:
        self.stored, self.live = TORCH_DTYPES[stored], live
        self.bits = np.dtype(f"u{self.stored.itemsize}")
        """The unsigned numpy type of one element's bits in the checkpoint."""
        self._back: Callable[[Bits], Bits] | None = None
        if self.stored == live:
            self._back = lambda wide: wide.view(self.bits)
        elif live == torch.float32 and self.stored == torch.bfloat16:
            self._back = _narrow_bf16
        elif live == torch.float32 and self.stored == torch.float16:
            self._back = _narrow_f16

    @property
    def exact(self) -> bool:
        return self._back is not None

    def convert(self, bits: Bits) -> torch.Tensor:
        """Checkpoint bits as integers of the live tensor's, copied, on the CPU. Raises `ValueError`."""
        if bits.dtype != self.bits:
            raise ValueError(f"bits: {bits.dtype} for a tensor of {self.bits}")
        if self.stored == self.live:
            return torch.from_numpy(np.array(bits).view(f"i{bits.itemsize}"))
        if self.exact:
            widen = _widen_bf16 if self.stored == torch.bfloat16 else _widen_f16
            return torch.from_numpy(widen(bits).view(np.int32))
        there = torch.from_numpy(np.array(bits).view(f"i{bits.itemsize}")).view(self.stored)
        return there.to(self.live).view(INTEGERS[self.live.itemsize])

    def back(self, live: torch.Tensor) -> Bits:
        """The checkpoint bits of live integers. Raises `ValueError` where they are of no value of the checkpoint's
        dtype, which cannot happen unless something computed on the parameter: it is how that would be found."""
        assert self._back is not None, "a rounded tensor has no way back"
        return self._back(live.cpu().numpy())


def width_of(stored: str, live: torch.dtype) -> Width | None:
    """None: no value of one dtype is put in the place of the other's."""
    kind = TORCH_DTYPES.get(stored)
    if kind is None or (kind != live and not (kind.is_floating_point and live.is_floating_point)):
        return None
    return Width(stored, live)


def _widen_bf16(bits: Bits) -> Bits:
    return bits.astype(np.uint32) << np.uint32(16)


def _narrow_bf16(wide: Bits) -> Bits:
    wide = wide.view(np.uint32)
    if (wide & np.uint32(0xFFFF)).any():
        raise ValueError("a live value has more bits than bf16")
    return (wide >> np.uint32(16)).astype(np.uint16)


def _widen_f16(bits: Bits) -> Bits:
    wide = bits.view(np.float16).astype(np.float32).view(np.uint32)
    nan = (bits & np.uint16(0x7FFF)) > 0x7C00  # whose payload the processor would change
    if nan.any():
        kept = bits[nan].astype(np.uint32)
        wide[nan] = ((kept & 0x8000) << 16) | 0x7F800000 | ((kept & 0x3FF) << 13)
    return wide


def _narrow_f16(wide: Bits) -> Bits:
    wide = wide.view(np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        bits = wide.view(np.float32).astype(np.float16).view(np.uint16)
    nan = (wide & np.uint32(0x7FFFFFFF)) > 0x7F800000
    if nan.any():
        kept = wide[nan]
        bits[nan] = (((kept >> 16) & 0x8000) | 0x7C00 | ((kept >> 13) & 0x3FF)).astype(np.uint16)
    if not np.array_equal(_widen_f16(bits), wide):
        raise ValueError("a live value has more bits than f16")
    return bits
