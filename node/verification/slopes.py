"""The version test: were these log-probabilities computed by this version, or by another one that is known?

With the claims c, the checker's log-probabilities s under the claimed version and a under the alternative,

    slope = sum((c - s) (a - s)) / sum((a - s)^2)

is the least-squares coefficient of the claim on the step between the two: 0 for an honest node and 1 for one that used
the alternative, whatever the size of the rounding. Where the rounding of the two classes is correlated with the step,
the honest slope is above 0 (.28 and .46 were measured), so it is compared with what honest nodes have, not with 0.

Any alternative that the checker can load may be tested: the version before, the base, the version in fp8 or int4.
"""

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["LEAST_STEP", "WORST", "slope"]

LEAST_STEP: Final = 1e-12
"""Nats^2 per token. A step smaller than this (the mean square) cannot be told from none in float32."""
WORST: Final = 10.0
"""Nats. One token differs by at most this much."""


def slope(claimed: ArrayLike, scored: ArrayLike, alternative: ArrayLike) -> float | None:
    """The slope of some tokens, nats each, or None where nothing can be said: no step, or a checker's score that is not
    a number.

    A claim that is not a number counts as `WORST` nats in the direction of the alternative: an honest node sends none.
    Raises `ValueError` when the lengths differ.
    """
    c, s, a = (np.asarray(values, np.float64) for values in (claimed, scored, alternative))
    if not c.shape == s.shape == a.shape:
        raise ValueError(f"slope: {c.size}, {s.size} and {a.size} tokens")
    seen = np.isfinite(s) & np.isfinite(a)
    if not seen.any():
        return None
    step = np.clip(a[seen] - s[seen], -WORST, WORST)
    size = float(step @ step)
    if size <= LEAST_STEP * len(step):
        return None
    moved = c[seen] - s[seen]
    moved = np.where(np.isfinite(moved), np.clip(moved, -WORST, WORST), WORST * np.sign(step))
    return float(moved @ step) / size
