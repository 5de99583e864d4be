"""Candidates for the product's evidence: valid as what they would replace, and sooner."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.verification.evidence import FRACTIONS, THRESHOLD, Null
from scenarios.verification.candidates import PRIOR, PriorBets, learn_null
from scenarios.verification.lives import CANDIDATE, PRODUCT, false_accusations, power


@settings(max_examples=15)
@given(st.integers(0, 2**32))
def test_a_learned_mean_is_above_the_true_one_and_nearer_to_it(seed):
    rng = np.random.default_rng(seed)
    honest = 0.3 + 0.2 * rng.standard_t(3, 800)
    found, before = learn_null(honest, 1.0), Null.learn(honest, 1.0)
    many = 0.3 + 0.2 * np.random.default_rng(seed + 1).standard_t(3, 20_000)
    assert found.scale(many).mean() < found.mean
    slack = [(null.mean - null.scale(many).mean()) * (null.high - null.low) for null in (found, before)]
    assert slack[0] < 1.2 * slack[1]


def test_the_bound_of_an_exact_class_falls_as_one_over_n():
    means = [learn_null(np.zeros(n), 1.0).mean for n in (1_000, 4_000)]
    assert 0.01 < means[0] < 0.04
    assert means[1] == pytest.approx(means[0] / 4, rel=0.2)


def test_nulls_need_numbers():
    for bad in ([0.1] * 15, [0.1] * 20 + [math.nan]):
        with pytest.raises(ValueError, match="numbers"):
            learn_null(bad, 1.0)


@given(st.floats(0.001, 0.99), st.lists(st.floats(-3, 4) | st.just(math.nan), max_size=30))
def test_weighted_bets_are_never_ruin_and_fair_at_the_null(mean, values):
    null, bets = Null(-1.0, 2.0, mean), PriorBets()
    for value in values:
        bets.add(null, value)
    assert float(bets.log_wealth) >= -math.log(2) - 1e-9
    won, lost = PriorBets(), PriorBets()
    won.add(null, 2.0)
    lost.add(null, -1.0)
    expected = mean * math.exp(won.log_wealth) + (1 - mean) * math.exp(lost.log_wealth)
    assert expected == pytest.approx(1.0)
    assert sum(PRIOR) == pytest.approx(1.0)
    assert len(PRIOR) == len(FRACTIONS)


def test_the_bound_holds_at_small_evidence_with_the_largest_mean_that_a_null_allows():
    null, rng = learn_null(np.zeros(400), 1.0), np.random.default_rng(3)
    bets, highest = PriorBets((20_000,)), np.full(20_000, -np.inf)
    for _ in range(100):
        bets.add(null, np.where(rng.random(20_000) < null.mean, null.high, null.low))
        highest = np.maximum(highest, bets.log_wealth)
    assert np.mean(highest >= math.log(20)) <= 0.05
    assert highest.max() < THRESHOLD


@pytest.mark.parametrize("attacked", [1.0, 0.6])
def test_they_convict_sooner_where_honest_samples_are_replayed_exactly(attacked):
    rng = np.random.default_rng(0)
    honest, cheat = np.zeros(400), (rng.random(400) < attacked).astype(float)
    found = [
        power(honest, cheat, 32.0, 1.0, most_tokens=20_000, lives=100, history=4096, rules=rules).tokens
        for rules in (PRODUCT, CANDIDATE)
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1] < found[0]
    assert false_accusations(honest, 1.0, checks=60, lives=2_000, rules=CANDIDATE) == (0, 0.0)
