"""Lives of nodes, simulated from measured numbers by the product's bets: many at once.

A node is checked sample after sample, by `checkers` honest checkers in turn. `Lives` computes for many nodes at once
what `node.verification.evidence.Evidence` computes for one; a test compares them.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from node.verification.evidence import DELTA, LEAST_CHECKERS, THRESHOLD, Bets, Null, trimmed
from node.verification.opinions import Kind

__all__ = [
    "KINDS",
    "Found",
    "Lives",
    "false_accusations",
    "gains_of",
    "learned",
    "power",
]

KINDS: Final = len(Kind)
"""Kinds of tests among which a node's evidence is averaged, and `DELTA` is divided."""

SAME_NULL: Final = 100
"""Lives of cheating nodes that share a learned null."""

Floats = NDArray[np.float64]


class Lives:
    """The evidence against many nodes, by one kind of number."""

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

    def add_drawn(self, gains: Floats, drawn: NDArray[np.int64]) -> None:
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
        return np.sort(self._logs, axis=0)[: self._kept].sum(0)


def learned(honest: Floats, reach: float, count: int, rng: np.random.Generator) -> Null:
    """A null from `count` honest numbers, drawn anew from the measured ones."""
    return Null.learn(rng.choice(honest, count), reach, DELTA / KINDS)


def gains_of(null: Null, numbers: Floats) -> Floats:
    """What each number adds to the logarithms of the products: (numbers, bets)."""
    bets = Bets(numbers.shape)
    bets.add(null, numbers)
    return bets._logs


class Found(NamedTuple):
    """`tokens`: checked until the share `wanted` of the nodes is convicted, or None when that was not reached.
    `curve`: (tokens, share convicted) after each check."""

    tokens: float | None
    curve: list[tuple[float, float]]


def power(
    honest: Floats,
    attacked: Floats,
    tokens: float,
    reach: float,
    *,
    most_tokens: float,
    seed: int = 0,
    lives: int = 1000,
    wanted: float = 0.99,
    history: int = 2048,
    checkers: int = LEAST_CHECKERS,
) -> Found:
    """How many tokens of a cheating node are checked until it is quarantined.

    `honest`, `attacked`: measured numbers, one a sample, resampled. `tokens`: of a sample of the attack, on average.
    `history`: honest numbers that the null is learned from. `SAME_NULL` lives share a null.
    """
    rng = np.random.default_rng(seed)
    steps = max(1, math.ceil(most_tokens / tokens))
    crossed = np.full(lives, np.inf)
    nulls = [learned(honest, reach, history, rng) for _ in range(math.ceil(lives / SAME_NULL))]
    if all(float(null.scale(attacked).mean()) <= null.mean for null in nulls):
        return Found(None, [(0.0, 0.0), (steps * tokens, 0.0)])  # no bet grows: none is found but by chance
    gains = np.concatenate([gains_of(null, attacked) for null in nulls])
    first = np.arange(lives) // SAME_NULL * len(attacked)
    some = Lives(lives, checkers)
    for step in range(1, steps + 1):
        some.add_drawn(gains, first + rng.integers(0, len(attacked), lives))
        crossed[np.isinf(crossed) & (some.log >= THRESHOLD + math.log(KINDS))] = step
        if np.isfinite(crossed).all():
            break
    ordered = np.sort(crossed)
    at = float(ordered[math.ceil(wanted * lives) - 1])
    shares = [(step * tokens, float(np.mean(crossed <= step))) for step in _steps(crossed, steps)]
    return Found(at * tokens if math.isfinite(at) else None, shares)


def _steps(crossed: Floats, most: int) -> Sequence[int]:
    last = crossed[np.isfinite(crossed)]
    return range(most + 1) if len(last) == 0 else range(min(most, int(last.max())) + 1)


def false_accusations(
    honest: Floats,
    reach: float,
    *,
    checks: int,
    seed: int = 0,
    lives: int = 1_000_000,
    history: int = 2048,
    checkers: int = LEAST_CHECKERS,
    at_once: int = 50_000,
) -> tuple[int, float]:
    """(honest nodes that are quarantined in `checks` checks, the largest evidence that any had).

    Every `at_once` lives have a null of their own.
    """
    rng = np.random.default_rng(seed)
    accused, most = 0, 0.0
    for start in range(0, lives, at_once):
        size = min(at_once, lives - start)
        gains = gains_of(learned(honest, reach, history, rng), honest)
        some, highest = Lives(size, checkers), np.zeros(size)
        for _ in range(checks):
            some.add_drawn(gains, rng.integers(0, len(honest), size))
            np.maximum(highest, some.log, out=highest)
        accused += int(np.sum(highest >= THRESHOLD + math.log(KINDS)))
        most = max(most, float(highest.max()))
    return accused, most
