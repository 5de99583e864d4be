"""How likely a model finds the tokens of a prompt."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_transformers import engine_on

from node.engines import cohort
from node.engines.base import MIN_LOGPROB, OPTIONS, PROMPT_LOGPROBS, Prompt, SamplingOptions, SamplingParams, needs
from node.engines.prompt_scores import is_scores, pack_scores, read_scores, scores_bytes
from node.engines.top_logprobs import PAIR


@given(st.integers(2, 6), st.integers(0, 5), st.integers(0, 5), st.randoms(use_true_random=False))
def test_what_is_packed_is_read_again(prompt: int, k: int, known: int, random):
    ranks = np.array([random.randrange(1, 9) for _ in range(prompt - 1)])
    own = np.array([-random.random() for _ in ranks])
    tokens = np.array([[random.randrange(1 << 32) for _ in range(k)] for _ in ranks]).reshape(prompt - 1, k)
    values = -np.sort(np.random.default_rng(1).random((prompt - 1, k)))
    values[:, known:] = -math.inf
    data = pack_scores(ranks, own, tokens, values)
    assert len(data) == scores_bytes(prompt, k)
    assert is_scores(data, prompt, k)
    for i, score in enumerate(read_scores(data, k)):
        assert (score.rank, score.logprob) == (ranks[i], pytest.approx(own[i], abs=1e-6))
        assert [token for token, _ in score.top] == tokens[i, :known].tolist()
        assert [value for _, value in score.top] == pytest.approx(values[i, :known].tolist(), abs=1e-6)


def test_what_no_engine_tells_is_refused():
    good = pack_scores(
        np.array([1, 3]), np.array([-0.5, -1.0]), np.array([[1, 2], [3, 4]]), -np.array([[0.5, 1], [0, 2]])
    )
    assert is_scores(good, 3, 2)
    assert is_scores(b"", 3, None)
    assert is_scores(b"", 1, 4), "a prompt of one token"
    for prompt, k in ((2, 2), (4, 2), (3, 1), (3, 3), (3, None)):
        assert not is_scores(good, prompt, k)
    assert not is_scores(b"", 3, 0)
    assert not is_scores(good[:-1], 3, 2)

    def changed(name: str, place: int, value: float) -> bytes:
        pairs = np.frombuffer(good, PAIR).copy()
        pairs[name][place] = value
        return pairs.tobytes()

    assert not is_scores(changed("token", 3, 0), 3, 2), "ranks begin at 1"
    assert not is_scores(changed("logprob", 2, -0.25), 3, 2), "not in order"
    for wrong in (0.5, math.nan, -math.inf, 2 * MIN_LOGPROB):
        assert not is_scores(changed("logprob", 3, wrong), 3, 2), wrong


def test_the_scores_of_an_engine_are_those_of_a_fresh_forward_pass(tied_folder: Path, monkeypatch: pytest.MonkeyPatch):
    engine = engine_on(tied_folder)
    sampling = SamplingParams(4, temperature=0.5, seed=3, options=SamplingOptions(top_k=2, prompt_logprobs=3))
    assert needs(sampling) == {OPTIONS, PROMPT_LOGPROBS} <= engine.abilities
    prompts = [Prompt((5, 9, 2, 7, 1, 8), i) for i in range(2)] + [Prompt((4, 4, 9, 1, 3, 6)), Prompt((3,))]
    plain = engine.generate(prompts, sampling.with_options(prompt_logprobs=None))
    scored = engine.generate(prompts, sampling)
    for one, other, prompt in zip(plain, scored, prompts, strict=True):
        assert (one.token_ids, one.logprobs, one.prompt_scores) == (other.token_ids, other.logprobs, b"")
        assert is_scores(other.prompt_scores, len(prompt.token_ids), 3)
        if len(prompt.token_ids) == 1:
            continue
        with torch.inference_mode():
            ids = torch.tensor([prompt.token_ids])
            wanted = engine._loaded()(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found = read_scores(other.prompt_scores, 3)
        own = wanted.gather(-1, ids[0, 1:, None])
        assert [score.logprob for score in found] == own[:, 0].tolist()
        assert [score.rank for score in found] == (wanted >= own).sum(-1).tolist()
        assert [[token for token, _ in score.top] for score in found] == wanted.topk(3).indices.tolist()
        assert [[value for _, value in score.top] for score in found] == wanted.topk(3).values.tolist()
    monkeypatch.setattr(cohort, "LOGITS_BYTES", 1)  # a text whose logits do not fit in memory is read in parts
    for whole, parts in zip(scored, engine.generate(prompts, sampling), strict=True):
        for one, other in zip(read_scores(whole.prompt_scores, 3), read_scores(parts.prompt_scores, 3), strict=True):
            assert (one.rank, [token for token, _ in one.top]) == (other.rank, [token for token, _ in other.top])
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
