import msgspec
import numpy as np
import pytest
import torch

from node.engines.base import OPTIONS, PORTABLE_DRAWS, Prompt, SamplingOptions, SamplingParams, needs, scoring_needs
from node.engines.sampling import draw, draw_portable, scores, uniforms
from node.engines.vllm.plugin.swarm_vllm import noise as torch_noise
from node.verification import draws
from node.verification.noise import gumbel


def test_random_numbers_depend_on_seed_and_stream_only():
    a = uniforms(7, [0, 1, 2], 5)
    b = uniforms(7, [2], 9)
    np.testing.assert_array_equal(a[2], b[0, :5])
    assert a.dtype == np.float64
    assert a.min() >= 0
    assert a.max() < 1
    assert len(np.unique(a)) == a.size
    assert not np.array_equal(a, uniforms(8, [0, 1, 2], 5))


def test_draw_follows_the_distribution_and_reports_it():
    logits = torch.tensor([0.0, 1.0, 2.0, float("-inf")]).expand(40_000, 4)
    uniform = torch.from_numpy(np.random.default_rng(0).random(40_000))
    token, logprob = draw(logits, uniform, SamplingParams(1, temperature=0.5))
    wanted = torch.softmax(logits[0] / 0.5, -1)
    shares = torch.bincount(token, minlength=4) / len(token)
    torch.testing.assert_close(shares, wanted, atol=0.01, rtol=0)
    torch.testing.assert_close(logprob, wanted.log()[token])
    assert logprob.dtype == torch.float32


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_draw_never_picks_a_token_of_probability_zero(temperature):
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0]]).expand(3, 4)
    uniform = torch.tensor([0.0, 0.5, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    token, _ = draw(logits, uniform, SamplingParams(1, temperature=temperature))
    assert token.tolist() == [1, 3, 3]


def test_top_p_keeps_the_likeliest_and_renormalises():
    probabilities = torch.tensor([0.1, 0.5, 0.25, 0.15])
    logits = probabilities.log().expand(1000, 4)
    uniform = torch.from_numpy(np.random.default_rng(1).random(1000))
    token, logprob = draw(logits, uniform, SamplingParams(1, top_p=0.7))
    assert set(token.tolist()) == {1, 2}
    torch.testing.assert_close(logprob.exp(), (probabilities / 0.75)[token])
    sure, logprob = draw(logits, uniform, SamplingParams(1, top_p=1e-6))
    assert set(sure.tolist()) == {1}
    torch.testing.assert_close(logprob, torch.zeros(1000), atol=1e-6, rtol=0)


def test_a_score_allows_for_rounding_at_the_border_of_a_nucleus():
    probabilities = torch.tensor([[0.1, 0.5, 0.25, 0.15]])
    tight = SamplingParams(1, top_p=0.72)  # .5 + .25 reach it; with the border, .15 may be drawn too
    found = scores(probabilities.log(), tight).exp()
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.5, 0.25, 0.15]]) / 0.75)
    loose = SamplingParams(1, top_p=0.6)
    torch.testing.assert_close(scores(probabilities.log(), loose).exp(), torch.tensor([[0.0, 0.5, 0.25, 0.0]]) / 0.75)
    for uncut in (SamplingParams(1), SamplingParams(1, temperature=0.0, top_p=0.5)):
        torch.testing.assert_close(scores(probabilities.log(), uncut).exp(), probabilities)


def test_greedy_takes_the_largest():
    token, logprob = draw(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([0.99]).double(), SamplingParams(1, 0.0))
    assert token.tolist() == [1]
    assert logprob[0] == torch.log_softmax(torch.tensor([1.0, 3.0, 2.0]), -1)[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_sampling_params_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**({"max_tokens": 1} | wrong))


@pytest.mark.parametrize("wrong", [{"token_ids": ()}, {"token_ids": (1,), "stream": -1}])
def test_prompts_are_checked(wrong):
    with pytest.raises(ValueError, match=r"token_ids|stream"):
        Prompt(**wrong)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 0, 0.8), (1.4, 5, 1.0), (1.0, 9, 0.5)]
)
def test_portable_draws_are_those_of_the_definition(temperature: float, top_k: int, top_p: float):
    """The engine's kernels draw what `node.verification.draws` defines, whatever the batch."""
    logits = torch.randn(40, 33, generator=torch.Generator().manual_seed(1)) * 2
    options = SamplingOptions(top_k=top_k, portable=True)
    sampling = SamplingParams(1, temperature, top_p, seed=5, options=options)
    token, logprob = draw_portable(logits, sampling, [(5, stream, 7) for stream in range(40)])
    wanted = draws.kept_logprobs(logits.numpy(), temperature, top_k=top_k, top_p=top_p)
    noise = np.stack([gumbel(5, stream, 7, 33) for stream in range(40)])
    assert token.tolist() == draws.draw(wanted, noise).tolist()
    assert torch.isfinite(logprob).all()
    alone, _ = draw_portable(logits[3:4], sampling, [(5, 3, 7)])
    assert int(alone) == int(token[3])


def test_only_engines_that_can_get_work_with_portable_draws():
    portable = SamplingParams(1, options=SamplingOptions(portable=True))
    assert needs(portable) == {OPTIONS, PORTABLE_DRAWS}
    assert not scoring_needs(portable)
    assert not portable.extra.reshapes
    plain = msgspec.msgpack.encode(msgspec.to_builtins(SamplingOptions()))
    assert plain == b"\x80"  # what older releases sign is unchanged


def test_noise_in_torch_has_the_bits_of_the_definition():
    rows = [(7, 9, 3), (2**64 - 1, 2**64 - 1, 2**32 - 1), (0, 0, 0), (5, 2**63, 17)]
    wanted = np.stack([gumbel(*row, 1003) for row in rows])
    places = torch_noise.places(rows)
    exact = torch_noise.exact_noise(places, torch.arange(1003).expand(4, -1))
    np.testing.assert_array_equal(exact.numpy().view(np.int64), wanted.view(np.int64))
    some = [1002, 7, 0, 5]
    found = torch_noise.exact_noise(places, torch.tensor(some)[:, None])
    np.testing.assert_array_equal(found.numpy()[:, 0], wanted[range(4), some])
    np.testing.assert_allclose(torch_noise.noise(places, 1003).numpy(), wanted, rtol=0, atol=1e-13)
    assert torch_noise.places([]).shape == (0, 5)


def test_nearly_tied_tokens_are_compared_by_exact_noise(monkeypatch: pytest.MonkeyPatch):
    logprobs = torch.log_softmax(torch.randn(30, 50, generator=torch.Generator().manual_seed(2)), -1)
    rows = torch_noise.places((1, 2, at) for at in range(30))
    noise = np.stack([gumbel(1, 2, at, 50) for at in range(30)])
    wanted = draws.draw(logprobs.double().numpy(), noise).tolist()
    assert torch_noise.draw(logprobs, rows).tolist() == wanted
    monkeypatch.setattr(torch_noise, "_TIE", 6.0)  # now most rows have several tokens that are near the best
    assert torch_noise.draw(logprobs, rows).tolist() == wanted
    monkeypatch.setattr(torch_noise, "exact_noise", lambda rows, tokens: torch.zeros(tokens.shape, dtype=torch.float64))
    assert torch_noise.draw(torch.zeros(1, 50), rows[:1]).tolist() == [int(np.argmax(noise[0] > noise[0].max() - 6.0))]
