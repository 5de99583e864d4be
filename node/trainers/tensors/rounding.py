"""A checkpoint's bits in another dtype, as torch's `.to()` makes them: without torch, for files that are published."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec.errors import UsageError

__all__ = ["bring", "can_bring"]

Bits = NDArray[Any]

_NAN_BF16: Final = 0x7FC0
"""What torch makes of any NaN when it rounds to bfloat16, whatever its sign and payload."""


def can_bring(found: str, wanted: str) -> bool:
    """Whether bits of one dtype are published in the other: masters are rounded, halves widened."""
    return found == wanted or (found, wanted) in _WAYS


def bring(name: str, bits: Bits, found: str, wanted: str) -> Bits:
    """`bits` (unsigned integers, flat) as those of `wanted`. Raises `UsageError` for what overflows, `KeyError` for
    dtypes that `can_bring` denies."""
    made = bits if found == wanted else _WAYS[found, wanted](bits)
    if (found, wanted) == ("F32", "F16") and (
        np.isinf(made.view(np.float16)) & np.isfinite(bits.view(np.float32))
    ).any():
        raise UsageError(f"{name} has values beyond float16's 65,504: start the swarm from a bfloat16 base.")
    return made


def _to_bf16(bits: Bits) -> Bits:
    """To nearest, ties to even."""
    made = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF)).astype(np.uint32)) >> 16).astype(np.uint16)
    made[(bits & np.uint32(0x7FFFFFFF)) > 0x7F800000] = _NAN_BF16
    return made


def _to_f16(bits: Bits) -> Bits:
    with np.errstate(over="ignore", invalid="ignore"):
        return bits.view(np.float32).astype(np.float16).view(np.uint16)


def _from_bf16(bits: Bits) -> Bits:
    return bits.astype(np.uint32) << np.uint32(16)


def _from_f16(bits: Bits) -> Bits:
    return bits.view(np.float16).astype(np.float32).view(np.uint32)


_WAYS: Final[dict[tuple[str, str], Callable[[Bits], Bits]]] = {
    ("F32", "BF16"): _to_bf16,
    ("F32", "F16"): _to_f16,
    ("BF16", "F32"): _from_bf16,
    ("F16", "F32"): _from_f16,
}
"""The same pairs as `node.trainers.tensors.weights` takes."""
