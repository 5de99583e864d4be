"""A real vLLM draws by `SamplingOptions` like the transformers engine: the effects and the log-probabilities."""

from pathlib import Path
from typing import Any

import pytest
from options_kit import (
    OPTIONS,
    PROMPT,
    WITHIN,
    check_allowed,
    check_stop_text,
    draw,
    largest_difference,
    option_cells,
    transformers_engine,
)

from codec.adapter import AdapterSlots
from codec.errors import UsageError
from node.engines.base import ADAPTERS, ROUTES, TOP_LOGPROBS, EngineError, Prompt, SamplingOptions, SamplingParams
from node.engines.top_logprobs import is_top, read_top
from scenarios.engines.adapter_models import make_adapter
from scenarios.engines.engine_bench import SMALL

pytestmark = pytest.mark.vllm

WITHIN_ITSELF = 0.05
"""Largest difference in nats per token between vLLM's generation, token by token, and its scoring in one pass. 0.024
was measured on a CPU with AMX, where rounding moved one token across the border of `top_p`."""


@pytest.fixture(scope="module")
def other(untied: Path) -> Any:
    return transformers_engine(untied)


@pytest.mark.parametrize(("name", "how"), option_cells())
def test_scores_equal_the_reported_log_probabilities(one, other, name: str, how: dict[str, float]):
    completion, sampling = draw(one, OPTIONS[name], **how)
    assert largest_difference(completion.logprobs, one.score(PROMPT, completion.token_ids, sampling)) <= WITHIN_ITSELF
    assert largest_difference(completion.logprobs, other.score(PROMPT, completion.token_ids, sampling)) <= WITHIN / min(
        1, how["temperature"] or 1
    )


def test_it_says_how_much_it_runs_at_a_time(one):
    room = one.engine.room
    assert room.sequences == int(SMALL[SMALL.index("--max-num-seqs") + 1])
    assert room.tokens > 512, "room for more than one sequence of the greatest length"


def test_every_token_is_allowed_by_the_options(one):
    check_allowed(one)


def test_no_token_is_drawn_after_a_stop_text(one, other):
    check_stop_text(one, other)


def test_a_seed_picks_the_random_numbers(one):
    """Without other flights the seed also determines the tokens. vLLM does not promise that for shared batches."""
    seeded = SamplingOptions(seeded=True)
    first, again, other = (draw(one, seeded, temperature=2.0, seed=seed)[0].token_ids for seed in (5, 5, 6))
    assert first == again != other


def test_routes_of_a_dense_model_are_refused(one):
    assert ROUTES not in one.engine.abilities
    with pytest.raises(EngineError, match="cannot tell routes"):
        one.generate([Prompt((5, 9))], SamplingParams(3, options=SamplingOptions(routes=True)))


def test_an_adapter_without_room_is_refused_with_the_flag(one):
    assert ADAPTERS not in one.engine.abilities
    base = one.replica.layout
    made = make_adapter(base, AdapterSlots.reserve(base, 1, 4), "a", targets=("q_proj",), rank=4)
    with made.given(0, (0, 9)) as given, pytest.raises(UsageError, match="--enable-lora"):
        one.engine.stage_adapter(given)


@pytest.mark.parametrize("options", [SamplingOptions(top_logprobs=5), SamplingOptions(top_logprobs=20, top_k=3)])
def test_the_likeliest_tokens_are_those_of_the_sampled_distribution(one, other, options: SamplingOptions):
    assert TOP_LOGPROBS in one.engine.abilities
    completion, sampling = draw(one, options, temperature=0.8, seed=3)
    assert is_top(completion.top, len(completion.token_ids), options.top_logprobs)
    for i, row in enumerate(read_top(completion.top, options.top_logprobs)):
        kept = options.top_k or options.top_logprobs
        if len(row) > kept:  # vLLM keeps all that are as likely as the last one, which need not be so in another engine
            assert {value for _, value in row[kept:]} == {row[kept - 1][1]}
            continue
        assert len(row) == kept
        token, logprob = row[-1]
        before = (*completion.token_ids[:i], token)
        assert abs(one.score(PROMPT, before, sampling)[-1] - logprob) <= WITHIN
        assert abs(other.score(PROMPT, before, sampling)[-1] - logprob) <= WITHIN / 0.8
        if options.top_k:
            assert completion.token_ids[i] in dict(row)
    assert draw(one, SamplingOptions(top_k=3), seed=3)[0].top == b""
