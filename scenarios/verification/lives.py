"""Lives of nodes, many at once, by the product's rules.

`Lives` computes for many nodes what `node.verification.evidence.Evidence` computes for one, and `ReplayLives` what
`node.verification.mismatches.Tally` does; tests compare them. `scenarios.verification.simulate` draws the lives.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from node.verification.evidence import LEAST_CHECKERS, THRESHOLD, Bets, Null, trimmed
from node.verification.mismatches import GRID, RATE_WEIGHTS, RATES, SAME_CLASS, SHARE_WEIGHTS, SHARES
from node.verification.opinions import Kind

__all__ = ["NEEDED", "Lives", "ReplayLives", "gains_of"]

NEEDED: Final = THRESHOLD + math.log(len(Kind))
"""The evidence of one kind, a natural logarithm, at which a node is quarantined against which there is no other."""

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


class Lives:
    """The evidence against many nodes by one kind of number, found by `checkers` honest checkers in turn."""

    def __init__(self, lives: int, checkers: int = LEAST_CHECKERS) -> None:
        self._bets = [Bets((lives,)) for _ in range(checkers)]
        self._logs = np.zeros((checkers, lives))
        self._kept = round(trimmed([1.0] * checkers))
        """How many of the checkers' logarithms count: the smallest ones."""
        self._checks = 0

    def add(self, null: Null, numbers: Floats) -> None:
        """One more check of each node."""
        turn = self._checks % len(self._bets)
        self._bets[turn].add(null, numbers)
        self._end_check(turn)

    def add_drawn(self, gains: Floats, drawn: Counts) -> None:
        """As `add`, with numbers whose `gains` are known: node i's number is number `drawn[i]` of them."""
        turn = self._checks % len(self._bets)
        self._bets[turn]._logs += gains[drawn]
        self._end_check(turn)

    def _end_check(self, turn: int) -> None:
        self._logs[turn] = self._bets[turn].log_wealth
        self._checks += 1

    @property
    def log(self) -> Floats:
        """The evidence against each node: a natural logarithm. 0 until `LEAST_CHECKERS` have answered."""
        if min(self._checks, len(self._bets)) < LEAST_CHECKERS:
            return np.zeros(self._logs.shape[1])
        return np.partition(self._logs, self._kept - 1, axis=0)[: self._kept].sum(0)


def gains_of(null: Null, numbers: Floats) -> Floats:
    """What each number adds to the logarithms of the products: (numbers, bets)."""
    bets = Bets(numbers.shape)
    bets.add(null, numbers)
    return bets._logs


class ReplayLives:
    """The evidence against many nodes by mismatches of their replays.

    It rises with a mismatch only, so that is when it is computed: `add` is called once for each. `Tally` keeps the last
    `MOST_STARTS` mismatches of a node, and this class all of them: after so many it has more evidence than the product.
    """

    def __init__(self, lives: int, *, step: int = 1) -> None:
        """`step`: 1 computes the evidence, the least over all rates of the product's grid. A larger one takes only each
        `step`-th rate: sooner done, and no less than the evidence."""
        self.numbers = np.zeros(lives, np.int64)
        """Samples of each node so far."""
        self._at = np.arange(len(GRID))[::step]
        rates = np.minimum(2.0 * GRID[self._at], 1.0 - 1e-9)
        self._won = np.log(RATES[:, None] / rates)
        self._lost = np.log1p(-RATES)[:, None] - np.log1p(-rates)
        self._allowed = RATES[:, None] > np.minimum(2.0 * GRID[self._at], 1.0)
        self._begun = np.full((lives, *self._won.shape), -math.log(2.0))
        """log of the bets that have begun, (lives, bets, rates): those that begin with the first number, or with a
        mismatch."""

    def add(self, good: Counts, others: tuple[Counts | int, Counts | int]) -> Floats:
        """For each node, so many more samples that are alike, and one mismatch. `others`: see `Tally.add`. Returns the
        evidence, natural logarithms."""
        at = self.numbers + good + 1
        self._begun += good[:, None, None] * self._lost
        first = -np.log(at * (at + 1.0))[:, None, None]
        new = np.where((at > 1)[:, None, None], first, -np.inf)  # the bet of the first number is there already
        self._begun = np.logaddexp(self._begun, new) + self._won
        self.numbers = at
        waiting = -np.log(at + 1.0)[:, None, None]
        bets = np.where(self._allowed, np.logaddexp(self._begun, waiting), 0.0)
        own = np.logaddexp.reduce(bets + np.log(RATE_WEIGHTS)[:, None], axis=1)
        return math.log(SAME_CLASS) + (own + self._of_others(*others)).min(1)

    def _of_others(self, ones: Counts | int, numbers: Counts | int) -> Floats:
        """(lives or 1, rates). As in the product, of two neighbours in the grid the smaller rate counts."""
        many = np.atleast_1d(ones)[:, None, None]
        good = np.atleast_1d(numbers)[:, None, None] - many
        rates, shares = GRID[np.maximum(self._at - 1, 0)], SHARES[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            lost = np.where(many == 0, 0.0, many * np.log(shares))
        logs = lost + good * (np.log1p(-shares * rates) - np.log1p(-rates)) + np.log(SHARE_WEIGHTS)[:, None]
        return np.where(self._at > 0, np.logaddexp.reduce(logs, axis=1), 0.0)
