"""The numbers that a check of one sample may yield, each a statistic of its tokens. Larger is worse.

`slope`, `claims` and `margins` are the product's. `nearer`, `unlike` and `unreplayed` are measured beside them:

- `nearer` is the slope of absolute values: sum(|c - s| - |c - a|) / sum(|a - s|), with claims c, scores s under the
  claimed version and a under the alternative. By the triangle inequality it lies in [-1, 1]: -1 for an exact honest
  claim, 1 for an exact claim of the alternative, whatever a single token does.
- `unlike` is the share of tokens whose claim is not the replayed score, bit for bit. An honest node of the checker's
  class has 0, whatever its dtype; in bf16 any other weights have nearly 1, because rounding amplifies every difference.
- `unreplayed` is 1 where one token of the sample is unlike, or is not the winner of the leased noise, and 0 otherwise.

A number needs no model of the noise to be valid: `node.verification.evidence.Null` learns from honest traffic of the
same pair of classes what it is bounded by, and the evidence is a test supermartingale for every clipped number whose
conditional mean is at most the learned bound.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from node.verification import slopes

__all__ = ["NUMBERS", "Number", "nearer", "per_sample", "unlike", "unreplayed"]

Floats = NDArray[np.float64]


def nearer(claimed: Floats, scored: Floats, alternative: Floats) -> float | None:
    """See the module. None when there is no step between the versions."""
    step = np.abs(alternative - scored)
    size = float(step.sum())
    if size <= slopes.LEAST_STEP**0.5 * len(step):
        return None
    return float((np.abs(claimed - scored) - np.abs(claimed - alternative)).sum()) / size


def unlike(claimed: Floats, replayed: Floats) -> float:
    """The share of tokens whose claim is not the replayed score, bit for bit."""
    return float(np.mean(claimed != replayed))


def unreplayed(claimed: Floats, replayed: Floats, margins: Floats) -> float:
    """1.0 where a claim is not the replayed score, or a token is not the winner of the leased noise; else 0.0."""
    return float(bool((claimed != replayed).any() or (margins > 0.0).any()))


class Number(NamedTuple):
    """`reach`: how far above an honest node's numbers an attack lies. `kinds`: the columns that it needs besides the
    claims. `of`: called with the claims and these."""

    reach: float
    kinds: tuple[str, ...]
    of: Callable[..., float | None]


def _claims(claimed: Floats, scored: Floats) -> float:
    return float(np.minimum(np.abs(claimed - scored), slopes.WORST).mean())


NUMBERS: Final[Mapping[str, Number]] = {
    "slope": Number(1.0, ("score_{}_v", "score_{}_prev"), slopes.slope),
    "nearer": Number(1.0, ("score_{}_v", "score_{}_prev"), nearer),
    "claims": Number(0.1, ("score_{}_v",), _claims),
    "unlike": Number(1.0, ("score_{}_v",), unlike),
    "unreplayed": Number(1.0, ("score_{}_v", "margin_{}_v"), unreplayed),
    "margins": Number(4.0, ("margin_{}_v",), lambda claimed, margins: float(margins.sum())),
}


def per_sample(name: str, checker: str, ends: NDArray[np.int64], columns: Mapping[str, Floats]) -> Floats | None:
    """The number of each sample, or None when the record lacks its columns. `checker`: the suffix of its columns.

    A sample of which nothing can be said has NaN.
    """
    number = NUMBERS[name]
    needed = [kind.format(checker) for kind in number.kinds]
    if not set(needed) <= set(columns):
        return None
    parts = [np.split(columns[column], ends[:-1]) for column in ("claim", *needed)]
    found = [number.of(*sample) for sample in zip(*parts, strict=True)]
    return np.array([np.nan if value is None else value for value in found])
