"""Simulated lives: how soon nodes that cheat are quarantined, and how many honest ones ever are.

The numbers of a life are measured ones, drawn anew. A check is one sample.
"""

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from node.verification.assignment import PANEL
from node.verification.evidence import Null
from node.verification.nulls import Nulls
from node.verification.opinions import REACH, Kind
from scenarios.verification.lives import NEEDED, Lives, ReplayLives, gains_of

__all__ = [
    "Found",
    "Honest",
    "honest_lives",
    "honest_replays",
    "learned",
    "power_at_once",
    "power_of_numbers",
    "power_of_replays",
]

SAME_NULL: Final = 100
"""Lives of cheating nodes that share a learned null."""
BOUND_STEP: Final = 12
"""Of honest lives, at first each so-manyth rate of the grid is tried: no less than the evidence, and sooner done."""
OTHERS_SHARE: Final = 0.5
"""The mismatches of the other nodes, as a share of those of an honest node: the least for which the bound is shown."""

Floats = NDArray[np.float64]


class Found(NamedTuple):
    """`tokens`: checked until the wanted share of the nodes is in quarantine, or None when that was not reached.
    `curve`: (tokens, share in quarantine) after each check."""

    tokens: float | None
    curve: list[tuple[float, float]]


def _found(crossed: Floats, tokens: float, most: int, wanted: float) -> Found:
    """`crossed`: after which check each node is in quarantine; infinite: never."""
    at = float(np.sort(crossed)[math.ceil(wanted * len(crossed)) - 1])
    ever = crossed[np.isfinite(crossed)]
    last = most if len(ever) == 0 else min(most, int(ever.max()))
    curve = [(step * tokens, float(np.mean(crossed <= step))) for step in range(last + 1)]
    return Found(at * tokens if at <= most else None, curve)


def _checks(most_tokens: float, tokens: float) -> int:
    return max(1, math.ceil(most_tokens / tokens))


def learned(kind: Kind, honest: Floats, history: int, checkers: int, rng: np.random.Generator) -> Null | None:
    """The product's null from so many honest numbers; None when they are too few for it."""
    nulls = Nulls()
    for i, value in enumerate(rng.choice(honest, history)):
        nulls.add(b"", bytes([i % checkers]), b"others", float(value))
    return nulls.of(b"", b"node", REACH[kind])


def power_of_numbers(
    kind: Kind,
    honest: Floats,
    attacked: Floats,
    tokens: float,
    *,
    most_tokens: float,
    lives: int = 1000,
    wanted: float = 0.99,
    history: int = 2048,
    checkers: int = PANEL,
    seed: int = 0,
) -> Found:
    """How many tokens of a node that cheats are checked until it is quarantined by numbers of one kind.

    `honest`, `attacked`: measured numbers, one a sample. `tokens`: of a sample of the attack, on average. `history`:
    numbers of other nodes that the null is learned from.
    """
    rng, most = np.random.default_rng(seed), _checks(most_tokens, tokens)
    crossed = np.full(lives, np.inf)
    nulls = [learned(kind, honest, history, checkers, rng) for _ in range(math.ceil(lives / SAME_NULL))]
    known = [null for null in nulls if null is not None]
    if len(known) < len(nulls) or all(float(null.scale(attacked).mean()) <= null.mean for null in known):
        return _found(crossed, tokens, most, wanted)  # no bet grows: none is found but by chance
    gains = np.concatenate([gains_of(null, attacked) for null in known])
    first = np.arange(lives) // SAME_NULL * len(attacked)
    some = Lives(lives, checkers)
    for step in range(1, most + 1):
        some.add_drawn(gains, first + rng.integers(0, len(attacked), lives))
        crossed[np.isinf(crossed) & (some.log >= NEEDED)] = step
        if np.isfinite(crossed).all():
            break
    return _found(crossed, tokens, most, wanted)


def power_of_replays(
    honest: NDArray[np.bool_],
    attacked: NDArray[np.bool_],
    tokens: float,
    *,
    most_tokens: float,
    lives: int = 1000,
    wanted: float = 0.99,
    history: int = 2048,
    seed: int = 0,
) -> Found:
    """The same by mismatches of replays. `history`: samples of other nodes, of which as many mismatch as measured."""
    rng, most = np.random.default_rng(seed), _checks(most_tokens, tokens)
    crossed, rate = np.full(lives, np.inf), float(attacked.mean())
    some, ones = ReplayLives(lives), rng.binomial(history, float(honest.mean()), lives)
    while rate > 0.0 and (np.isinf(crossed) & (some.numbers < most)).any():
        evidence = some.add(rng.geometric(rate, lives) - 1, (ones, history))
        now = np.isinf(crossed) & (evidence >= NEEDED)
        crossed[now] = some.numbers[now]
    return _found(crossed, tokens, most, wanted)


def power_at_once(
    proven: NDArray[np.bool_], tokens: float, *, most_tokens: float, lives: int = 1000, wanted: float = 0.99
) -> Found:
    """The same where a sample that is `proven` false convicts alone."""
    most, rate = _checks(most_tokens, tokens), float(proven.mean())
    rng = np.random.default_rng(0)
    crossed = rng.geometric(rate, lives).astype(np.float64) if rate > 0.0 else np.full(lives, np.inf)
    return _found(crossed, tokens, most, wanted)


class Honest(NamedTuple):
    """`accused`: honest nodes in quarantine. `most`: the largest evidence that any of them ever had, or a bound."""

    accused: int
    most: float


def honest_lives(
    kind: Kind,
    honest: Floats,
    *,
    checks: int,
    lives: int = 1_000_000,
    history: int = 2048,
    checkers: int = PANEL,
    seed: int = 0,
    at_once: int = 50_000,
) -> Honest:
    """Honest nodes that are quarantined by numbers of one kind. Every `at_once` lives have a null of their own."""
    rng = np.random.default_rng(seed)
    accused, most = 0, 0.0
    for start in range(0, lives, at_once):
        size = min(at_once, lives - start)
        null = learned(kind, honest, history, checkers, rng)
        if null is None:
            continue  # nothing is judged yet
        gains = gains_of(null, honest)
        some, highest = Lives(size, checkers), np.zeros(size)
        for _ in range(checks):
            some.add_drawn(gains, rng.integers(0, len(honest), size))
            np.maximum(highest, some.log, out=highest)
        accused += int(np.sum(highest >= NEEDED))
        most = max(most, float(highest.max()))
    return Honest(accused, most)


def honest_replays(
    rate: float,
    *,
    checks: int,
    lives: int = 1_000_000,
    history: int = 2048,
    others: int = PANEL - 1,
    seed: int = 0,
    at_once: int = 20_000,
) -> Honest:
    """Honest nodes that are quarantined by mismatches, of which they have this `rate`, and the others half of it.

    `history`: samples of other nodes before the life begins; then `others` more of them with each of its samples.
    `accused` may be too large, and is not too small.
    """
    rng = np.random.default_rng(seed)
    accused, most = 0, 0.0
    for start in range(0, lives, at_once):
        size = min(at_once, lives - start)
        some, highest = ReplayLives(size, step=BOUND_STEP), np.zeros(size)
        ones = rng.binomial(history, rate * OTHERS_SHARE, size)
        while rate > 0.0 and (some.numbers < checks).any():
            good = rng.geometric(rate, size) - 1
            ones += rng.binomial(others * (good + 1), rate * OTHERS_SHARE)
            found = some.add(good, (ones, history + others * (some.numbers + good + 1)))
            highest = np.where(some.numbers <= checks, np.maximum(highest, found), highest)
        accused += int(np.sum(highest >= NEEDED))
        most = max(most, float(highest.max()))
    return Honest(accused, most)
