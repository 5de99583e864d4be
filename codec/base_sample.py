"""A sample of a base's weights, by which the trainer of an adapter finds out that it has adapted another base.

The sample has up to 64 values of each of up to 16 linear layers, spread evenly, and of each value its sign and exponent
as a float32, 9 bits. Those of two versions of one model hardly differ, however it is stored: a training step changes a
value's exponent rarely, and so does rounding to another float type. Of unrelated models, fewer than one in five agree:
the signs in half of the cases, the exponents of normally distributed values in about a quarter.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from codec.adapter import linear_layers
from codec.bits import Bits
from codec.layout import Layout

__all__ = ["agreement", "sample_base", "sample_places", "sampled_layers"]

_LAYERS: Final = 16
_VALUES: Final = 64
_FLOATS: Final = frozenset({"BF16", "F16", "F32"})
_MANTISSA_BITS: Final = 23
"""Of a float32."""


def sampled_layers(base: Layout) -> tuple[str, ...]:
    """The names of the sampled linear layers, without `.weight`."""
    layers = [name for name in linear_layers(base) if base.tensor(f"{name}.weight").dtype in _FLOATS]
    return tuple(layers[i * len(layers) // _LAYERS] for i in range(_LAYERS)) if len(layers) > _LAYERS else tuple(layers)


def sample_places(elements: int) -> NDArray[np.int64]:
    """The places of the sampled values in a flat tensor of `elements` (at least 1) values: int64, (up to 64,)."""
    count = min(_VALUES, elements)
    return np.arange(count, dtype=np.int64) * elements // count


def sample_base(base: Layout, bits: Callable[[str], Bits]) -> bytes:
    """The sample of the base whose tensors, flat and as unsigned integers, `bits(name)` gives: uint16, little endian,
    the values of one sampled layer after those of the other."""
    found = []
    for layer in sampled_layers(base):
        spec = base.tensor(f"{layer}.weight")
        found.append(_scales(_floats(bits(spec.name)[sample_places(spec.elements)], spec.dtype)))
    return b"".join(found_of.astype("<u2").tobytes() for found_of in found)


def agreement(sample: bytes, base: Layout, values: Callable[[str], NDArray[np.float32] | None]) -> tuple[int, int]:
    """(values compared, values whose sign and exponent agree) of a sample and another copy of the base.

    `values(layer)`: float32, the other copy's values at `sample_places`; None: it does not have this layer.
    """
    compared = agree = at = 0
    scales = np.frombuffer(sample, "<u2")
    for layer in sampled_layers(base):
        count = sample_places(base.tensor(f"{layer}.weight").elements).size
        own, at = scales[at : at + count], at + count
        if (found := values(layer)) is not None and found.size == own.size:
            compared += own.size
            agree += int((_scales(found) == own).sum())
    return compared, agree


def _floats(bits: Bits, dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def _scales(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Sign and exponent of each value."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> _MANTISSA_BITS).astype(np.uint16)
