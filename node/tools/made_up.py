"""Made-up training steps: the bf16 bits of a matrix before and after one update of its fp32 masters.

Masters are normal with standard deviation 0.02 and rows scaled by exp(0.25 n), n normal. Updates are normal (the
stationary state of AR(1) momentum) with rows and columns scaled by exp(0.3 n). Only the mean size of an update is
fitted, to a density. The entropies of positions and differences by exponent and the share of one-unit steps were not
fitted; they are within 3 % of those of real steps.
"""

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits

__all__ = ["amplitude_of", "made_up_norm", "made_up_step"]

_MEAN_ABSOLUTE_NORMAL: Final = 0.798
"""Mean of |n| for a standard normal n."""
_ONE: Final = 0x3F80
"""1.0 in bf16."""


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even, as torch does."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def made_up_step(rows: int, columns: int, amplitude: float, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """The bits of a matrix, flat, before and after an update of mean size `amplitude`."""
    scale = np.exp(0.25 * rng.standard_normal((rows, 1), np.float32))
    master = rng.standard_normal((rows, columns), np.float32) * (np.float32(0.02) * scale)
    factor = np.exp(0.3 * rng.standard_normal((rows, 1), np.float32)) * np.exp(
        0.3 * rng.standard_normal((1, columns), np.float32)
    )
    factor *= np.float32(amplitude / _MEAN_ABSOLUTE_NORMAL) / factor.mean()
    before = _bf16(master.reshape(-1))
    factor *= rng.standard_normal((rows, columns), np.float32)
    return before, _bf16((master - factor).reshape(-1))


def made_up_norm(elements: int) -> Bits:
    """The weights of a norm. They are about 1.0, where a unit in the last place is 1/128: no such update moves them."""
    return np.full(elements, _ONE, np.uint16)


@cache
def amplitude_of(density: float) -> float:
    """The mean size of an update at which this share of elements changes."""
    low, high = 1e-10, 1e-2
    for _ in range(20):
        middle = (low * high) ** 0.5
        old, new = made_up_step(128, 4096, middle, np.random.default_rng(1))
        low, high = (middle, high) if np.mean(old != new) < density else (low, middle)
    return high
