"""`SamplingOptions`: their effect on logits, stop texts, and draws that do not depend on other flights."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_transformers import engine_on
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from node.engines.base import Prompt, SamplingOptions, SamplingParams, needs, scoring_needs
from node.engines.sampling import log_probabilities, reshaped, scores
from node.engines.texts import Continuation, StopText

VOCABULARY = 8
TOKENS = st.integers(0, VOCABULARY - 1)


def naive(
    logits: list[float], prompt: list[int], drawn: list[int], options: SamplingOptions, stops: tuple[int, ...]
) -> list[float]:
    """The logits by the documentation of `SamplingOptions`, one token at a time."""
    out = []
    for token, logit in enumerate(logits):
        value = logit if not options.allowed or token in options.allowed else -math.inf
        for *before, last in options.banned:
            if token == last and drawn[len(drawn) - len(before) :] == before:
                value = -math.inf
        if len(drawn) < options.min_tokens and token in stops:
            value = -math.inf
        value += dict(options.logit_bias).get(token, 0.0)
        if token in prompt or token in drawn:
            value = value / options.repetition_penalty if value > 0 else value * options.repetition_penalty
        value -= options.frequency_penalty * drawn.count(token)
        value -= options.presence_penalty * (token in drawn)
        out.append(value)
    return out


@st.composite
def some_options(draw: st.DrawFn) -> SamplingOptions:
    penalty = st.floats(-2, 2, width=16)
    return SamplingOptions(
        min_tokens=draw(st.integers(0, 3)),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        repetition_penalty=draw(st.sampled_from((0.5, 1.0, 2.0))),
        logit_bias=tuple(sorted(draw(st.dictionaries(TOKENS, st.floats(-4, 4, width=16), max_size=3)).items())),
        allowed=tuple(sorted(draw(st.sets(TOKENS)))),
        banned=tuple(draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=4))),
    )


@given(
    st.lists(st.floats(-4, 4, width=16), min_size=VOCABULARY, max_size=VOCABULARY),
    st.lists(TOKENS, min_size=1, max_size=4),
    st.lists(TOKENS, max_size=5),
    some_options(),
    st.sets(TOKENS, max_size=2).map(tuple),
)
def test_logits_are_reshaped_as_documented(logits, prompt, drawn, options, stops):
    try:
        sampling = SamplingParams(9, stop_tokens=stops, options=options)
    except ValueError:
        return  # these options leave no token
    rows = torch.tensor([logits, [0.0] * VOCABULARY])
    prompts, others = torch.tensor([prompt, prompt]), [torch.tensor([token, 0]) for token in drawn]
    found = reshaped(rows, prompts, others, sampling)
    np.testing.assert_allclose(found[0].numpy(), naive(logits, prompt, drawn, options, stops), rtol=1e-5, atol=1e-5)
    assert torch.equal(rows[0], torch.tensor(logits)), "the model's logits stay as they are"


def test_options_that_reshape_nothing_return_the_same_logits():
    logits = torch.randn(2, VOCABULARY)
    for options in (SamplingOptions(), SamplingOptions(seeded=True, exact=True, stop_texts=("a",), special=True)):
        assert reshaped(logits, torch.zeros(2, 1, dtype=torch.int64), [], SamplingParams(1, options=options)) is logits
        assert not scoring_needs(SamplingParams(1, options=options))
    assert not needs(SamplingParams(1))
    assert scoring_needs(SamplingParams(1, options=SamplingOptions(top_k=1)))


def test_min_p_and_top_k_keep_the_likeliest_and_renormalise():
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    for options, top_p, wanted in (
        (SamplingOptions(top_k=2), 1.0, [4 / 7, 3 / 7, 0, 0]),
        (SamplingOptions(min_p=0.5), 1.0, [4 / 9, 3 / 9, 2 / 9, 0]),
        (SamplingOptions(min_p=0.4, top_k=3), 0.75, [4 / 7, 3 / 7, 0, 0]),  # 0.44 and 0.33 of the three reach it
    ):
        sampling = SamplingParams(1, top_p=top_p, options=options)
        found = log_probabilities(probabilities.log(), sampling).exp()
        torch.testing.assert_close(found, torch.tensor([wanted], dtype=torch.float32))
    near = torch.tensor([[0.4, 0.31, 0.29]])
    found = scores(near.log(), SamplingParams(1, options=SamplingOptions(top_k=2))).exp()
    torch.testing.assert_close(found, near / 0.71), "a score allows for rounding at the border"


# ---------------------------------------------------------------- stop texts

BYTES = pre_tokenizers.ByteLevel.alphabet()


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token a byte, so a character may have several."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(BYTES))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()
TEXT = st.text("abcé😀", max_size=12)


@given(TEXT, st.lists(st.text("abcé😀", min_size=1, max_size=3), min_size=1, max_size=3), st.integers(0, 6))
def test_a_stop_text_is_found_with_the_token_that_completes_it(text, stops, least):
    tokens = TOKENIZER.encode(text).ids
    ends = [len(text[:i].encode()) for i in range(len(text) + 1)]
    wanted = min(
        ((ends[at + len(stop)], at) for stop in stops for at in range(len(text))
         if text.startswith(stop, at) and ends[at + len(stop)] > least), default=None,
    )  # fmt: skip
    stop = StopText(TOKENIZER, [], stops, least=least)
    found = next((i for i, token in enumerate(tokens, 1) if stop.add(token)), None)
    assert found == (wanted and wanted[0])
    if wanted is not None:
        assert stop.span is not None
        assert text[slice(*stop.span)] in stops
        assert ends[stop.span[1]] == found


def test_invalid_utf_8_ends_nothing():
    text = Continuation(TOKENIZER, [])
    junk = TOKENIZER.encode("😀").ids[:2] * 3 + TOKENIZER.encode("ok").ids
    assert "".join(text.add(token) for token in junk).endswith("ok")


# ---------------------------------------------------------------- the transformers engine


def test_exact_draws_do_not_depend_on_other_flights(tied_folder: Path):
    engine = engine_on(tied_folder)
    sampling = SamplingParams(12, seed=5, options=SamplingOptions(seeded=True, exact=True))
    prompts = [Prompt((1, 2, 3), sample) for sample in range(4)]
    alone = [engine.generate([prompt], sampling)[0] for prompt in prompts]
    assert engine.generate(prompts, sampling) == alone
    engine.begin(1, [Prompt((7, 8, 9), sample) for sample in range(20)], SamplingParams(30))
    engine.begin(2, prompts, sampling)
    found = dict(itertools.chain.from_iterable(engine.step() for _ in range(12)))
    engine.cancel(1)
    assert found[2] == alone


def test_options_that_do_not_fit_the_model_are_refused_before_any_draw(tied_folder: Path):
    engine = engine_on(tied_folder)  # 40 tokens, and no tokenizer
    for options, why in (
        (SamplingOptions(logit_bias=((40, 1.0),)), "token id outside"),
        (SamplingOptions(allowed=(1, 40)), "token id outside"),
        (SamplingOptions(banned=((1, 40),)), "token id outside"),
        (SamplingOptions(banned=tuple((token,) for token in range(40))), "no token of the vocabulary"),
        (SamplingOptions(stop_texts=("a",)), "tokenizer"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.begin(1, [Prompt((1,))], SamplingParams(2, options=options))
    assert not engine.counts()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_scores_with_options_equal_the_reported_log_probabilities(tied_folder: Path, temperature: float):
    engine = engine_on(tied_folder)
    options = SamplingOptions(
        min_tokens=4, top_k=20, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.3,
        logit_bias=((3, 2.0),), banned=((4, 5),), allowed=tuple(range(2, 39)),
    )  # fmt: skip
    sampling = SamplingParams(10, temperature, 0.9, 3, (7,), options)
    (completion,) = engine.generate([Prompt((1, 2, 3))], sampling)
    found = engine.score((1, 2, 3), completion.token_ids, sampling)
    np.testing.assert_allclose(found, completion.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("temperature", "top_p", "options"),
    [
        (1.0, 1.0, SamplingOptions()),
        (0.7, 0.8, SamplingOptions(top_k=12)),
        (1.5, 1.0, SamplingOptions(min_p=0.3, logit_bias=((3, 2.0),))),
        (0.0, 0.5, SamplingOptions(logit_bias=((3, 2.0),))),
    ],
)
def test_log_probabilities_are_those_of_the_sampled_distribution(
    tied_folder: Path, temperature: float, top_p: float, options: SamplingOptions
):
    """Compared with the logits of transformers' own model, computed with numpy. Greedy: at temperature 1."""
    from transformers import AutoModelForCausalLM

    prompt = (1, 2, 3)
    sampling = SamplingParams(10, temperature, top_p, 3, options=options)
    (completion,) = engine_on(tied_folder).generate([Prompt(prompt)], sampling)
    model = AutoModelForCausalLM.from_pretrained(tied_folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1].double().numpy()
    plain = []
    for row, token, reported in zip(logits, completion.token_ids, completion.logprobs, strict=True):
        chances = _softmax(row)
        plain.append(math.log(chances[token]))
        for biased, bias in options.logit_bias:
            row[biased] += bias
        chances = _softmax(row / (temperature or 1.0))
        if temperature:
            order = np.argsort(-chances)
            kept = chances * (chances >= options.min_p * chances.max())
            kept[order[options.top_k or len(order) :]] = 0.0
            kept /= kept.sum()
            before = np.concatenate(([0.0], kept[order].cumsum()[:-1]))
            kept[order[before >= top_p]] = 0.0
            chances = kept / kept.sum()
        assert reported == pytest.approx(math.log(chances[token]), abs=1e-3)
    alike = np.allclose(plain, completion.logprobs, atol=1e-3)
    assert alike == (temperature in (0.0, 1.0) and not options.logit_bias), "the two distributions must differ"


def _softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max())
    return raised / raised.sum()
