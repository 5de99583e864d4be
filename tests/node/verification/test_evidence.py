"""The version test and the evidence: what honest nodes keep, what liars lose, and what lying checkers cannot do."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.verification.evidence import (
    ALPHA,
    DELTA,
    FRACTIONS,
    MOST_CHECKERS,
    THRESHOLD,
    WEIGHTS,
    Bets,
    Evidence,
    Null,
    dropped,
    trimmed,
)
from node.verification.slopes import slope

NULL = Null(-1.0, 2.0, 0.45)
"""Honest slopes of mean 0.35 or less."""


def vectors(seed: int, tokens: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scored = -rng.exponential(1.0, tokens)
    return scored, scored + rng.normal(0, 0.01, tokens), rng.normal(0, 0.03, tokens)


@given(st.integers(0, 2**32))
def test_an_exact_claim_has_slope_0_and_the_alternative_slope_1(seed):
    scored, other, _ = vectors(seed)
    assert slope(scored, scored, other) == 0.0
    assert slope(other, scored, other) == pytest.approx(1.0)


@given(st.integers(0, 2**32), st.floats(-2.0, 3.0))
def test_the_slope_is_linear_in_the_claim(seed, share):
    scored, other, noise = vectors(seed)
    alone = slope(scored + noise, scored, other)
    moved = slope(scored + noise + share * (other - scored), scored, other)
    assert alone is not None
    assert moved == pytest.approx(alone + share, abs=1e-9)


def test_bad_scores_say_nothing_and_bad_claims_tell_against_their_node():
    scored, other, _ = vectors(1)
    lost = np.full(64, np.nan)
    assert slope(scored, lost, other) is None
    assert slope(scored, scored, scored) is None
    found = slope(lost, scored, other)
    assert found is not None
    assert found > 1
    one = scored.copy()
    one[3] = np.nan
    assert slope(scored, one, other) == 0.0
    with pytest.raises(ValueError, match="tokens"):
        slope(scored[:5], scored, other)


@given(st.floats(0.001, 0.99), st.lists(st.floats(-3, 4) | st.just(math.nan), max_size=30))
def test_a_bet_on_any_number_is_never_ruin_and_fair_at_the_null(mean, values):
    null = Null(-1.0, 2.0, mean)
    bets = Bets()
    for value in values:
        bets.add(null, value)
    assert float(bets.log_wealth) >= -math.log(2) - 1e-9
    won, lost = Bets(), Bets()  # x is 1 with probability `mean`, otherwise 0: the mean of the wealth is 1
    won.add(null, 2.0)
    lost.add(null, -1.0)
    expected = mean * math.exp(won.log_wealth) + (1 - mean) * math.exp(lost.log_wealth)
    assert expected == pytest.approx(1.0)


def test_honest_lives_stay_far_below_the_threshold_and_the_bound_holds_at_small_evidence():
    """20,000 lives of 100 checks with the largest mean that the null allows: Ville's bound at 1/20 is kept."""
    rng = np.random.default_rng(3)
    bets, highest = Bets((20_000,)), np.full(20_000, -np.inf)
    for _ in range(100):
        bets.add(NULL, np.where(rng.random(20_000) < NULL.mean, NULL.high, NULL.low))
        highest = np.maximum(highest, bets.log_wealth)
    assert np.mean(highest >= math.log(20)) <= 0.05
    assert highest.max() < THRESHOLD


def test_the_threshold_leaves_room_for_the_learned_null():
    assert math.exp(-THRESHOLD) + DELTA == pytest.approx(ALPHA)
    assert math.exp(THRESHOLD) > 1e6


@given(st.integers(0, 2**32))
def test_a_learned_mean_is_above_the_true_one(seed):
    rng = np.random.default_rng(seed)
    null = Null.learn(0.3 + 0.2 * rng.standard_t(3, 400), reach=1.0)
    many = 0.3 + 0.2 * np.random.default_rng(seed + 1).standard_t(3, 20_000)
    assert null.scale(many).mean() < null.mean


def test_the_bound_of_numbers_that_do_not_spread_falls_as_one_over_n():
    means = [Null.learn(np.zeros(n), 1.0).mean for n in (1_000, 4_000)]
    assert 0.01 < means[0] < 0.04
    assert means[1] == pytest.approx(means[0] / 4, rel=0.2)


def test_the_bound_holds_at_small_evidence_with_the_largest_mean_that_an_exact_null_allows():
    null, rng = Null.learn(np.zeros(400), 1.0), np.random.default_rng(3)
    bets, highest = Bets((20_000,)), np.full(20_000, -np.inf)
    for _ in range(100):
        bets.add(null, np.where(rng.random(20_000) < null.mean, null.high, null.low))
        highest = np.maximum(highest, bets.log_wealth)
    assert np.mean(highest >= math.log(20)) <= 0.05
    assert highest.max() < THRESHOLD
    assert sum(WEIGHTS) == pytest.approx(1.0)
    assert len(WEIGHTS) == len(FRACTIONS)


def test_nulls_need_numbers():
    for bad in ([0.1] * 15, [0.1] * 20 + [math.nan]):
        with pytest.raises(ValueError, match="numbers"):
            Null.learn(bad, reach=1.0)
    with pytest.raises(ValueError, match="range"):
        Null(1.0, 1.0, 0.5)


def test_numbers_as_the_alternative_convict_and_honest_ones_do_not():
    liar, honest = Evidence(), Evidence()
    rng = np.random.default_rng(0)
    for check in range(150):
        checker = bytes([check % 5])
        liar.add(checker, NULL, 1.3 + 0.3 * rng.normal())
        honest.add(checker, NULL, 0.3 + 0.3 * rng.normal())
    assert liar.proven
    assert not honest.proven
    assert honest.log < 3


def test_a_checker_alone_convicts_nobody_and_a_lost_one_changes_nothing():
    found = Evidence()
    for _ in range(1000):
        found.add(b"a", NULL, 2.0)
        found.add(b"b", NULL, 2.0)
    assert found.log <= 0
    assert not found.proven
    before = found.log
    found.add(b"c", NULL, None)
    assert (found.log, len(found.checkers)) == (before, 2)


@pytest.mark.parametrize(("checkers", "framing", "shielding"), [(3, 2, 0), (4, 2, 1), (5, 2, 2), (6, 3, 2), (9, 4, 4)])
def test_two_lying_checkers_or_half_of_them_frame_nobody_and_fewer_save_nobody(checkers, framing, shielding):
    rng = np.random.default_rng(1)
    framed, saved = Evidence(), Evidence()
    for _ in range(60):
        for checker in range(checkers):
            honest, stale = 0.3 + 0.3 * rng.normal(), 1.3 + 0.3 * rng.normal()
            framed.add(bytes([checker]), NULL, 9.0 if checker < framing else honest)
            saved.add(bytes([checker]), NULL, -9.0 if checker < shielding else stale)
    assert framed.log < 3
    assert saved.proven


@given(st.lists(st.floats(-0.69, 20), min_size=3, max_size=9), st.data())
def test_trimmed_evidence_needs_the_honest_checkers_own(logs, data):
    """If as many lie as are dropped, and the sum of the honest ones is below the threshold, so is the evidence."""
    liars = data.draw(st.integers(0, dropped(len(logs))))
    honest = logs[: len(logs) - liars]
    assert trimmed(logs) <= max(sum(honest), 0.0) + 1e-9


def test_few_checkers_are_kept_and_dropping_the_largest_raises_nothing():
    found = Evidence()
    for checker in range(MOST_CHECKERS):
        found.add(bytes([checker]), NULL, 0.3)
    before = found.log
    found.add(b"loud", NULL, 2.0)
    assert (len(found.checkers), b"loud" in found.checkers) == (MOST_CHECKERS, False)
    assert found.log == before


def test_products_survive_a_file_and_others_are_refused():
    bets = Bets()
    for value in (0.1, 2.0, -3.0):
        bets.add(NULL, value)
    assert float(Bets.restored(bets.saved).log_wealth) == float(bets.log_wealth)
    for bad in (bets.saved[1:], [math.nan] * len(bets.saved)):
        with pytest.raises(ValueError, match="fractions"):
            Bets.restored(bad)
