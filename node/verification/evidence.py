"""An anytime-valid test over all checks of a node, with a null that is learned from honest traffic.

**The null.** A check yields a number (a slope, or the mean margin of some tokens). It is clipped to a range and scaled
to [0, 1]. The assumption is that an honest node's numbers then have, whatever came before, a mean of at most that of
the honest traffic of its pair of classes. `Null.learn` fixes the range by the first eighth of honest numbers, and
bounds the mean by the rest, so that the bound fails with probability `delta` at most (inverted betting: Waudby-Smith
and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024). Where honest numbers do not spread,
the range begins at their centre; clipping at any fixed point keeps a number in [0, 1].

**The bet.** For x in [0, 1] with conditional mean at most m, and 0 <= b < 1, the factor 1 + b (x - m) / m is not
negative and has mean at most 1. So the product over checks, and the average of such products over a grid of b with
fixed weights, and half of that plus 1/2, are test supermartingales. By Ville's inequality (1939) one ever reaches
1 / alpha with probability alpha at most. With a learned null an honest node is accused, in all its life, with
probability alpha + delta at most (union bound); `THRESHOLD` makes that 1e-6.

**Lying checkers.** Each checker of a node has a product of its own. The evidence is the sum of their logarithms without
the largest `dropped(m)` of m: half of them, and always two. If no more than that lie, at least s = m - dropped(m) are
honest, and the s smallest logarithms sum to at most s / h of the sum L over the h honest ones. So the evidence reaches
a positive threshold only where L does, and exp(L) is a supermartingale: two liars, or half of the checkers, cannot
raise the false accusations above the bound. The price is that fewer liars can shield a node: as many as leave an honest
product among the s smallest, which is none of three checkers, one of four, two of five. Evidence against the shielding
checker itself (`node.verification.opinions`) ends that. No penalty comes from fewer than `LEAST_CHECKERS` checkers.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "ALPHA",
    "DELTA",
    "LEAST_CHECKERS",
    "MOST_CHECKERS",
    "RANGE_SHARE",
    "THRESHOLD",
    "Bets",
    "Evidence",
    "Null",
    "dropped",
    "scaled",
    "trimmed",
    "upper_mean",
]

ALPHA: Final = 1e-6
"""The bound for an honest node to be accused, over its whole life."""
DELTA: Final = 1e-7
"""The part of `ALPHA` that is spent on learning all nulls of a node; with k nulls, each is learned at `DELTA` / k."""
THRESHOLD: Final = math.log(1.0 / (ALPHA - DELTA))
"""Evidence (a natural logarithm) at which a node is quarantined: a factor of 1.1 million."""
LEAST_CHECKERS: Final = 3
MOST_CHECKERS: Final = 64
"""Checkers whose products are kept for one node and one kind of test. Beyond it the largest product goes: that never
raises evidence above 0."""
FRACTIONS: Final = np.array([0.9, 0.5, 0.2, 0.06])
"""The grid of bets, as shares of the largest."""
WEIGHTS: Final = np.array([0.5, 1 / 6, 1 / 6, 1 / 6])
"""Of the bets: what a bet does not have costs every checker's product a part of its start (ln 2 or ln 6)."""
RANGE_SHARE: Final = 1 / 8
"""Of the honest numbers, those that fix the range."""


@dataclass(frozen=True, slots=True)
class Null:
    """What an honest node's numbers are like: clipped to [low, high] and scaled to [0, 1], their mean is at most
    `mean`."""

    low: float
    high: float
    mean: float

    def __post_init__(self) -> None:
        if not self.low < self.high or not 0.0 < self.mean <= 1.0:
            raise ValueError("null: an empty range, or a mean outside (0, 1]")

    @classmethod
    def learn(cls, honest: ArrayLike, reach: float, delta: float = DELTA) -> "Null":
        """From numbers of honest nodes of one pair of classes. `reach`: how far above the centre an attack lies (1 for
        slopes). Raises `ValueError` for fewer than 16 numbers, or one that is not finite."""
        values = np.asarray(honest, np.float64)
        if len(values) < 16 or not np.isfinite(values).all():
            raise ValueError("null: at least 16 numbers, all of them finite")
        cut = max(8, int(len(values) * RANGE_SHARE))
        return cls.fitted(values[:cut], values[cut:], reach, delta)

    @classmethod
    def fitted(cls, first: NDArray[np.float64], rest: NDArray[np.float64], reach: float, delta: float) -> "Null":
        """The range by `first`, and the mean by the `rest`."""
        centre = float(np.median(first))
        spread = 1.4826 * float(np.median(np.abs(first - centre)))
        low, high = centre - 2.0 * spread, centre + max(reach, 2.0 * spread)
        return cls(low, high, upper_mean(scaled(rest, low, high), delta))

    def scale(self, value: ArrayLike) -> NDArray[np.float64]:
        """Numbers of checks in [0, 1]; those that are not numbers count as the mean, which changes no evidence much."""
        found = scaled(value, self.low, self.high)
        return np.where(np.isnan(found), self.mean, found)


def scaled(value: ArrayLike, low: float, high: float) -> NDArray[np.float64]:
    """Numbers clipped to [low, high], as shares of that range."""
    return (np.clip(np.asarray(value, np.float64), low, high) - low) / (high - low)


def upper_mean(x: NDArray[np.float64], delta: float) -> float:
    """A bound on the mean of numbers in [0, 1] that is too small with probability `delta` at most.

    The smallest m (by bisection: the wealth grows with m) at which bets against "the mean is m or more" win 1 / delta.
    """
    wanted, low, high = math.log(1.0 / delta), float(x.mean()), 1.0 - 1e-9
    if low >= high:
        return 1.0
    for _ in range(50):
        middle = (low + high) / 2
        logs = np.log1p(FRACTIONS[:, None] * (middle - x) / (1.0 - middle)).sum(1)
        won = float(np.logaddexp.reduce(logs + np.log(WEIGHTS))) >= wanted
        low, high = (low, middle) if won else (middle, high)
    return high


class Bets:
    """The products of one checker's numbers about one node, or of many such pairs at once (`shape`)."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self._logs = np.zeros((*shape, len(FRACTIONS)))

    def add(self, null: Null, value: ArrayLike) -> None:
        """One more number: a scalar, or an array of `shape`. The null may be another one each time, as long as it does
        not depend on this number."""
        gain = (null.scale(value) - null.mean) / null.mean
        self._logs += np.log1p(FRACTIONS * gain[..., None])

    @property
    def log_wealth(self) -> NDArray[np.float64]:
        """Natural logarithm of (1 + the weighted average product) / 2."""
        average = np.logaddexp.reduce(self._logs + np.log(WEIGHTS), axis=-1)
        return np.logaddexp(average, 0.0) - math.log(2.0)

    @property
    def saved(self) -> list[float]:
        """The logarithms of one checker's products, for a file."""
        return self._logs.tolist()

    @classmethod
    def restored(cls, saved: list[float]) -> "Bets":
        """The inverse of `saved`. Raises `ValueError` when it was saved with another grid."""
        if len(saved) != len(FRACTIONS) or not np.isfinite(saved).all():
            raise ValueError("bets: other fractions than these were saved")
        bets = cls()
        bets._logs[:] = saved
        return bets


@dataclass(slots=True)
class Evidence:
    """All that is held against one node, by checker. One object for each kind of test."""

    checkers: dict[bytes, Bets] = field(default_factory=dict)

    def add(self, checker: bytes, null: Null, value: float | None) -> None:
        """The number that `checker` found. None (it could not tell) changes nothing: a lost checker costs only time."""
        if value is None:
            return
        self.checkers.setdefault(checker, Bets()).add(null, value)
        if len(self.checkers) > MOST_CHECKERS:
            del self.checkers[max(self.checkers, key=lambda other: float(self.checkers[other].log_wealth))]

    @property
    def log(self) -> float:
        """The evidence, a natural logarithm; 0 while fewer than `LEAST_CHECKERS` have answered."""
        return trimmed(float(bets.log_wealth) for bets in self.checkers.values())

    @property
    def proven(self) -> bool:
        """Whether the node is to be quarantined, if this is the only test of it."""
        return self.log >= THRESHOLD


def dropped(checkers: int) -> int:
    """How many of a node's checkers may lie without harming it: half of them, and always two."""
    return max(LEAST_CHECKERS - 1, checkers // 2)


def trimmed(logs: Iterable[float]) -> float:
    """The sum without the largest `dropped(m)` of m; 0 for fewer than `LEAST_CHECKERS`."""
    ordered = sorted(logs)
    return sum(ordered[: max(0, len(ordered) - dropped(len(ordered)))], 0.0)
