"""A real vLLM takes versions in place: bits, tokens and versions of tokens are those of a fresh engine."""

import http.client
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from engine_contract import EngineContract, Subject

from codec import write_checkpoint
from node.engines.base import EngineError, Prompt, SamplingParams
from node.engines.interface import Engine, WeightPatch
from node.engines.vllm.engine import VllmEngine
from node.engines.vllm.links import Listener
from scenarios.engines.engine_bench import Bench
from scenarios.engines.engine_models import step_of

pytestmark = pytest.mark.vllm

PROMPTS = [list(range(3 + i, 40 + i)) for i in range(3)]
LONG = list(range(3, 303))
"""A prompt longer than two blocks of the prefix cache."""
WITHIN_S = 300.0
"""Time limit in seconds of a generation on a busy machine."""


def greedy(one) -> list:
    return one.greedy(PROMPTS, 16)


def metric(url: str, name: str) -> float:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WITHIN_S)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def ask(url: str, body: dict, path: str = "/v1/completions") -> tuple[int, dict]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WITHIN_S)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def test_after_some_versions_it_equals_a_fresh_engine(one, fresh, tmp_path: Path):
    live = one
    assert live.engine.classes.loaded == {}
    before = greedy(live)
    for _ in range(3):
        assert live.update(step_of(live.replica, live.version, 0.3)) > 0
        assert (live.engine.live_hashes() == live.replica.hashes).all()
    after = greedy(live)
    write_checkpoint(tmp_path / "now", live.replica.layout, live.replica.bits, live.checkpoint.files)
    assert fresh([tmp_path / "now"], PROMPTS, 16) == [after]
    assert before != after


def test_any_bit_pattern_survives(one):
    spec = one.replica.layout.tensors[0]
    before = one.replica.bits(spec.name).copy()
    staged = step_of(one.replica, 1, 0.5, names=[spec.name])
    rng = np.random.default_rng(3)
    for block in staged[0].blocks:  # NaN payloads, -0, denormals, infinities among them
        block.bits[:] = rng.integers(0, 1 << 16, block.bits.size)
    one.update(rehashed(one.replica, staged))
    assert (one.engine.live_hashes() == one.replica.hashes).all()
    back = step_of(one.replica, 1, 0.5, names=[spec.name])
    for block in back[0].blocks:
        block.bits[:] = before[block.positions]
    one.update(rehashed(one.replica, back))
    assert (one.engine.live_hashes() == one.replica.hashes).all()


def rehashed(replica, staged):
    """Return the same chunks with hashes of the bits that they lead to."""
    from dataclasses import replace

    from codec.staging import StagedChunk, block_hash

    blocks = []
    for block in staged[0].blocks:
        new = replica.block(block.block).copy()
        new[block.positions] = block.bits
        blocks.append(replace(block, new_hash=block_hash(new)))
    return [StagedChunk(tuple(blocks))]


def in_flight(one, prompts: list[Prompt], sampling: SamplingParams, seed: int, share: float = 0.01):
    """Return (completions during which a version was committed, the version before). Tries again on a slow machine."""
    for attempt in range(8):
        older = (0, one.version)
        one.stage(step_of(one.replica, seed + 100 * attempt, share))
        flight = one.begin(prompts, sampling)
        while not (flight.done() or min(one.engine.counts().get(one.flights) or [0]) > 0):
            time.sleep(0.05)
        over = flight.done()
        one.commit()
        completions = flight.result(WITHIN_S)
        if not over:
            return completions, older
    raise AssertionError("no commit ever happened during a flight")


def test_a_commit_falls_between_two_tokens(one):
    for attempt in range(4):
        done, older = in_flight(
            one, [Prompt((5, 6, 7), i) for i in range(4)], SamplingParams(max_tokens=480), 7 + 1000 * attempt
        )
        if all(len(completion.spans) == 2 for completion in done):
            break
    for completion in done:
        assert [span.version for span in completion.spans] == [older, (0, one.version)]
        before, after = completion.spans
        assert before.start == 0 < before.end == after.start < after.end == 480
        assert len(completion.logprobs) == 480


def test_policy_recompute_reads_running_requests_again(one):
    one.engine.policy = "recompute"
    try:
        for attempt in range(4):
            greedy = SamplingParams(max_tokens=300, temperature=0.0)
            (completion,), _ = in_flight(one, [Prompt(tuple(LONG[:200]))], greedy, 8 + 1000 * attempt, 0.4)
            if len(completion.spans) == 2:
                break
    finally:
        one.engine.policy = "continue"
    cut = completion.spans[0].end
    assert 0 < cut < 300
    # after the commit, tokens are those that the new weights alone generate for the same text
    rest = one.greedy([[*LONG[:200], *completion.token_ids[:cut]]], 8)[0]
    assert rest[0][:4] == list(completion.token_ids[cut : cut + 4])
    np.testing.assert_allclose(rest[1][:4], completion.logprobs[cut : cut + 4], atol=0.05)


@pytest.mark.long
def test_policy_drain_waits_for_running_requests(one):
    one.engine.policy = "drain"
    try:
        (completion,), older = in_flight(one, [Prompt((5, 6, 7))], SamplingParams(max_tokens=480), 9)
    finally:
        one.engine.policy = "continue"
    assert [span.version for span in completion.spans] == [older]
    assert one.generate([Prompt((1, 2))], SamplingParams(max_tokens=2))[0].spans[0].version == (0, one.version)


def test_no_prefix_of_an_old_version_is_used(one):
    one.greedy([LONG], 4)
    hits = metric(one.url, "vllm:prefix_cache_hits_total")
    warm = one.greedy([LONG], 4)
    assert metric(one.url, "vllm:prefix_cache_hits_total") > hits, "the cache is off, so this test proves nothing"
    one.update(step_of(one.replica, 10, 0.3))
    hits = metric(one.url, "vllm:prefix_cache_hits_total")
    after = one.greedy([LONG], 4)
    assert metric(one.url, "vllm:prefix_cache_hits_total") == hits
    assert after != warm
    one.reload()  # which clears the cache
    assert one.greedy([LONG], 4) == after


HOW = [(1.0, 1.0), (0.6, 1.0), (0.8, 0.7), (0.0, 1.0)]


@pytest.mark.parametrize(("temperature", "top_p"), HOW)
def test_scores_equal_the_reported_log_probabilities(one, temperature: float, top_p: float):
    sampling = SamplingParams(max_tokens=48, temperature=temperature, top_p=top_p, seed=5)
    prompts = [Prompt((5 + i, 6, 7), i) for i in range(3)]
    other_flight = one.begin([Prompt(tuple(LONG), 9)], SamplingParams(max_tokens=60))  # shares the batch
    for prompt, completion in zip(prompts, one.generate(prompts, sampling), strict=True):
        found = one.score(prompt.token_ids, completion.token_ids, sampling)
        np.testing.assert_allclose(found, completion.logprobs, atol=0.15)  # 0.064 was seen on a CPU with AMX
        assert np.abs(np.subtract(found, completion.logprobs)).mean() < 0.01
    other_flight.result(WITHIN_S)
    # scores by another distribution, or of other tokens, differ
    (completion,) = one.generate(prompts[:1], sampling)
    other = SamplingParams(max_tokens=48, temperature=2.0, seed=5)
    assert np.abs(np.subtract(one.score((5, 6, 7), completion.token_ids, other), completion.logprobs)).mean() > 0.1
    unlikely = one.score((5, 6, 7), tuple((token + 1) % 300 for token in completion.token_ids), sampling)
    assert np.mean(np.maximum(unlikely, -10.0)) < np.mean(completion.logprobs) - 1.0
    assert (top_p == 1.0) == bool(np.isfinite(unlikely).all())


def test_a_long_text_is_scored_in_pieces_without_the_cache_as_by_another_engine(one, tmp_path: Path):
    from node.engines.transformers import TransformersEngine

    write_checkpoint(tmp_path / "now", one.replica.layout, one.replica.bits, one.checkpoint.files)
    other = TransformersEngine(threads=1, device="cpu", arithmetic="bfloat16")
    other.load(tmp_path / "now")
    sampling = SamplingParams(max_tokens=200, seed=3)
    (completion,) = one.generate([Prompt(tuple(LONG))], sampling)
    here = [one.score(LONG, completion.token_ids, sampling) for _ in range(2)]
    assert here[0] == here[1]
    assert np.abs(np.subtract(here[0], other.score(LONG, completion.token_ids, sampling))).mean() < 0.05


def test_scores_with_a_commit_in_between_fail(one):
    """Some tokens may have been read by the older weights, and some by the newer."""
    errors: list[str] = []
    for attempt in range(8):
        one.stage(step_of(one.replica, 300 + attempt))
        asked = [one.begin_score(LONG, LONG[:150], SamplingParams(max_tokens=150)) for _ in range(4 + 4 * attempt)]
        one.commit()
        wait(asked, WITHIN_S)
        errors += [str(future.exception(0)) for future in asked if future.exception(0) is not None]
        if errors:
            break
    assert errors
    assert all("while tokens were scored" in error for error in errors)
    assert len(one.score(LONG, LONG[:150], SamplingParams(max_tokens=150))) == 150


def test_users_own_requests_continue(one):
    body = {"model": "policy", "prompt": "hello", "max_tokens": 400, "ignore_eos": True}
    within = 0
    with ThreadPoolExecutor(1) as pool:
        for _ in range(4):
            one.stage(step_of(one.replica, 500 + one.version))
            asked = pool.submit(ask, one.url, body)
            while not asked.done():
                one.commit()
                within += not asked.done()
                one.stage(step_of(one.replica, 500 + one.version))
            one.commit()
            status, answer = asked.result()
            assert (status, answer["usage"]["completion_tokens"]) == (200, 400)
            if within:
                break
    assert within, "no update ever happened during a request"


def test_a_poisoned_engine_serves_no_request_until_it_is_reloaded(one):
    with pytest.raises(EngineError, match="enough"):
        one.engine._poison("enough")
    assert one.engine.poisoned == "enough"
    status, answer = ask(one.url, {"model": "policy", "prompt": "hello", "max_tokens": 4})
    assert (status, "no proven policy" in answer["error"]["message"]) == (503, True)
    with pytest.raises(EngineError, match="poisoned"):
        one.begin([Prompt((1, 2))], SamplingParams(max_tokens=2))
    with pytest.raises(EngineError, match="poisoned"):
        one.score((1, 2), (3,), SamplingParams(max_tokens=1))
    with pytest.raises(EngineError, match="poisoned"):
        one.engine.stage_patch(WeightPatch(0, (0, 99)))
    assert one.reload() == one.replica.root
    assert ask(one.url, {"model": "policy", "prompt": "hello", "max_tokens": 4})[0] == 200
    assert greedy(one)


def test_another_base_is_refused_before_a_bit_is_written(one):
    os.close(one.advance(step_of(one.replica, 11)))  # the engine does not get this patch
    fd = one.advance(step_of(one.replica, 12))
    held = one.engine.version
    before = one.engine.live_hashes()
    with pytest.raises(EngineError, match="for another base"):
        one.engine.stage_patch(WeightPatch(fd, (0, one.version)))
    os.close(fd)
    assert one.engine.poisoned is None
    assert one.engine.version == held
    assert (one.engine.live_hashes() == before).all()
    with pytest.raises(EngineError, match="not what is staged"):
        one.engine.commit((0, one.version), one.replica.root)
    assert one.reload() == one.replica.root
    assert one.engine.version == (0, one.version)


def test_altered_patch_bits_stop_the_engine(one):
    """The bits of the patch are altered after its hashes were checked."""
    name = max(one.replica.layout.tensors, key=lambda t: t.elements).name
    honest = step_of(one.replica, 13, names=[name])
    lying = step_of(one.replica, 13, names=[name])
    for block in lying[0].blocks:
        block.bits[0] ^= 1 << 3
    from codec import write_patch

    fd, _ = write_patch(lying, one.replica.layout)
    os.close(one.advance(honest))
    flight = one.begin([Prompt((5, 6, 7))], SamplingParams(max_tokens=400))
    one.engine.stage_patch(WeightPatch(fd, (0, one.version)))
    os.close(fd)
    with pytest.raises(EngineError, match=f"the live bits of {name} are not"):
        one.engine.commit((0, one.version), one.replica.root)
    assert one.engine.poisoned is not None
    with pytest.raises(EngineError, match="abort"):
        flight.result(WITHIN_S)
    assert one.reload() == one.replica.root
    assert (one.engine.live_hashes() == one.replica.hashes).all()


def test_a_proof_finds_every_altered_block(one, monkeypatch):
    """Live weights are changed without notice; only a proof can find that."""
    monkeypatch.setattr("node.engines.vllm.engine.AUDITED_BLOCKS", 0)
    names = [t.name for t in one.replica.layout.tensors[::7]]
    lying = step_of(one.replica, 14, names=names)
    honest = step_of(one.replica, 14, names=names)
    for block in lying[0].blocks:
        block.bits[0] ^= 1 << 5
    from codec import write_patch

    fd, _ = write_patch(lying, one.replica.layout)
    os.close(one.advance(honest))
    one.engine.stage_patch(WeightPatch(fd, (0, one.version)))
    os.close(fd)
    one.engine.commit((0, one.version), one.replica.root)
    wrong = np.flatnonzero((one.engine.live_hashes() != one.replica.hashes).any(1))
    assert wrong.tolist() == [block.block for block in lying[0].blocks]
    one.reload()


def test_writable_memory_is_refused(one):
    fd = one.advance(step_of(one.replica, 15))
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.write(loose, data)
    with pytest.raises(EngineError, match="seals"):
        one.engine.stage_patch(WeightPatch(loose, (0, one.version)))
    os.close(loose)
    one.reload()


class TestVllmEngine(EngineContract):
    """The contract of `Engine`, on the vLLM of this file."""

    @pytest.fixture
    def subject(self, one: Bench) -> Iterator[Subject]:
        one.reload()
        subject = Subject(one.engine, one.replica, one.version)
        yield subject
        one.version = subject.version
        assert one.reload() == one.replica.root

    @pytest.fixture
    def detached(self, tmp_path: Path) -> Iterator[Engine]:
        engine = VllmEngine(Listener(tmp_path / "vllm.sock", lambda why: None))
        yield engine
        engine.close()
