"""Honest nodes over their whole lives: none is quarantined. Nulls are learned, and bets made, by the ledger's own
classes; only the lives run side by side."""

import math

import numpy as np
import pytest

from node.verification.classes import ArithmeticClass
from node.verification.evidence import THRESHOLD, Bets, Null, trimmed
from node.verification.nulls import WINDOW, Nulls, context_of
from node.verification.opinions import REACH, Kind

CLASS = ArithmeticClass("transformers", "5.0", "cpu", "bfloat16", "sdpa")
CHECKERS = 8


def slopes(rng: np.random.Generator, shape) -> np.ndarray:
    """As honest slopes are: biased, with heavy tails."""
    return 0.3 + 0.2 * rng.standard_t(3, shape)


def margins(rng: np.random.Generator, shape) -> np.ndarray:
    """Sums of margins: mostly none, now and then a near tie."""
    return np.where(rng.random(shape) < 0.2, rng.exponential(0.02, shape), 0.0)


def differences(rng: np.random.Generator, shape) -> np.ndarray:
    return np.abs(rng.normal(0.03, 0.01, shape))


HONEST = {Kind.STALE: slopes, Kind.DRAWN: margins, Kind.CLAIMS: differences}


def learned(kind: Kind, rng: np.random.Generator, liars: int = 0, numbers: int = WINDOW) -> Null:
    """From the numbers of eight checkers, of which `liars` find nothing, ever."""
    nulls, context = Nulls(), context_of(kind, CLASS, CLASS, 64)
    for _ in range(numbers):
        for checker in range(CHECKERS):
            value = -5.0 if checker < liars else float(HONEST[kind](rng, ()))
            nulls.add(context, bytes([checker]), bytes([checker + 1]), value)
    null = nulls.of(context, b"somebody else", REACH[kind])
    assert null is not None
    return null


def highest(lives: int, checks: int, rng: np.random.Generator, liars: int) -> np.ndarray:
    """The most evidence that each life ever had, all kinds together. `liars` of its checkers always find the worst."""
    nulls = {kind: learned(kind, rng, liars) for kind in HONEST}
    bets = {kind: [Bets((lives,)) for _ in range(CHECKERS)] for kind in HONEST}
    wealth = {kind: np.zeros((CHECKERS, lives)) for kind in HONEST}
    most = np.zeros(lives)
    for check in range(checks):
        checker = check % CHECKERS
        logs = [np.zeros(lives)] * (len(Kind) - len(HONEST))
        for kind, draw in HONEST.items():
            found = np.full(lives, 99.0) if checker < liars else draw(rng, lives)
            bets[kind][checker].add(nulls[kind], found)
            wealth[kind][checker] = bets[kind][checker].log_wealth
            logs.append(np.sort(wealth[kind], axis=0)[: CHECKERS // 2].sum(0))
        most = np.maximum(most, np.logaddexp.reduce(logs, axis=0) - math.log(len(Kind)))
    return most


def test_the_lives_are_reckoned_as_the_ledger_does():
    rng = np.random.default_rng(0)
    logs = rng.normal(0.0, 3.0, (CHECKERS, 50))
    ordered = np.sort(logs, axis=0)
    assert [trimmed(column) for column in logs.T] == pytest.approx(list(ordered[: CHECKERS // 2].sum(0)))


@pytest.mark.parametrize("liars", [0, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.long]), 4])
def test_honest_lives_are_never_quarantined_though_half_of_the_checkers_lie(liars):
    """The checkers that lie lower what is learned and raise what is found."""
    most = highest(5_000, 160, np.random.default_rng(liars), liars)
    assert most.max() < THRESHOLD / 2


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("liars", [0, 4])
def test_a_hundred_thousand_honest_lives(liars):
    most = highest(100_000, 400, np.random.default_rng(10 + liars), liars)
    assert most.max() < THRESHOLD


@pytest.mark.parametrize("kind", HONEST)
@pytest.mark.parametrize("liars", [0, 1, 4])
def test_the_null_is_above_the_honest_mean_though_half_of_the_checkers_find_less(kind, liars):
    null = learned(kind, np.random.default_rng(7), liars, 200)
    many = HONEST[kind](np.random.default_rng(8), 50_000)
    assert null.scale(many).mean() < null.mean < 0.9


def test_a_cheat_is_not_its_own_measure_unless_it_is_alone_in_its_class():
    rng, context = np.random.default_rng(1), context_of(Kind.STALE, CLASS, CLASS, 64)
    nulls, alone = Nulls(), Nulls()
    for _ in range(200):
        for checker in range(CHECKERS):
            nulls.add(context, bytes([checker]), b"cheat", 1.3)
            nulls.add(context, bytes([checker]), b"honest", float(slopes(rng, ())))
            alone.add(context, bytes([checker]), b"cheat", 1.3)
    theirs = nulls.of(context, b"cheat", REACH[Kind.STALE])
    own = alone.of(context, b"cheat", REACH[Kind.STALE])
    assert theirs is not None
    assert own is not None
    assert float(theirs.scale(1.3)) > theirs.mean + 0.2, "it stands out from the others"
    assert float(own.scale(1.3)) < own.mean
    nulls.forget(b"honest")
    again = nulls.of(context, b"cheat", REACH[Kind.STALE])
    assert again is not None
    assert again.mean == pytest.approx(own.mean, abs=0.01)


def test_few_numbers_or_few_checkers_are_no_null_and_other_contexts_are_others():
    rng = np.random.default_rng(2)
    here = context_of(Kind.STALE, CLASS, CLASS, 64)
    assert context_of(Kind.STALE, CLASS, CLASS, 100) == here
    others = [
        context_of(Kind.CLAIMS, CLASS, CLASS, 64),
        context_of(Kind.STALE, CLASS, CLASS, 1000),
        context_of(Kind.STALE, CLASS, CLASS, 64, b"cold"),
    ]
    assert len({here, *others}) == 4
    nulls = Nulls()
    for i in range(2000):  # two checkers
        nulls.add(here, bytes([i % 2]), b"a", float(slopes(rng, ())))
    assert nulls.of(here, b"b", 0.5) is None
    for i in range(300):
        nulls.add(others[0], bytes([i % 8]), b"a", 0.03)
    assert nulls.of(others[0], b"b", 0.1) is None
    assert nulls.of(others[1], b"b", 0.1) is None
    with pytest.raises(ValueError, match="finite"):
        nulls.add(here, b"x", b"a", math.nan)


def test_a_checker_keeps_its_newest_numbers_and_none_about_the_convicted():
    nulls, context = Nulls(), bytes(16)
    for i in range(3 * WINDOW):
        nulls.add(context, b"checker", bytes([i % 2]), float(i))
    kept = nulls._contexts[context].numbers[b"checker"]
    assert kept.about_others(None).tolist() == list(range(2 * WINDOW, 3 * WINDOW))
    assert kept.about_others(b"\0").tolist() == list(range(2 * WINDOW + 1, 3 * WINDOW, 2))
    nulls.forget(b"\1")
    assert not (kept.about_others(None) % 2).any()
    nulls.forget(b"checker")
    assert not nulls._contexts[context].numbers


def test_contexts_and_checkers_are_bounded():
    nulls = Nulls()
    for i in range(200):
        nulls.add(i.to_bytes(16, "little"), b"checker", b"a", 1.0)
    assert len(nulls) == 64
    one = Nulls()
    for i in range(100):
        for _ in range(40):
            one.add(b"c", bytes([i]), b"a", 1.0)
    assert len(one._contexts[b"c"].numbers) == 16
