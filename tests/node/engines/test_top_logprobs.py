"""The likeliest tokens of each draw."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_transformers import engine_on

from node.engines.base import MIN_LOGPROB, OPTIONS, TOP_LOGPROBS, Prompt, SamplingOptions, SamplingParams, needs
from node.engines.sampling import likeliest, log_probabilities
from node.engines.top_logprobs import is_top, pack_top, read_top


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 6), st.randoms(use_true_random=False))
def test_what_is_packed_is_read_again(tokens: int, k: int, known: int, random):
    ids = np.array([[random.randrange(1 << 32) for _ in range(k)] for _ in range(tokens)])
    rows = [sorted((-random.random() * 9 for _ in range(k)), reverse=True) for _ in range(tokens)]
    logprobs = np.array([[value if i < known else -math.inf for i, value in enumerate(row)] for row in rows])
    data = pack_top(ids, logprobs)
    assert is_top(data, tokens, k)
    found = read_top(data, k)
    assert [[token for token, _ in row] for row in found] == ids[:, :known].tolist()
    for got, wanted in zip(found, rows, strict=True):
        assert [value for _, value in got] == pytest.approx(wanted[:known], abs=1e-6)


def test_what_no_engine_tells_is_refused():
    ids, logprobs = np.array([[1, 2], [3, 4]]), np.array([[-0.5, -1.0], [-0.25, -2.0]])
    good = pack_top(ids, logprobs)
    assert is_top(good, 2, 2)
    assert is_top(b"", 2, 0)
    assert not is_top(good, 2, 1)
    assert not is_top(good, 3, 2)
    assert not is_top(good[:-1], 2, 2)
    assert not is_top(good, 2, 0)
    assert not is_top(pack_top(ids, logprobs[:, ::-1]), 2, 2), "not in order"
    for wrong in (0.5, math.nan, -math.inf, 2 * MIN_LOGPROB):
        pairs = np.frombuffer(good, [("token", "<u4"), ("logprob", "<f4")]).copy()
        pairs["logprob"][3] = wrong
        assert not is_top(pairs.tobytes(), 2, 2), wrong


def test_the_likeliest_are_of_the_sampled_distribution():
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0], [0.0, 0.0, 9.0, 1.0], [7.0, 7.0, 7.0, 7.0]])
    sampling = SamplingParams(1, temperature=2.0, options=SamplingOptions(top_k=2, top_logprobs=3))
    tokens, values = likeliest(logits, sampling, 2, 3)
    assert tokens[:, :2].tolist() == [[1, 3], [2, 3]]
    assert values[:, 2].tolist() == [-math.inf, -math.inf]
    wanted = log_probabilities(logits, sampling)[:2].gather(-1, tokens[:, :2])
    assert values[:, :2].tolist() == wanted.tolist()
    tokens, values = likeliest(logits, SamplingParams(1), 3, 6)
    assert tokens.shape == values.shape == (3, 6)
    assert values[0, 4:].tolist() == [-math.inf] * 2, "the vocabulary has four tokens"


def test_an_engine_tells_them_with_each_completion(tied_folder: Path):
    engine = engine_on(tied_folder)
    sampling = SamplingParams(6, seed=3, options=SamplingOptions(top_logprobs=4))
    assert needs(sampling) == {OPTIONS, TOP_LOGPROBS}
    assert needs(sampling) <= engine.abilities
    prompts = [Prompt((1, 2, 3), stream=i) for i in range(3)] + [Prompt((4, 5), stream=9)]
    plain = engine.generate(prompts, sampling.with_options(top_logprobs=0))
    told = engine.generate(prompts, sampling)
    for one, other, prompt in zip(plain, told, prompts, strict=True):
        assert (one.token_ids, one.logprobs, one.top) == (other.token_ids, other.logprobs, b"")
        assert is_top(other.top, len(other.token_ids), 4)
        for i, row in enumerate(read_top(other.top, 4)):
            assert len({token for token, _ in row}) == 4
            for token, logprob in row:
                text = (*other.token_ids[:i], token)
                assert engine.score(prompt.token_ids, text, sampling)[-1] == pytest.approx(logprob, abs=1e-4)
            assert max(value for _, value in row) >= other.logprobs[i] - 1e-4
