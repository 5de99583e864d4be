"""Flights across a commit, and their scores by another engine."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_transformers import PROMPTS, ROOT, SAMPLING, changed, checkpoint, engine_on

from node.engines.base import Prompt, SamplingOptions, SamplingParams
from node.engines.interface import ScoringEngine
from node.verification.draws import kept_logprobs, margins
from node.verification.noise import gumbel

LONG = SamplingParams(max_tokens=12, seed=5)


def run_flight(engine, flight=1):
    while True:
        for number, completions in engine.step():
            assert number == flight
            return completions


def test_flights_begin_while_others_run(tied_folder: Path):
    engine = engine_on(tied_folder)
    alone = [engine.generate([prompt], SAMPLING)[0] for prompt in PROMPTS]
    engine.begin(1, PROMPTS[:2], SAMPLING)
    engine.step()
    engine.begin(2, PROMPTS[2:], SAMPLING)
    engine.begin(3, PROMPTS[:1], SAMPLING)
    engine.cancel(3)
    assert engine.counts() == {1: [1, 1], 2: [0, 0]}
    done = {}
    while engine.counts():
        done.update(engine.step())
    assert sorted(done) == [1, 2]
    for completion, expected in zip([*done[1], *done[2]], alone, strict=True):
        assert completion.token_ids == expected.token_ids
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 5, 11])
def test_a_commit_between_two_tokens_loses_none_and_shows_in_the_spans(tied_folder: Path, steps: int):
    bits = checkpoint(tied_folder)
    patch, new = changed(bits, share=0.5)
    engine = engine_on(tied_folder)
    engine.begin(1, PROMPTS, LONG)
    engine.stage(iter(patch))
    for _ in range(steps):
        assert engine.step() == []
    engine.commit((0, 1), b"1" * 32)
    completions = run_flight(engine)
    before, after = engine_on(tied_folder), engine_on(tied_folder)
    after.reload(lambda name: new[name], (0, 1), b"1" * 32)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert [(s.version, s.start, s.end) for s in completion.spans] == [((0, 0), 0, steps), ((0, 1), steps, 12)]
        old = before.score(prompt.token_ids, completion.token_ids, LONG)
        fresh = after.score(prompt.token_ids, completion.token_ids, LONG)
        np.testing.assert_allclose(completion.logprobs[:steps], old[:steps], atol=1e-5)
        np.testing.assert_allclose(completion.logprobs[steps:], fresh[steps:], atol=1e-5)
        assert max(abs(a - b) for a, b in zip(old[steps:], fresh[steps:], strict=True)) > 1e-4


def test_tokens_drawn_with_a_stale_cache_cannot_be_recomputed(tied_folder: Path):
    bits = checkpoint(tied_folder)
    patch, new = changed(bits, share=0.5)
    engine = engine_on(tied_folder)
    engine._carry = "stale"
    engine.begin(1, PROMPTS, LONG)
    engine.stage(iter(patch))
    for _ in range(6):
        engine.step()
    engine.commit((0, 1), b"1" * 32)
    completion = run_flight(engine)[0]
    after = engine_on(tied_folder)
    after.reload(lambda name: new[name], (0, 1), b"1" * 32)
    fresh = after.score(PROMPTS[0].token_ids, completion.token_ids, LONG)
    assert max(abs(a - b) for a, b in zip(completion.logprobs[6:], fresh[6:], strict=True)) > 1e-4


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sampling",
    [LONG, SamplingParams(12, temperature=0.0), SamplingParams(12, temperature=0.7, top_p=0.8, seed=3)],
)
def test_scores_equal_the_reported_log_probabilities(tied_folder: Path, arithmetic, sampling):
    engine = engine_on(tied_folder, arithmetic)
    assert isinstance(engine, ScoringEngine)
    tolerance = 1e-5 if arithmetic == "float32" else 0.1
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, sampling), strict=True):
        found = engine.score(prompt.token_ids, completion.token_ids, sampling)
        close = np.abs(np.subtract(found, completion.logprobs)) <= tolerance
        # Rounding may move one token over the border of the top-p cut. Two of so few tokens would be an error.
        assert close.sum() >= len(close) - (sampling.top_p < 1 and arithmetic == "bfloat16")
    with pytest.raises(ValueError, match="token id outside"):
        engine.score((1, 2), (40,), sampling)


def test_a_reload_drops_running_flights(tied_folder: Path):
    bits = checkpoint(tied_folder)
    engine = engine_on(tied_folder)
    engine.begin(1, PROMPTS, LONG)
    engine.reload(lambda name: bits[name], (0, 4), ROOT)
    assert engine.counts() == {}
    with pytest.raises(ValueError, match="outside"):
        engine.begin(2, [Prompt((99,))], LONG)
    assert engine.counts() == {}
    assert torch.is_grad_enabled()


def test_a_cache_that_a_model_does_not_use_is_detected() -> None:
    """With a cache, such a model would draw from the last token alone. Its logits show it, so it gets no cache."""
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    from node.engines.cohort import Cohort
    from node.engines.rows import can_cache

    class Forgetful(MambaForCausalLM):
        def forward(self, input_ids=None, past_key_values=None, use_cache=None, logits_to_keep=0, **_):
            return super().forward(input_ids=input_ids, use_cache=False, logits_to_keep=logits_to_keep)

    config = MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4, initializer_range=0.3)
    torch.manual_seed(0)
    model = MambaForCausalLM(config).eval()
    forgetful = Forgetful(config).eval()
    forgetful.load_state_dict(model.state_dict())
    assert can_cache(model)
    assert not can_cache(forgetful)

    def draw(model, cached):
        cohort = Cohort(model, [Prompt((3, 1, 4))], SamplingParams(max_tokens=6, temperature=0.0), cached=cached)
        while not cohort.done:
            cohort.step((0, 0))
        return cohort.completions()[0].token_ids

    assert draw(model, True) == draw(model, False) == draw(forgetful, False)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@torch.inference_mode()
def test_a_portable_sample_can_be_drawn_again_from_its_logits(tied_folder: Path, top_p: float):
    """In any batch, and by the definition alone: each token wins against the noise that another computes."""
    engine = engine_on(tied_folder, "float32")
    sampling = SamplingParams(12, 0.9, top_p, seed=2**63 + 5, options=SamplingOptions(portable=True))
    together = engine.generate(PROMPTS, sampling)
    for prompt, completion in zip(PROMPTS, together, strict=True):
        assert engine.generate([prompt], sampling)[0].token_ids == completion.token_ids
        text = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
        logits = engine._loaded()(input_ids=text).logits[0, len(prompt.token_ids) - 1 : -1]
        logprobs = kept_logprobs(logits.numpy(), 0.9, top_p=top_p)
        noise = np.stack([gumbel(sampling.seed, prompt.stream, at, logits.shape[-1]) for at in range(12)])
        assert margins(logprobs, noise, np.array(completion.token_ids)).max() < 1e-4
        other = np.stack([gumbel(sampling.seed + 1, prompt.stream, at, logits.shape[-1]) for at in range(12)])
        assert margins(logprobs, other, np.array(completion.token_ids)).mean() > 0.2
