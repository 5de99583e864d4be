"""A real vLLM draws by `SamplingOptions` like the transformers engine: the effects and the log-probabilities."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codec.adapter import AdapterSlots
from codec.errors import UsageError
from node.engines.base import ADAPTERS, ROUTES, TOP_LOGPROBS, EngineError, Prompt, SamplingOptions, SamplingParams
from node.engines.top_logprobs import is_top, read_top
from scenarios.engines.adapter_models import make_adapter
from scenarios.engines.engine_bench import SMALL

pytestmark = pytest.mark.vllm

PROMPT = tuple(range(3, 40))
TOKENS = 24
WITHIN = 0.1
"""Largest difference in nats per token between two engines' arithmetic: the ledger's tolerance."""
WITHIN_ITSELF = 0.05
"""Largest difference in nats per token between vLLM's generation, token by token, and its scoring in one pass. 0.024
was measured on a CPU with AMX, where rounding moved one token across the border of `top_p`."""
OPTIONS = {
    "top_k": SamplingOptions(top_k=3),
    "min_p": SamplingOptions(min_p=0.2),
    "presence": SamplingOptions(presence_penalty=2.0),
    "frequency": SamplingOptions(frequency_penalty=2.0),
    "repetition": SamplingOptions(repetition_penalty=3.0),
    "bias": SamplingOptions(logit_bias=((70, 3.0), (71, 3.0), (72, -5.0))),
    "allowed": SamplingOptions(allowed=tuple(range(60, 80))),
    "banned": SamplingOptions(allowed=(70, 71, 72), banned=((70,), (71, 71))),
    "least": SamplingOptions(min_tokens=8, logit_bias=((70, 20.0),)),
    "all": SamplingOptions(
        min_tokens=4, top_k=20, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.3,
        logit_bias=((70, 2.0),), banned=((71, 72),),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def other(untied: Path) -> Any:
    """The same weights in a transformers engine."""
    from node.engines.transformers import TransformersEngine

    engine = TransformersEngine(threads=1, device="cpu")
    engine.load(untied)
    return engine


def draw(one: Any, options: SamplingOptions, **more: Any) -> tuple[Any, SamplingParams]:
    sampling = SamplingParams(**{"max_tokens": TOKENS, "stop_tokens": (70,)} | more, options=options)
    (completion,) = one.generate([Prompt(PROMPT, 1)], sampling)
    return completion, sampling


def largest_difference(claimed: Any, found: Any) -> float:
    return float(np.abs(np.array(claimed) - np.array(found)).mean())


@pytest.mark.parametrize(
    "how", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 4}, {"temperature": 0.8, "top_p": 0.9}]
)
@pytest.mark.parametrize("name", OPTIONS)
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
    hot = {"temperature": 2.0, "seed": 9}
    assert set(draw(one, OPTIONS["allowed"], **hot)[0].token_ids) <= set(range(60, 80))
    banned = draw(one, OPTIONS["banned"], **hot)[0].token_ids
    assert 70 not in banned
    assert (71, 71) not in set(itertools.pairwise(banned))
    for least in (0, 8):
        completion, _ = draw(one, SamplingOptions(min_tokens=least, logit_bias=((70, 60.0),)))
        assert (completion.token_ids.index(70), completion.finish_reason) == (least, "stop")


def test_no_token_is_drawn_after_a_stop_text(one, other):
    """vLLM ends at the same token as the transformers engine."""
    from tokenizers import Tokenizer

    from node.engines.texts import Continuation

    letters = SamplingOptions(allowed=tuple(range(36, 62)))
    plain, _ = draw(one, letters, temperature=2.0, seed=1)
    text = Continuation(Tokenizer.from_file(str(other._texts.path)), PROMPT)
    parts = [text.add(token) for token in plain.token_ids]
    stop = "".join(parts[6:9])
    wanted = next(i for i in range(1, TOKENS) if stop in "".join(parts[:i]))
    options = SamplingOptions(allowed=letters.allowed, stop_texts=(stop, "nowhere"))
    completion, _ = draw(one, options, temperature=2.0, seed=1)
    assert (completion.token_ids, completion.finish_reason) == (plain.token_ids[:wanted], "stop")
    assert completion.spans[-1].end == wanted < TOKENS
    later = SamplingOptions(allowed=letters.allowed, stop_texts=(stop,), min_tokens=wanted)
    assert len(draw(one, later, temperature=2.0, seed=1)[0].token_ids) > wanted
    forced = SamplingOptions(logit_bias=((40, 100.0),), stop_texts=("".join(parts_of(other, (40, 40, 40))),))
    mine = other.generate([Prompt(PROMPT)], SamplingParams(TOKENS, 0.0, options=forced))[0]
    assert (mine.token_ids, mine.finish_reason) == ((40, 40, 40), "stop")
    assert draw(one, forced, temperature=0.0)[0].token_ids == mine.token_ids


def parts_of(engine: Any, tokens: tuple[int, ...]) -> list[str]:
    from tokenizers import Tokenizer

    from node.engines.texts import Continuation

    text = Continuation(Tokenizer.from_file(str(engine._texts.path)), PROMPT)
    return [text.add(token) for token in tokens]


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
        assert len(row) == (options.top_k or options.top_logprobs)
        token, logprob = row[-1]
        before = (*completion.token_ids[:i], token)
        assert abs(one.score(PROMPT, before, sampling)[-1] - logprob) <= WITHIN
        assert abs(other.score(PROMPT, before, sampling)[-1] - logprob) <= WITHIN / 0.8
        if options.top_k:
            assert completion.token_ids[i] in dict(row)
    assert draw(one, SamplingOptions(top_k=3), seed=3)[0].top == b""
