"""A real vLLM draws portably and judges claims: margins, scores under the version before, and failures of rewinds."""

import time
from concurrent.futures import wait as wait_all
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codec import write_checkpoint
from node.engines.base import EngineError, Prompt, SamplingOptions, SamplingParams
from node.engines.judgement import Claim, Judgement
from scenarios.engines.engine_models import step_of

pytestmark = pytest.mark.vllm

TOKENS = 40
PROMPTS = [Prompt(tuple(range(3 + i, 30 + i)), i) for i in range(4)]
WITHIN_S = 300.0
ROUNDING = 0.15
"""Nats by which an honest token may lose: twice the error of a log-probability in bfloat16, of which 0.064 was seen."""
HOW = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 20},
    "both": {"top_k": 50, "top_p": 0.9, "temperature": 1.3},
    "penalty": {"presence_penalty": 1.0, "repetition_penalty": 1.2},
}
IN_CI = ("plain", "both", "penalty")


def sampling_of(seed: int = 2**63 + 9, tokens: int = TOKENS, **how: Any) -> SamplingParams:
    fields = {name: how.pop(name) for name in ("temperature", "top_p") if name in how}
    return SamplingParams(tokens, seed=seed, options=SamplingOptions(portable=True, **how), **fields)


def claims_of(one: Any, sampling: SamplingParams, previous: bool = False) -> list[Claim]:
    found = one.generate(PROMPTS, sampling)
    return [Claim(p.token_ids, c.token_ids, sampling, p.stream, previous) for p, c in zip(PROMPTS, found, strict=True)]


@pytest.mark.parametrize("how", [how if how in IN_CI else pytest.param(how, marks=pytest.mark.long) for how in HOW])
def test_margins_are_zero_for_honest_tokens_and_large_for_a_second_draw(one, how: str):
    sampling = sampling_of(**HOW[how])
    claims = claims_of(one, sampling)
    for claim, found in zip(claims, one.judge(claims), strict=True):
        assert max(found.margins) < ROUNDING
        assert np.mean(found.margins) < 0.01
        assert found.scores == pytest.approx(one.score(claim.prompt, claim.token_ids, sampling), abs=1e-6)
        assert found.previous == ()
    second = claims_of(one, sampling_of(seed=77, **HOW[how]))
    asked = [Claim(claim.prompt, claim.token_ids, sampling, claim.stream) for claim in second]
    assert min(np.mean(found.margins) for found in one.judge(asked)) > 0.2
    one.generate(PROMPTS, SamplingParams(3, 0.0, options=SamplingOptions(portable=True)))


def test_reported_log_probabilities_are_those_before_the_noise(one):
    sampling = sampling_of(temperature=0.8)
    for prompt, completion in zip(PROMPTS, one.generate(PROMPTS, sampling), strict=True):
        found = one.score(prompt.token_ids, completion.token_ids, sampling)
        np.testing.assert_allclose(found, completion.logprobs, atol=ROUNDING)


@pytest.mark.long
def test_the_same_request_gives_the_same_tokens_alone_and_in_a_batch(one):
    """Up to the first place where two tokens were tied within rounding: a batch of other rows rounds otherwise."""
    sampling = sampling_of()
    alone = [one.generate([prompt], sampling)[0] for prompt in PROMPTS]
    assert [one.generate([prompt], sampling)[0].token_ids for prompt in PROMPTS] == [c.token_ids for c in alone]
    other = one.begin([Prompt((9, 8, 7), 55), Prompt((9, 8), 56)], SamplingParams(max_tokens=200, seed=5))
    greedy = one.begin([Prompt((4, 5))], SamplingParams(max_tokens=200, temperature=0.0))
    together = one.generate(PROMPTS, sampling)
    for prompt, here, there in zip(PROMPTS, alone, together, strict=True):
        split = next((i for i in range(TOKENS) if here.token_ids[i] != there.token_ids[i]), TOKENS)
        if split < TOKENS:
            claim = Claim(prompt.token_ids, there.token_ids[: split + 1], sampling, prompt.stream)
            assert one.judge([claim])[0].margins[-1] < ROUNDING
    assert sum(a.token_ids == b.token_ids for a, b in zip(alone, together, strict=True)) >= 2
    wait_all([other, greedy], WITHIN_S)
    assert len({c.token_ids for c in alone}) == len(alone)


def test_the_transformers_engine_judges_what_vllm_drew(one, tmp_path: Path):
    from node.engines.transformers import TransformersEngine

    write_checkpoint(tmp_path / "now", one.replica.layout, one.replica.bits, one.checkpoint.files)
    other = TransformersEngine(threads=1, device="cpu")
    other.load(tmp_path / "now")
    for how in ({}, {"top_k": 20, "top_p": 0.9}):
        claims = claims_of(one, sampling_of(**how))
        for found, ours in zip(other.judge(claims), one.judge(claims), strict=True):
            assert isinstance(found, Judgement)
            assert np.mean(found.margins) < 0.02
            np.testing.assert_allclose(found.scores, ours.scores, atol=ROUNDING)
        drawn = other.generate(PROMPTS, sampling_of(**how))
        claims = [
            Claim(p.token_ids, c.token_ids, sampling_of(**how), p.stream) for p, c in zip(PROMPTS, drawn, strict=True)
        ]
        assert max(np.mean(found.margins) for found in one.judge(claims)) < 0.02


def test_scores_under_the_version_before_and_then_the_same_bits(one):
    sampling = sampling_of()
    one.update(step_of(one.replica, 900, 0.02))
    claims = claims_of(one, sampling, previous=True)
    before = [one.score(claim.prompt, claim.token_ids, sampling) for claim in claims]
    one.update(step_of(one.replica, 901, 0.02))
    greedy = SamplingParams(max_tokens=120, temperature=0.0)
    running = one.begin(PROMPTS, greedy)
    time.sleep(0.3)
    found = one.judge(claims)
    assert [judgement.previous for judgement in found] == [pytest.approx(scores, abs=0.02) for scores in before]
    for judgement in found:
        assert judgement.version == (0, one.version)
        assert np.abs(np.subtract(judgement.previous, judgement.scores)).mean() > 0.01
    assert (one.engine.live_hashes() == one.replica.hashes).all()
    assert [c.token_ids for c in running.result(WITHIN_S)] == [c.token_ids for c in one.generate(PROMPTS, greedy)]
    assert one.engine.poisoned is None


def test_the_version_before_is_unknown_after_a_reload(one):
    one.update(step_of(one.replica, 910, 0.02))
    (claim, *_) = claims_of(one, sampling_of(), previous=True)
    assert one.judge([claim])[0].previous
    one.reload()
    (found,) = one.judge([claim])
    assert (found.previous, len(found.scores)) == ((), TOKENS)
    one.update(step_of(one.replica, 911, 0.5))  # more than `MOST_SHARE`
    assert one.judge([claim])[0].previous == ()
    one.update(step_of(one.replica, 912, 0.02))
    assert one.judge([claim])[0].previous


def test_a_commit_and_a_rewind_wait_for_each_other(one):
    """Whatever their order, a judgement's two scores are of a version and the one before it."""
    sampling = sampling_of(tokens=8)
    scores: dict[int, tuple[float, ...]] = {}
    one.update(step_of(one.replica, 920, 0.02))
    (claim, *_) = claims_of(one, sampling, previous=True)
    futures = []
    for i in range(4):
        scores[one.version] = one.score(claim.prompt, claim.token_ids, sampling)
        one.stage(step_of(one.replica, 921 + i, 0.02))
        futures += [one.begin_judge(claim) for _ in range(3)]
        one.commit()
    for future in futures:
        found = future.result(WITHIN_S)
        if found.version[1] in scores:
            np.testing.assert_allclose(found.scores, scores[found.version[1]], atol=0.02)
        if found.previous and found.version[1] - 1 in scores:
            np.testing.assert_allclose(found.previous, scores[found.version[1] - 1], atol=0.02)
    assert any(future.result().previous for future in futures)
    assert (one.engine.live_hashes() == one.replica.hashes).all()


def test_readers_of_live_bits_never_see_a_rewind(one):
    one.update(step_of(one.replica, 940, 0.02))
    claims = claims_of(one, sampling_of(), previous=True)
    for _ in range(3):
        asked = [one.begin_judge(claim) for claim in claims]
        while not all(future.done() for future in asked):
            assert (one.engine.live_hashes() == one.replica.hashes).all()
        assert all(len(future.result().scores) == TOKENS for future in asked)


def test_users_own_requests_that_look_like_ours_do_no_harm(one):
    import http.client
    import json
    from urllib.parse import urlsplit

    def ask(extra: dict[str, Any]) -> int:
        connection = http.client.HTTPConnection(urlsplit(one.url).netloc, timeout=WITHIN_S)
        body = {"model": "policy", "prompt": "hello", "max_tokens": 3, "vllm_xargs": extra}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status

    for extra in (
        {"swarm_noise": [1]}, {"swarm_noise": "x"}, {"swarm_noise": [-1, 5]}, {"swarm_noise": [1, 2]},
        {"swarm_score": [1]}, {"swarm_score": "abcdef"},
    ):  # fmt: skip
        assert ask(extra) in (200, 400), extra
    assert claims_of(one, sampling_of(tokens=4))


@pytest.mark.long
def test_two_ranks_undo_together(two):
    sampling = sampling_of(tokens=12)
    two.update(step_of(two.replica, 950, 0.02))
    claims = claims_of(two, sampling, previous=True)
    before = [two.score(claim.prompt, claim.token_ids, sampling) for claim in claims]
    two.update(step_of(two.replica, 951, 0.02))
    found = two.judge(claims)
    assert [judgement.previous for judgement in found] == [pytest.approx(scores, abs=0.02) for scores in before]
    assert max(max(judgement.margins) for judgement in two.judge(claims_of(two, sampling))) < ROUNDING
    assert (two.engine.live_hashes() == two.replica.hashes).all()


@pytest.fixture(scope="module")
def tearing(untied: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A vLLM whose rewinds can be made to fail."""
    with torn_bench(untied, tmp_path_factory.mktemp("tearing"), python) as live:
        yield live


def torn_bench(folder: Path, home: Path, python: Path, **more: Any) -> Any:
    from scenarios.engines.engine_bench import PROBE_ENV, SMALL, bench

    flags = (*SMALL, "--worker-extension-cls", "swarm_torn.Torn")
    return bench(folder, home, python, more=flags, env=PROBE_ENV, **({"threads": 1} | more))


def tear(live: Any, where: str) -> list[Claim]:
    """Let the next rewind fail, while sequences run. Returns the claims that it was for."""
    from scenarios.engines.engine_cost import call

    live.update(step_of(live.replica, 960 + len(where), 0.02))
    claims = claims_of(live, sampling_of(tokens=12), previous=True)
    assert all(found.previous for found in live.judge(claims))
    running = live.begin(PROMPTS, SamplingParams(max_tokens=480, temperature=0.0))
    time.sleep(0.3)
    assert call(live.url, "tear", where) == 1
    futures = [live.begin_judge(claim) for claim in claims]
    wait_all(futures, WITHIN_S)
    assert all(future.exception(0) is not None for future in futures)
    with pytest.raises(EngineError):
        running.result(WITHIN_S)
    return claims


def wait_lost(live: Any) -> None:
    """vLLM ends. The driver ends too, and the node starts both again."""
    deadline = time.monotonic() + WITHIN_S
    while not live.lost and time.monotonic() < deadline:
        time.sleep(0.1)
    assert live.lost


@pytest.mark.parametrize(
    "where", ["undoing", "wrong", *(pytest.param(where, marks=pytest.mark.long) for where in ("scoring", "restoring"))]
)
def test_a_failure_in_a_rewind_stops_the_engine_until_it_is_reloaded(tearing, where: str):
    claims = tear(tearing, where)
    assert "version before" in str(tearing.engine.poisoned)
    with pytest.raises(EngineError, match="poisoned"):
        tearing.generate(PROMPTS, sampling_of())
    assert tearing.reload() == tearing.replica.root
    assert (tearing.engine.live_hashes() == tearing.replica.hashes).all()
    assert [found.previous for found in tearing.judge(claims)] == [()] * len(claims)


def test_a_vllm_that_is_killed_in_a_rewind_is_lost(tearing):
    """The last test of `tearing`."""
    tear(tearing, "die")
    wait_lost(tearing)


@pytest.mark.long
def test_a_rank_that_waits_for_a_failed_one_ends_vllm(tied: Path, python: Path, tmp_path: Path):
    with torn_bench(tied, tmp_path, python, ranks=2, threads=2) as live:
        tear(live, "scoring")
        wait_lost(live)
