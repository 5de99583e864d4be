"""The numbers that one check yields: of an author's claims against a checker, and of one checker against another.

A checker scores the tokens of a rollout under the claimed version and, where it can, under the version before, and
computes the margins of portable draws. It is never shown what the author claims. So the author's claims and other
checkers' scores are compared with it in the same way, and a checker that lies is found like an author that does: its
scores disagree with those of the others. Whom to believe is decided in `node.verification.evidence`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from node.verification.draws import MOST_MARGIN
from node.verification.slopes import LEAST_STEP, WORST, slope

__all__ = [
    "AT_ONCE",
    "AT_ONCE_TOKENS",
    "BY_REPLAY",
    "OF_AUTHORS",
    "REACH",
    "TOKEN_AT_ONCE",
    "Kind",
    "Opinion",
    "author_numbers",
    "checker_numbers",
    "difference",
    "worst_token",
]

AT_ONCE: Final = 0.25
"""Nats per token. Rounding by e loses 2 e at most, so an honest node's margins have this mean only if each of its
log-probabilities is off by an eighth; a text drawn by other noise has a mean of half a nat or more."""
AT_ONCE_TOKENS: Final = 32
"""Fewer tokens prove nothing at once."""
TOKEN_AT_ONCE: Final = 1.0
"""Nats by which one token of a replay is off. In its class an honest node is off by 0, and weights one step older move
its tokens by some hundredths. Another text, noise, or distribution moves one of them by more than this soon."""
SCORE_SLACK: Final = 1e-3
"""Rounding may make a log-probability exceed 0 by this much."""

Floats = NDArray[np.float64]


class Kind(StrEnum):
    """What a number is about: an author's claims, or a checker's opinions."""

    STALE = "stale"
    """The slope towards the version before (`node.verification.slopes`)."""
    DRAWN = "drawn"
    """The sum of the margins of portable draws (`node.verification.draws`)."""
    CLAIMS = "claims"
    """The mean difference between claimed log-probabilities and scores, in nats."""
    SCORES = "scores"
    """The mean difference between two checkers' scores and margins, in nats."""
    STEPS = "steps"
    """The difference between two checkers' scores of both versions, relative to the step between the versions."""
    UNLIKE = "unlike"
    """Whether the claims differ from a replay, in one bit or by a token that loses (`node.verification.replays`)."""
    APART = "apart"
    """Whether a checker's replay differs from those of the rest of its panel."""


OF_AUTHORS: Final = (Kind.STALE, Kind.DRAWN, Kind.CLAIMS, Kind.UNLIKE)
BY_REPLAY: Final = (Kind.UNLIKE, Kind.APART)
"""Mismatches: counted by `node.verification.mismatches`, without a null."""
REACH: Final = {Kind.STALE: 0.5, Kind.DRAWN: 0.5, Kind.CLAIMS: 0.1, Kind.SCORES: 0.1, Kind.STEPS: 0.5}
"""How far above an honest node's numbers those of a liar are expected: what is further away counts no more."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one checker computed for some tokens, one number each. Raises `ValueError` for impossible numbers."""

    scores: Floats
    previous: Floats | None = None
    """None: the checker no longer has the version before."""
    margins: Floats | None = None
    """None: the tokens were not drawn by portable noise."""

    @classmethod
    def of(cls, tokens: int, scores: ArrayLike, previous: ArrayLike = (), margins: ArrayLike = ()) -> "Opinion":
        """An opinion on `tokens` tokens. Empty `previous` and `margins`: not available. Raises `ValueError` unless
        there is one finite, possible number for each token."""
        found = [np.asarray(values, np.float64) for values in (scores, previous, margins)]
        if found[0].shape != (tokens,) or any(values.shape not in ((0,), (tokens,)) for values in found[1:]):
            raise ValueError("opinion: not one number for each token")
        if not all(np.isfinite(values).all() for values in found):
            raise ValueError("opinion: a number that is not finite")
        if any((values > SCORE_SLACK).any() for values in found[:2]):
            raise ValueError("opinion: a probability above 1")
        if ((found[2] < 0.0) | (found[2] > MOST_MARGIN)).any():
            raise ValueError(f"opinion: a margin outside 0 to {MOST_MARGIN:g}")
        return cls(found[0], found[1] if found[1].size else None, found[2] if found[2].size else None)

    @property
    def mean_margin(self) -> float:
        """Nats per token; 0 where there are no margins."""
        return 0.0 if self.margins is None else float(self.margins.mean())


def worst_token(claimed: ArrayLike, opinion: Opinion) -> float:
    """The most by which one claim is off, or one token loses its draw, in nats."""
    off = float(np.abs(np.asarray(claimed, np.float64) - opinion.scores).max())
    return max(off, 0.0 if opinion.margins is None else float(opinion.margins.max()))


def difference(a: Floats, b: Floats) -> float:
    """The mean absolute difference, each at most `WORST`; a value of `a` that is not a number counts as that."""
    return float(np.minimum(np.nan_to_num(np.abs(a - b), nan=WORST, posinf=WORST), WORST).mean())


def _cooled(temperature: float) -> float:
    """A temperature below 1 magnifies the rounding of logits by its inverse."""
    return temperature if 0.0 < temperature < 1.0 else 1.0


def author_numbers(claimed: ArrayLike, opinion: Opinion, temperature: float = 1.0) -> dict[Kind, float]:
    """What `opinion` says of an author's claimed log-probabilities, by kind; larger is worse."""
    claims = np.asarray(claimed, np.float64)
    found = {Kind.CLAIMS: difference(claims, opinion.scores) * _cooled(temperature)}
    if opinion.previous is not None and (stale := slope(claims, opinion.scores, opinion.previous)) is not None:
        found[Kind.STALE] = stale
    if opinion.margins is not None:
        found[Kind.DRAWN] = float(opinion.margins.sum())
    return found


def checker_numbers(theirs: Opinion, ours: Opinion, temperature: float = 1.0) -> dict[Kind, float]:
    """What the opinion `ours` says of the opinion `theirs` on the same tokens, by kind; larger is worse."""
    off = difference(theirs.scores, ours.scores)
    if ours.margins is not None:
        off += WORST if theirs.margins is None else difference(theirs.margins, ours.margins)
    found = {Kind.SCORES: off * _cooled(temperature)}
    if ours.previous is not None and theirs.previous is not None:
        step = float(np.square(ours.previous - ours.scores).sum())
        if step > LEAST_STEP * len(ours.scores):
            parts = (theirs.scores - ours.scores, theirs.previous - ours.previous)
            moved = sum(float(np.square(np.clip(part, -WORST, WORST)).sum()) for part in parts)
            found[Kind.STEPS] = (moved / step) ** 0.5
    return found
