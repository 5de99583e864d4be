"""Noise and draws: known answers, golden bits, the distribution, and the margin's properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.verification.draws import MOST_MARGIN, draw, kept_logprobs, margins
from node.verification.noise import gumbel, philox, portable_log, uniforms

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter, key, words):
    """The vectors are those of Random123's kat_vectors."""
    assert tuple(int(word) for word in philox(counter, key)) == words


def test_noise_has_its_golden_bits():
    """Bits, not values within a tolerance: a node must draw what another can draw again."""
    assert [value.hex() for value in gumbel(7, 9, 3, 6)] == [
        "-0x1.0a4ca0ab57aa0p-1",
        "0x1.e26614cbc13f3p-1",
        "0x1.2a79c8a3ac4bfp-1",
        "0x1.42931e8ac89e0p-5",
        "0x1.704a0dc7dff99p-2",
        "0x1.2bb549fd486a0p-1",
    ]
    assert gumbel(2**64 - 1, 2**64 - 1, 2**32 - 1, 5)[4].hex() == "-0x1.b28984eac0b4bp-1"


@given(U64, U64, U32, st.integers(1, 40), st.integers(1, 40))
def test_a_tokens_noise_depends_on_nothing_but_its_place(seed, stream, position, vocabulary, more):
    short, long = gumbel(seed, stream, position, vocabulary), gumbel(seed, stream, position, vocabulary + more)
    np.testing.assert_array_equal(short, long[:vocabulary])
    u = uniforms(seed, stream, position, vocabulary)
    assert (u > 0).all()
    assert (u < 1).all()
    assert np.isfinite(short).all()


def test_other_seeds_streams_and_positions_give_other_noise():
    rows = [gumbel(*place, 64) for place in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3))]
    assert len({row.tobytes() for row in rows}) == len(rows)
    assert abs(np.corrcoef(rows)[~np.eye(len(rows), dtype=bool)]).max() < 0.5


@given(st.floats(1e-300, 1e300))
def test_the_portable_logarithm_is_within_an_ulp_or_two(x):
    assert portable_log(np.array([x]))[0] == pytest.approx(np.log(x), rel=1e-15, abs=1e-300)


def test_draws_follow_the_distribution():
    logits = np.array([[0.0, 1.0, 2.0, -1.0, 0.5]])
    logprobs = kept_logprobs(logits, 0.7)
    tokens = [int(draw(logprobs, gumbel(5, stream, 0, 5)[None])[0]) for stream in range(5_000)]
    shares = np.bincount(tokens, minlength=5) / len(tokens)
    np.testing.assert_allclose(shares, np.exp(logprobs[0]), atol=0.02)


def test_top_k_and_top_p_keep_the_likeliest():
    logits = np.log([[0.1, 0.5, 0.25, 0.15]])
    assert np.isfinite(kept_logprobs(logits, 1.0, top_p=0.7))[0].tolist() == [False, True, True, False]
    assert np.isfinite(kept_logprobs(logits, 1.0, top_k=1))[0].tolist() == [False, True, False, False]
    assert np.isfinite(kept_logprobs(logits, 1.0, top_p=0.7, slack=0.1))[0].tolist() == [False, True, True, True]
    assert np.isfinite(kept_logprobs(logits, 1.0, top_k=2, top_p=0.6))[0].tolist() == [False, True, False, False]


@given(st.integers(0, 2**32), st.integers(2, 30), st.floats(0.1, 3.0))
def test_the_drawn_token_loses_by_nothing_and_every_other_by_something(seed, vocabulary, temperature):
    logits = np.random.default_rng(seed).normal(0, 2, (3, vocabulary))
    logprobs = kept_logprobs(logits, temperature)
    noise = np.stack([gumbel(seed, row, 0, vocabulary) for row in range(3)])
    token = draw(logprobs, noise)
    assert (margins(logprobs, noise, token) == 0).all()
    assert (margins(logprobs, noise, (token + 1) % vocabulary) > 0).all()


@given(st.integers(0, 2**32), st.floats(0.0, 0.5))
def test_rounding_costs_at_most_twice_its_size(seed, size):
    """An engine whose log-probabilities are off by `size` at most draws a token that loses by 2 x size at most."""
    rng = np.random.default_rng(seed)
    exact = kept_logprobs(rng.normal(0, 2, (5, 20)), 1.0)
    noise = np.stack([gumbel(seed, row, 0, 20) for row in range(5)])
    token = draw(exact + rng.uniform(-size, size, exact.shape), noise)
    assert (margins(exact, noise, token) <= 2 * size + 1e-9).all()


def test_impossible_tokens_and_numbers_that_are_none_cost_the_most():
    logprobs, noise = np.array([[0.0, -np.inf], [np.nan, np.nan]]), np.zeros((2, 2))
    assert margins(logprobs, noise, np.array([1, 0])).tolist() == [MOST_MARGIN, MOST_MARGIN]
    wide = np.array([[0.0, -0.5], [0.0, 0.0]])
    assert margins(logprobs, noise, np.array([1, 0]), wide)[0] == 0.5
