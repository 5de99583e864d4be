"""A real vLLM on CPUs replays what it drew: the same bits alone, beside other sequences, and after commits."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.engines.base import JUDGES, OPTIONS, REPLAYS, Completion, EngineError, Prompt, SamplingOptions, SamplingParams
from node.engines.judgement import Claim, Judgement
from node.engines.vllm.engine import VllmEngine
from node.engines.vllm.invariance import class_of, is_invariant
from node.verification.classes import ArithmeticClass
from scenarios.engines.engine_models import step_of

pytestmark = pytest.mark.vllm

TOKENS = 18
PROMPTS = [Prompt(tuple(range(3 + i, 20 + 45 * i)), i) for i in range(4)]
"""Of 17 to 149 tokens. The longest is longer than a block of vLLM's cache."""
WITHIN_S = 300.0
HOW = {
    "plain": {},
    "top_p": {"top_p": 0.95},
    "cold": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "least": {"min_tokens": 14, "logit_bias": ((70, 9.0),), "stop_tokens": (70,)},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "top_k": 50},
    "banned": {"allowed": tuple(range(60, 90)), "banned": ((70,), (71, 72), (72, 73)), "min_p": 0.01},
}


def sampling_of(seed: int = 2**63 + 9, tokens: int = TOKENS, portable: bool = True, **how: Any) -> SamplingParams:
    fields = {name: how.pop(name) for name in ("temperature", "top_p", "stop_tokens") if name in how}
    return SamplingParams(tokens, seed=seed, options=SamplingOptions(portable=portable, **how), **fields)


def claim_of(prompt: Prompt, drawn: Completion, sampling: SamplingParams, start: int = 0) -> Claim:
    return Claim(prompt.token_ids, drawn.token_ids, sampling, prompt.stream, start=start, replay=True)


def unlike(claim: Claim, drawn: Completion, found: Judgement) -> int:
    """The number of tokens with another bit or with a margin."""
    margins = found.margins or (0.0,) * claim.tokens
    claimed = drawn.logprobs[claim.start : len(claim.token_ids)]
    pairs = zip(claimed, found.scores, margins, strict=True)
    return sum(theirs != ours or margin > 0.0 for theirs, ours, margin in pairs)


@pytest.fixture(scope="module")
def live(untied: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A vLLM whose running sequences read their text again after a commit."""
    from scenarios.engines.engine_bench import bench

    with bench(untied, tmp_path_factory.mktemp("replay"), python, threads=1) as found:
        found.engine.policy = "recompute"
        yield found


def test_the_probe_finds_equal_bits_and_the_class_has_a_fingerprint(live):
    attached = live.engine._attached()
    assert is_invariant(attached.front)
    label = class_of(attached.front, attached.ranks, "recompute")
    found = ArithmeticClass.named({label}, "vllm")
    assert (found.engine, found.dtype, found.parallelism) == ("vllm", "bfloat16", 1)
    assert len(found.device.rsplit("-", 1)[1]) == 8
    assert class_of(attached.front, attached.ranks, "continue") != label
    assert class_of(attached.front, attached.ranks, "drain") == label


@pytest.mark.parametrize("how", HOW)
def test_honest_draws_replay_bit_for_bit_beside_other_sequences(live, how: str):
    sampling = sampling_of(**HOW[how])
    other = live.begin([Prompt((9, 8, 7), 55), Prompt((9, 8), 56)], SamplingParams(max_tokens=30, top_p=0.8, seed=5))
    drawn = live.generate(PROMPTS, sampling)
    assert live.generate(PROMPTS[1:2], sampling)[0] == drawn[1]
    other.result(WITHIN_S)
    claims = [claim_of(prompt, one, sampling) for prompt, one in zip(PROMPTS, drawn, strict=True)]
    middle = [
        claim_of(prompt, one, sampling, len(one.token_ids) // 2) for prompt, one in zip(PROMPTS, drawn, strict=True)
    ]
    found = live.judge(claims) + live.judge(middle[:1]) + live.judge(middle[1:])
    for claim, one, judged in zip(claims + middle, drawn * 2, found, strict=True):
        assert len(judged.margins) == claim.tokens
        assert unlike(claim, one, judged) == 0
    if how == "least":  # a stop token ends an honest sample
        assert {one.token_ids[-1] for one in drawn} == {70}


def test_draws_that_are_not_portable_replay_without_margins(live):
    sampling = sampling_of(portable=False, temperature=0.8, top_p=0.9)
    drawn = live.generate(PROMPTS, sampling)
    for prompt, one in zip(PROMPTS, drawn, strict=True):
        claim = claim_of(prompt, one, sampling)
        (found,) = live.judge([claim])
        assert (unlike(claim, one, found), found.margins) == (0, ())


def test_a_token_that_is_not_the_winner_has_a_margin(live):
    for how in ({}, {"temperature": 0.0}):
        sampling = sampling_of(**how)
        (drawn,) = live.generate(PROMPTS[:1], sampling)
        ids = list(drawn.token_ids)
        ids[5] = next(token for token in range(30, 40) if token != ids[5])
        claim = Claim(PROMPTS[0].token_ids, tuple(ids), sampling, PROMPTS[0].stream, replay=True)
        (found,) = live.judge([claim])
        assert not any(found.margins[:5])
        assert found.margins[5] > 0
        assert found.scores[:5] == drawn.logprobs[:5]
    cut = sampling_of(top_k=2)
    (drawn,) = live.generate(PROMPTS[:1], sampling)
    claim = Claim(PROMPTS[0].token_ids, (500, *drawn.token_ids[1:]), cut, PROMPTS[0].stream, replay=True)
    (found,) = live.judge([claim])
    assert (found.margins[0], found.scores[0]) == (8.0, -1e4)


def test_spans_of_two_versions_replay_each_under_its_own(live):
    """A commit inside a sample. What was drawn before it is unlike under the version after it."""
    sampling = sampling_of(tokens=120)
    for attempt in range(5):
        begun = live.version
        running = live.begin(PROMPTS[:2], sampling)
        time.sleep(0.5)
        live.update(step_of(live.replica, 40 + attempt, 0.02))
        drawn = running.result(WITHIN_S)
        if all(len(one.spans) == 2 and one.spans[0].version == (0, begun) for one in drawn):
            break
    else:
        pytest.fail("no commit fell into a sample")
    for prompt, one in zip(PROMPTS, drawn, strict=False):
        start = one.spans[1].start
        claim = claim_of(prompt, one, sampling, start)
        (found,) = live.judge([claim])
        assert found.version == one.spans[1].version == (0, live.version)
        assert unlike(claim, one, found) == 0
        early = Claim(prompt.token_ids, one.token_ids[:start], sampling, prompt.stream, replay=True)
        (stale,) = live.judge([early])
        assert unlike(early, one, stale) > early.tokens // 2


@pytest.mark.long
def test_a_vllm_that_keeps_old_keys_replays_what_one_version_drew(live):
    """Also right after a commit beside a sequence that goes on with the keys of the version before it."""
    live.engine.policy = "continue"
    try:
        kept = live.begin([Prompt((9, 8, 7), 55)], SamplingParams(max_tokens=300, seed=5))
        live.update(step_of(live.replica, 50, 0.02))
        drawn = live.generate(PROMPTS, sampling_of())
        for prompt, one in zip(PROMPTS, drawn, strict=True):
            claim = claim_of(prompt, one, sampling_of())
            assert unlike(claim, one, live.judge([claim])[0]) == 0
        kept.result(WITHIN_S)
    finally:
        live.engine.policy = "recompute"


@pytest.mark.long
def test_a_version_in_the_middle_of_a_replay_is_an_error(live):
    sampling = sampling_of(tokens=300)
    (drawn,) = live.generate(PROMPTS[:1], sampling)
    claim = claim_of(PROMPTS[0], drawn, sampling)
    for attempt in range(5):
        future = live.begin_judge(claim)
        time.sleep(0.3)
        if not future.done():
            live.update(step_of(live.replica, 60 + attempt, 0.02))
            break
    with pytest.raises(EngineError, match="another version"):
        future.result(WITHIN_S)
    (after,) = live.generate(PROMPTS[:1], sampling)
    claim = claim_of(PROMPTS[0], after, sampling)
    assert unlike(claim, after, live.judge([claim])[0]) == 0


def test_a_replay_without_room_is_refused_and_users_own_are_harmless(live):
    import http.client
    import json
    from urllib.parse import urlsplit

    sampling = sampling_of(tokens=5000)
    with pytest.raises(EngineError):
        live.judge([Claim(PROMPTS[0].token_ids, (5,) * 5000, sampling, 0, replay=True)])
    with pytest.raises(EngineError):
        live.judge([Claim(PROMPTS[0].token_ids, (2**31,), sampling_of(tokens=1), 0, replay=True)])
    for extra in (
        {"swarm_replay": [1]},
        {"swarm_replay": "x"},
        {"swarm_replay": [0, [5, 6, 2**31]]},
        {"swarm_replay": 3},
    ):
        connection = http.client.HTTPConnection(urlsplit(live.url).netloc, timeout=WITHIN_S)
        body = {"model": "policy", "prompt": "hello", "max_tokens": 3, "vllm_xargs": extra}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        assert connection.getresponse().status in (200, 400), extra
        connection.close()
    assert live.generate(PROMPTS, sampling_of(tokens=3))


def test_an_engine_names_what_it_measured(live):
    """Replays only where it judges; and its class tells whether sequences keep the keys of an older version."""
    engine: VllmEngine = live.engine
    for can, policy in (({OPTIONS, JUDGES}, "recompute"), ({OPTIONS, JUDGES}, "continue"), ({OPTIONS}, "drain")):
        engine._can, engine.policy, engine._measured = frozenset(can), policy, None  # type: ignore[assignment]
        live.reload()
        assert (REPLAYS in engine.abilities, OPTIONS in engine.abilities) == (JUDGES in can, True)
        assert sum(name.startswith("class:vllm/") for name in engine.abilities) == 1
        assert ArithmeticClass.named(engine.abilities, "vllm").keeps_keys == (policy == "continue")
    engine.policy = "recompute"
    assert np.all(engine.live_hashes() == live.replica.hashes)
