"""Converts a checkpoint's bits to those of a live tensor, which may have another dtype, and back.

    the same dtype            the same bits
    bf16 or f16 to f32        the float32 of equal value: exact, and the way back is checked
    any other pair of floats  rounded by torch, as `from_pretrained` does; there is no way back

Wherever possible the bits are moved as integers, so -0, NaN payloads and denormals are preserved.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from node.models.dtypes import TORCH_DTYPES

__all__ = ["INTEGERS", "Width", "width_of"]

INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes an element: the integer type that a live tensor's bits are moved as."""

Bits = NDArray[Any]


class Width:
    """A pair of dtypes, of a tensor in the checkpoint and of the live tensor. Make one with `width_of`."""

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
        """The checkpoint's bits can be read back from the live ones."""
        return self._back is not None

    def convert(self, bits: Bits) -> torch.Tensor:
        """The live tensor's bits for the checkpoint's `bits`: integers as wide as the live dtype, copied, on the CPU.

        Raises `ValueError` when `bits` are not of the checkpoint's width.
        """
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
        """The checkpoint's bits for `live`, the live tensor's bits as integers. Only where `exact`.

        Raises `ValueError` for a value that the checkpoint's dtype does not have: something computed on the parameter.
        """
        assert self._back is not None, "a rounded tensor has no way back"
        return self._back(live.cpu().numpy())


def width_of(stored: str, live: torch.dtype) -> Width | None:
    """The pair of `stored` (a safetensors name) and `live`; None when values of one are never stored as the other."""
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
    nan = (bits & np.uint16(0x7FFF)) > 0x7C00  # the processor would change their payload
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
