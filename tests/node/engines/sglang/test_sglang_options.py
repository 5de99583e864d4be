"""A real SGLang draws by `SamplingOptions` like the transformers engine: the effects and the log-probabilities."""

import math
from pathlib import Path

import pytest
from options_kit import OPTIONS, PROMPT, WITHIN, check_allowed, check_stop_text, draw, largest_difference, option_cells

from node.engines.base import (
    JUDGES,
    PORTABLE_DRAWS,
    SCORE_OPTIONS,
    TOP_LOGPROBS,
    Prompt,
    SamplingOptions,
    SamplingParams,
)
from node.engines.base import OPTIONS as ABILITY
from node.engines.judgement import Claim
from node.engines.top_logprobs import is_top, read_top
from node.engines.vllm.invariance import class_of, is_invariant

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize(("name", "how"), option_cells())
def test_log_probabilities_are_those_of_the_distribution_that_the_options_leave(
    one, other, name: str, how: dict[str, float]
):
    completion, sampling = draw(one, OPTIONS[name], **how)
    scores = other.score(PROMPT, completion.token_ids, sampling)
    assert largest_difference(completion.logprobs, scores) <= WITHIN / min(1, how["temperature"] or 1)


def test_every_token_is_allowed_by_the_options(one):
    check_allowed(one)


def test_no_token_is_drawn_after_a_stop_text(one, other):
    check_stop_text(one, other)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_likeliest_tokens_are_those_of_the_distribution_that_was_drawn_from(one, other, temperature: float):
    assert TOP_LOGPROBS in one.engine.abilities
    options = SamplingOptions(top_k=3, logit_bias=((70, 2.0),), top_logprobs=5)
    completion, sampling = draw(one, options, temperature=temperature, seed=2)
    assert is_top(completion.top, len(completion.token_ids), 5)
    rows = read_top(completion.top, 5)
    for row, token, logprob in zip(rows, completion.token_ids, completion.logprobs, strict=True):
        assert dict(row)[token] == pytest.approx(logprob, abs=1e-5)
        if temperature:
            assert len(row) == 3
            assert sum(math.exp(value) for _, value in row) == pytest.approx(1.0, abs=1e-4)
        else:
            assert row[0][0] == token
    text = [*PROMPT]
    for row, token in list(zip(rows, completion.token_ids, strict=True))[:4]:
        found = [other.score(text, (each,), sampling)[0] for each, _ in row]
        assert largest_difference([value for _, value in row], found) <= WITHIN / min(1, temperature or 1)
        text.append(token)


def test_options_of_one_request_change_no_other(one):
    plain = SamplingParams(max_tokens=12, temperature=0.8, seed=11)
    (alone,) = one.generate([Prompt(PROMPT, 3)], plain)
    biased = SamplingParams(60, seed=5, options=SamplingOptions(logit_bias=((70, 50.0),), presence_penalty=1.0))
    beside = one.begin([Prompt(PROMPT, i) for i in range(3)], biased)
    (again,) = one.generate([Prompt(PROMPT, 3)], plain)
    assert again.token_ids[:4] == alone.token_ids[:4]  # rounding may differ between batches of different sizes
    assert all(one.token_ids.count(70) > 50 for one in beside.result(300.0))


def test_a_node_that_starts_it_names_the_ability(python: Path, tmp_path: Path):
    from node.engines.sglang.installed import installed
    from node.engines.sglang.launch import RunningSglang, StartedSglang
    from node.engines.sglang.server import ServerOptions

    started = StartedSglang(installed(python), tmp_path / "log", ServerOptions(0))
    assert started.abilities == {ABILITY, SCORE_OPTIONS, JUDGES, PORTABLE_DRAWS}
    assert not RunningSglang("http://127.0.0.1:1").abilities, "nobody knows its plugin"


def test_without_the_flag_for_it_no_replay_is_offered(one):
    attached = one.engine._attached()
    assert (attached.front.hello.judges, attached.front.hello.replays) == (True, False)
    assert not is_invariant(attached.front)
    assert class_of(attached.front, attached.ranks, "recompute", "sglang").endswith("/torch_nati/tp1")
    sampling = SamplingParams(12, top_p=0.9, seed=3, options=SamplingOptions(portable=True))
    (drawn,) = one.generate([Prompt(PROMPT, 1)], sampling)
    (judged,) = one.judge([Claim(PROMPT, drawn.token_ids, sampling, 1)])
    assert max(judged.margins) < 0.15
    assert largest_difference(judged.scores, drawn.logprobs) < 0.15
