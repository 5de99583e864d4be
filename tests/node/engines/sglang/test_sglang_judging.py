"""A real SGLang judges what engines drew: margins and scores in one pass, and its own draws by replays."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from node.engines.base import EngineError, Prompt, SamplingOptions, SamplingParams
from node.engines.judgement import Claim
from node.engines.sglang.plugin.swarm_sglang.calls import ROWS_ALIKE
from node.engines.vllm.invariance import class_of, is_invariant
from scenarios.engines.engine_models import step_of
from scenarios.engines.sglang_bench import SMALL, bench

pytestmark = pytest.mark.sglang

TOKENS = 18
PROMPTS = [Prompt(tuple(range(3 + i, 20 + 45 * i)), i) for i in range(4)]
"""Of 17 to 152 tokens."""
ROUNDING = 0.15
"""Nats by which an honest token may lose: twice the error of a log-probability in bfloat16."""
HOW = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "greedy": {"temperature": 0.0},
    "several": {"top_k": 50, "top_p": 0.9, "temperature": 1.3, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    "least": {"min_tokens": 14, "logit_bias": ((70, 9.0),), "stop_tokens": (70,)},
}
IN_CI = ("plain", "several")
HOWS = [how if how in IN_CI else pytest.param(how, marks=pytest.mark.long) for how in HOW]


@pytest.fixture(scope="module")
def one(model: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """With rows whose bits depend on no other row."""
    with bench(model, tmp_path_factory.mktemp("alike"), python, threads=1, more=(*SMALL, ROWS_ALIKE)) as live:
        yield live


def sampling_of(seed: int = 2**63 + 9, tokens: int = TOKENS, **how: Any) -> SamplingParams:
    fields = {name: how.pop(name) for name in ("temperature", "top_p", "stop_tokens") if name in how}
    return SamplingParams(tokens, seed=seed, options=SamplingOptions(portable=True, **how), **fields)


def claims_of(engine: Any, drawn_by: SamplingParams, **more: Any) -> tuple[list[Claim], list[tuple[float, ...]]]:
    """(claims of what an engine draws, the log-probabilities that it tells)."""
    found = engine.generate(PROMPTS, drawn_by)
    claims = [Claim(p.token_ids, c.token_ids, drawn_by, p.stream, **more) for p, c in zip(PROMPTS, found, strict=True)]
    return claims, [completion.logprobs for completion in found]


@pytest.mark.parametrize("how", HOWS)
def test_honest_tokens_are_scored_in_one_pass_by_any_engine(one, other, how: str):
    sampling = sampling_of(**HOW[how])
    for author in (one, other):
        claims, told = claims_of(author, sampling)
        for judged in (one.judge(claims), other.judge(claims)):
            for found, logprobs in zip(judged, told, strict=True):
                assert max(found.margins) < ROUNDING
                assert np.mean(found.margins) < 0.02
                np.testing.assert_allclose(found.scores, logprobs, atol=ROUNDING)
    claim = claims[0]
    assert one.score(claim.prompt, claim.token_ids, sampling) == one.judge([claim])[0].scores
    assert one.judge([claim])[0].version == (0, one.version)


def test_a_second_draw_is_found_and_so_are_impossible_tokens(one):
    claims, _ = claims_of(one, sampling_of(seed=77))
    asked = [Claim(claim.prompt, claim.token_ids, sampling_of(), claim.stream) for claim in claims]
    for judged in (one.judge(asked), one.judge([Claim(c.prompt, c.token_ids, c.sampling, c.stream, replay=True)
                                                for c in asked])):  # fmt: skip
        assert min(np.mean(found.margins) for found in judged) > 0.2
    few = sampling_of(top_k=1)
    worst = Claim(PROMPTS[0].token_ids, (7, 8, 9), few, 0)
    (found,) = one.judge([worst])
    assert min(found.scores) == -np.inf
    assert max(found.margins) == 8.0


def test_the_probe_finds_that_rows_round_alike_and_the_class_is_named(one):
    attached = one.engine._attached()
    assert is_invariant(attached.front)
    found = class_of(attached.front, attached.ranks, "recompute", "sglang")
    assert found.startswith("class:sglang/0.5.23/cpu-")
    assert found.endswith("/blocks/tp1")


@pytest.mark.parametrize("how", HOWS)
def test_honest_draws_replay_bit_for_bit_beside_other_sequences(one, how: str):
    sampling = sampling_of(**HOW[how])
    beside = one.begin([Prompt((9, 8, 7), 55), Prompt((9, 8), 56)], SamplingParams(max_tokens=30, top_p=0.8, seed=5))
    claims, told = claims_of(one, sampling, replay=True)
    beside.result(300.0)
    middle = [Claim(c.prompt, c.token_ids, sampling, c.stream, start=9, replay=True) for c in claims]
    for found, logprobs in zip(one.judge(claims), told, strict=True):
        assert (found.scores, set(found.margins)) == (logprobs, {0.0})
    for found, logprobs in zip(one.judge(middle), told, strict=True):
        assert (found.scores, set(found.margins)) == (logprobs[9:], {0.0})


def test_after_a_commit_a_text_that_is_read_again_replays_under_the_version_after_it(one):
    one.engine.policy = "recompute"
    sampling = sampling_of(tokens=200)
    for attempt in range(4):
        one.stage(step_of(one.replica, 60 + attempt, 0.02))
        flight = one.begin(PROMPTS[:1], sampling)
        while not flight.done() and min(one.engine.counts().get(one.flights) or [0]) < 16:
            pass
        one.commit()
        (drawn,) = flight.result(300.0)
        if len(drawn.spans) == 2:
            break
    one.engine.policy = "continue"
    before, after = drawn.spans
    whole = Claim(PROMPTS[0].token_ids, drawn.token_ids, sampling, 0, replay=True)
    (found,) = one.judge([Claim(whole.prompt, whole.token_ids, sampling, 0, start=after.start, replay=True)])
    assert (found.version, found.scores) == (after.version, drawn.logprobs[after.start :])
    assert not any(found.margins)
    (all_of_it,) = one.judge([whole])
    assert all_of_it.scores[: before.end] != drawn.logprobs[: before.end]


def test_a_judgement_into_which_a_commit_falls_is_none(one):
    long = Claim(PROMPTS[0].token_ids, tuple(range(3, 403)), sampling_of(tokens=400), 0, replay=True)
    one.stage(step_of(one.replica, 80, 0.02))
    asked = one.begin_judge(long)
    one.generate(PROMPTS[:1], SamplingParams(2))
    one.commit()
    with pytest.raises(EngineError, match="another version"):
        asked.result(300.0)


def test_users_own_requests_that_look_like_ours_do_no_harm(one):
    def ask(custom: Any, **more: Any) -> int:
        connection = http.client.HTTPConnection(urlsplit(one.url).netloc, timeout=300.0)
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "custom_params": custom}} | more
        connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status

    logprobs = {"return_logprob": True, "top_logprobs_num": 1}
    for custom in (
        {"swarm": 5}, {"swarm": "x"}, {"swarm": '{"logit_bias":[[4000,1]]}'}, {"swarm": '{"structure":"{"}'},
        {"swarm": '{"banned":[[]]}'}, {"swarm_asked": '{"prompt":9}'}, {"swarm_asked": '{"prompt":3,"claimed":[5]}'},
        {"swarm_asked": '{"prompt":3,"noise":[-1,5]}'},
    ):  # fmt: skip
        assert ask(custom) == 400, custom
    assert ask({"swarm_asked": '{"prompt":3,"claimed":[999999]}'}, **logprobs) == 400
    assert ask({"swarm_asked": '{"prompt":3,"claimed":[5,6]}'}, **logprobs) == 200
    with pytest.raises(EngineError, match="outside 0 to"):
        one.generate(PROMPTS[:1], SamplingParams(2, options=SamplingOptions(logit_bias=((99999, 1.0),))))
    assert len(one.generate(PROMPTS[:1], SamplingParams(4))[0].token_ids) == 4
