"""Converts a checkpoint's bits to another dtype, as torch's `.to()` does, but without torch: for published files."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec.errors import UsageError

__all__ = ["bring", "can_bring"]

Bits = NDArray[Any]

_NAN_BF16: Final = 0x7FC0
"""The NaN that torch gives for every NaN when it rounds to bfloat16, whatever its sign and payload."""


def can_bring(found: str, wanted: str) -> bool:
    """Whether bits of dtype `found` can be published as `wanted` (names as in safetensors): float32 masters are
    rounded, half precision is widened."""
    return found == wanted or (found, wanted) in _CONVERT


def bring(name: str, bits: Bits, found: str, wanted: str) -> Bits:
    """`bits` (unsigned integers, flat), converted from dtype `found` to `wanted`. `name`: the tensor's, for the error.

    Raises `UsageError` for values that float16 cannot hold, `KeyError` for dtypes that `can_bring` denies.
    """
    converted = bits if found == wanted else _CONVERT[found, wanted](bits)
    if (found, wanted) == ("F32", "F16") and (
        np.isinf(converted.view(np.float16)) & np.isfinite(bits.view(np.float32))
    ).any():
        raise UsageError(f"{name} has values beyond float16's 65,504: start the swarm from a bfloat16 base.")
    return converted


def _to_bf16(bits: Bits) -> Bits:
    """Round to nearest, ties to even."""
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF)).astype(np.uint32)) >> 16).astype(np.uint16)
    rounded[(bits & np.uint32(0x7FFFFFFF)) > 0x7F800000] = _NAN_BF16
    return rounded


def _to_f16(bits: Bits) -> Bits:
    with np.errstate(over="ignore", invalid="ignore"):
        return bits.view(np.float32).astype(np.float16).view(np.uint16)


def _from_bf16(bits: Bits) -> Bits:
    return bits.astype(np.uint32) << np.uint32(16)


def _from_f16(bits: Bits) -> Bits:
    return bits.view(np.float16).astype(np.float32).view(np.uint32)


_CONVERT: Final[dict[tuple[str, str], Callable[[Bits], Bits]]] = {
    ("F32", "BF16"): _to_bf16,
    ("F32", "F16"): _to_f16,
    ("BF16", "F32"): _from_bf16,
    ("F16", "F32"): _from_f16,
}
"""(from, to) -> conversion. The same pairs as `node.trainers.tensors.weights` accepts."""
