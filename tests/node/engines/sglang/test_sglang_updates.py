"""A real SGLang, the released wheel on a CPU, takes versions in place: bits, tokens and their versions are proven."""

import http.client
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from engine_contract import EngineContract, Subject

from codec import write_checkpoint
from node.engines.base import STREAMS, DrawnTokens, EngineError, Prompt, SamplingParams
from node.engines.interface import Engine, WeightPatch
from node.engines.sglang.engine import SglangEngine
from node.engines.sglang.front import speak_for
from node.engines.sglang.http import Api
from node.engines.vllm.links import Listener
from scenarios.engines.engine_models import step_of
from scenarios.engines.sglang_updates import PROMPTS, TOKENS, compare, follow

pytestmark = pytest.mark.sglang

PROMPT = (5, 6, 7)
WITHIN_S = 300.0


def ask(url: str, path: str, body: dict) -> dict:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WITHIN_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


class TestContract(EngineContract):
    @pytest.fixture
    def subject(self, one) -> Iterator[Subject]:
        assert one.reload() == one.replica.root
        subject = Subject(one.engine, one.replica, one.version)
        yield subject
        one.version = subject.version
        if one.engine.poisoned is not None:
            one.reload()

    @pytest.fixture
    def detached(self, tmp_path: Path) -> Iterator[Engine]:
        engine = SglangEngine(Listener(tmp_path / "s", lambda why: None))
        yield engine
        engine.close()


def reference(folder: Path, text: list[int]) -> list[float]:
    """The log-probability of each token but the first, as transformers computes it in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        logprobs = model(torch.tensor([text])).logits[0].float().log_softmax(-1)
    return [float(logprobs[i, token]) for i, token in enumerate(text[1:])]


def test_after_some_versions_it_computes_what_the_new_checkpoint_says(one, tmp_path: Path):
    before = one.greedy([PROMPT], 8)
    found = follow(one, 3, 0.3)
    assert found["bits_equal"] == 3
    assert 0 < found["pause_ms"] <= found["longest_pause_ms"]
    ((tokens, logprobs),) = after = one.greedy([PROMPT], 8)
    assert before != after
    write_checkpoint(tmp_path / "now", one.replica.layout, one.replica.bits, one.checkpoint.files)
    expected = reference(tmp_path / "now", [*PROMPT, *tokens])[len(PROMPT) - 1 :]
    np.testing.assert_allclose(logprobs, expected, atol=0.15)


@pytest.mark.long
def test_after_twenty_updates_it_equals_an_sglang_that_loads_the_checkpoint_itself(one, python: Path, tmp_path: Path):
    """Live bits after each update; greedy tokens and log-probabilities to the bit at the end."""
    before = one.greedy(PROMPTS, TOKENS)
    assert follow(one, 20, 0.01)["bits_equal"] == 20
    assert compare(one, tmp_path, python, threads=1) == {"tokens_equal": len(PROMPTS), "logprobs_equal": len(PROMPTS)}
    assert before != one.greedy(PROMPTS, TOKENS)


def test_a_second_driver_follows_it_from_the_version_that_the_first_one_left(one, tmp_path: Path):
    """As another node that attaches to an SGLang of the user's own: the bits of its folder are long gone."""
    one.update(step_of(one.replica, 140, 0.1))
    listener = Listener(tmp_path / "s", lambda why: None, "SGLang")
    second, shared = SglangEngine(listener), one.engine._attached().shared
    speak_for(Api(one.url), listener.path, fill=False)
    try:
        second.attach_replica(shared)
        assert second.reload_replica((0, one.version), one.replica.root) == one.replica.root
        assert second.classes.loaded == {}
        assert (second.live_hashes() == one.replica.hashes).all()
    finally:
        second.close()
        one.engine.attach_replica(shared)
    assert one.reload() == one.replica.root
    assert one.update(step_of(one.replica, 141, 0.1)) > 0


def test_a_commit_falls_between_two_tokens_and_each_has_its_version(one):
    for attempt in range(4):
        older = (0, one.version)
        one.stage(step_of(one.replica, 70 + attempt, 0.01))
        flight = one.begin([Prompt(PROMPT, 0), Prompt(PROMPT, 1)], SamplingParams(max_tokens=400, seed=attempt))
        while not flight.done() and min(one.engine.counts().get(one.flights) or [0]) < 16:
            time.sleep(0.02)
        one.commit()
        done = flight.result(WITHIN_S)
        if all(len(completion.spans) == 2 for completion in done):
            break
    for completion in done:
        assert [span.version for span in completion.spans] == [older, (0, one.version)]
        assert completion.spans[-1].end == len(completion.logprobs) == 400


def test_the_same_seed_draws_the_same_tokens_in_any_batch(one):
    sampling = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=11)
    (alone,) = one.generate([Prompt(PROMPT, 3)], sampling)
    beside = one.generate([Prompt(PROMPT, i) for i in range(5)], sampling)
    assert beside[3].token_ids[:4] == alone.token_ids[:4]  # rounding may differ between batches of different sizes
    assert len({completion.token_ids for completion in beside}) == 5


def test_it_tells_tokens_as_they_are_drawn_and_how_much_it_runs_at_a_time(one):
    told: list[tuple[int, DrawnTokens]] = []
    ended = threading.Event()
    found: list[Any] = []
    sampling = SamplingParams(max_tokens=40, seed=3)

    def done(_: int, outcome: Any) -> None:
        found.append(outcome)
        ended.set()

    assert STREAMS in one.engine.abilities
    one.engine.begin(
        10**6, [Prompt(PROMPT, 0), Prompt(PROMPT, 1)], sampling, done, "", lambda _, rows: told.extend(rows)
    )
    assert ended.wait(WITHIN_S)
    for i, completion in enumerate(found[0]):
        mine = [tokens for index, tokens in told if index == i]
        begun = [token for tokens in mine for token in tokens.token_ids]
        assert len(begun) > 30, "the last ones come with the completion"
        assert tuple(begun) == completion.token_ids[: len(begun)]
        assert max(len(tokens.token_ids) for tokens in mine) < 20
    room = one.engine.room
    assert (room.sequences, room.tokens > 2048) == (8, True)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8), (0.0, 1.0)])
def test_scores_are_those_of_what_was_drawn(one, temperature: float, top_p: float):
    sampling = SamplingParams(max_tokens=16, temperature=temperature, top_p=top_p, seed=4)
    (drawn,) = one.generate([Prompt(PROMPT)], sampling)
    assert all(logprob <= 0.0 for logprob in drawn.logprobs)
    np.testing.assert_allclose(one.score(PROMPT, drawn.token_ids, sampling), drawn.logprobs, atol=0.15)


def test_an_impossible_token_is_found(one):
    sampling = SamplingParams(max_tokens=1, temperature=0.2, top_p=0.3)
    scores = [one.score(PROMPT, (token,), sampling)[0] for token in range(3, 9)]
    assert min(scores) == -math.inf


def test_it_ends_with_its_own_stop_tokens_and_no_others(one):
    (free,) = one.generate([Prompt(PROMPT)], SamplingParams(max_tokens=40, seed=9))
    assert (len(free.token_ids), free.finish_reason) == (40, "length")
    stop = free.token_ids[7]
    (ended,) = one.generate([Prompt(PROMPT)], SamplingParams(max_tokens=40, seed=9, stop_tokens=(stop,)))
    first = free.token_ids.index(stop)
    assert (ended.token_ids, ended.finish_reason) == (free.token_ids[: first + 1], "stop")


def test_a_prefix_of_an_older_version_is_not_used(one):
    text = list(range(3, 203))
    body = {"input_ids": text, "sampling_params": {"max_new_tokens": 1}}
    ask(one.url, "/generate", body)
    assert ask(one.url, "/generate", body)["meta_info"]["cached_tokens"] > 150, "the user's own prefix is reused"
    one.update(step_of(one.replica, 90, 0.2))
    fresh = ask(one.url, "/generate", body)["meta_info"]
    assert fresh["cached_tokens"] == 0
    assert fresh["weight_version"] == f"0.{one.version}"


def test_wrong_bits_are_found_and_a_reload_mends_them(one):
    def wrong(value: int) -> None:
        one.stage(step_of(one.replica, value, 0.2))
        one.replica.scatter(step_of(one.replica, value + 1, 0.2))  # the replica and its hashes go elsewhere

    wrong(120)
    with pytest.raises(EngineError, match="leads"):
        one.commit()
    assert one.reload() == one.replica.root
    assert (one.engine.live_hashes() == one.replica.hashes).all()


def test_a_patch_for_another_base_is_refused_before_anything_is_written(one):
    held = one.engine.live_root()
    fd = one.advance(step_of(one.replica, 130, 0.1))
    one.engine.reload_replica((0, one.version), one.replica.root)
    with pytest.raises(EngineError, match="another base"):
        one.engine.stage_patch(WeightPatch(fd, (0, one.version + 1)))
    assert one.engine.live_root() != held
    assert one.engine.poisoned is None
