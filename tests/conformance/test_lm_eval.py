"""The requests of lm-eval-harness: its model `local-completions` scores texts by `echo` and `logprobs`.

The bodies are those that `lm_eval/models/openai_completions.py` of lm-eval 0.4 makes, and the answers are read as its
`parse_logprobs` reads them. Here they are sent by the OpenAI Python client.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from openai import OpenAI
from parameters_kit import Asker, asking, make_engine, tokens_of

from node.engines.base import ABILITIES, PROMPT_LOGPROBS, Prompt, SamplingParams
from node.engines.transformers import TransformersEngine

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    return make_engine(tmp_path_factory.mktemp("letters"))


@pytest.fixture
async def ask(tmp_path: Path, engine: TransformersEngine) -> AsyncIterator[Asker]:
    async with asking(tmp_path, engine) as asker:
        yield asker


def parse_logprobs(answer: Any, context_lengths: list[int]) -> list[tuple[float, bool]]:
    """As `LocalCompletionsAPI.parse_logprobs`: (log-probability of the continuation, whether it is the greedy one)."""
    found = []
    for choice, start in zip(sorted(answer.choices, key=lambda c: c.index), context_lengths, strict=True):
        assert start > 0
        logprobs = sum(choice.logprobs.token_logprobs[start:-1])
        tokens, tops = choice.logprobs.tokens[start:-1], choice.logprobs.top_logprobs[start:-1]
        greedy = all(token == max(top, key=top.get) for token, top in zip(tokens, tops, strict=True))
        found.append((logprobs, greedy))
    return found


def _use(ask: Asker, body: dict[str, Any]) -> Any:
    return OpenAI(base_url=f"{ask.url}/v1", api_key="x", max_retries=0).completions.create(**body)


async def test_loglikelihoods(ask: Asker):
    """A batch of contexts with continuations, as token ids, one of which is what the model itself would write."""
    context, plain = tokens_of("hello"), SamplingParams(1)
    (greedy,) = ask.engine.engine.generate([Prompt(tuple(context))], SamplingParams(4, temperature=0.0))
    continuations = [list(greedy.token_ids), tokens_of("wxyz"), tokens_of("a")]
    body = {
        "model": "policy", "prompt": [context + rest for rest in continuations], "temperature": 0, "max_tokens": 1,
        "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    answer = await trio.to_thread.run_sync(_use, ask, body)
    found = parse_logprobs(answer, [len(context)] * 3)
    for (logprob, is_greedy), rest in zip(found, continuations, strict=True):
        assert logprob == pytest.approx(sum(ask.engine.engine.score(context, rest, plain)), abs=1e-4)
        assert is_greedy == (rest == continuations[0])


async def test_the_prompt_alone_is_scored_with_no_tokens_to_draw(ask: Asker):
    """OpenAI's own idiom: `max_tokens` of 0."""
    body = {"model": "policy", "prompt": "hello world", "max_tokens": 0, "logprobs": 1, "echo": True}
    answer = await trio.to_thread.run_sync(_use, ask, body)
    (choice,) = answer.choices
    prompt = choice.prompt_token_ids
    assert (choice.text, choice.token_ids, answer.usage.completion_tokens) == ("hello world", [], 0)
    assert choice.logprobs.token_logprobs[0] is None
    wanted = ask.engine.engine.score(prompt[:1], prompt[1:], SamplingParams(1))
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(list(wanted), abs=1e-5)
    assert (choice.versions, choice.version_start, choice.version_end) == ([], [0, 0], [0, 0])


async def test_a_stream_begins_with_the_prompt_and_its_scores(ask: Asker):
    body = {"model": "policy", "prompt": "hello", "max_tokens": 3, "logprobs": 2, "echo": True, "temperature": 0}

    def read() -> list[Any]:
        return list(_use(ask, body | {"stream": True}))

    whole = (await trio.to_thread.run_sync(_use, ask, body)).choices[0]
    parts = [part.choices[0] for part in await trio.to_thread.run_sync(read)]
    assert "".join(part.text for part in parts) == whole.text
    assert [at for part in parts for at in part.logprobs.token_logprobs] == whole.logprobs.token_logprobs


async def test_a_node_that_cannot_gets_no_such_request(tmp_path: Path, engine: TransformersEngine):
    """A swarm of such nodes alone answers with the field's name."""
    async with asking(tmp_path, engine, abilities=ABILITIES - {PROMPT_LOGPROBS}) as ask:
        for fields, param in (({"echo": True, "logprobs": 1}, "echo"), ({"prompt_logprobs": 1}, "prompt_logprobs")):
            reply = await ask("completions", **fields)
            assert (reply.status, reply.param) == (400, param)
            assert "no engine here scores prompts" in reply.why
        other = await ask.swarm.add(2, engine=type(ask.engine)(engine))
        before = ask.engine.drawn
        assert (await ask("completions", prompt_logprobs=1)).status == 200
        assert (ask.engine.drawn, other.drawn > 0) == (before, True)


async def test_too_many_scores_are_refused_before_anything_is_drawn(ask: Asker):
    many = {"prompt": [[1] * 100] * 256, "max_tokens": 1, "prompt_logprobs": 20}
    assert (await ask("completions", **many | {"prompt": [[1] * 100] * 2})).status == 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("node.gateway.parsed_request.MAX_SCORES_BYTES", 1 << 20)
        drawn = ask.engine.drawn
        reply = await ask("completions", **many)
        assert (reply.status, reply.param, ask.engine.drawn) == (400, "prompt_logprobs", drawn)
        assert "at most 1 MiB" in reply.why
