"""A real vLLM serves adapters: bits, tokens and log-probabilities are those of a fresh engine with its own loader."""

import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import trio
from engine_contract import AdapterContract, Subject

from codec import Checkpoint, Layout, Replica
from codec.adapter import AdapterModule, AdapterSlots
from codec.errors import UsageError
from node.engines.base import ADAPTERS, Completion, EngineError, Prompt, SamplingOptions, SamplingParams
from node.engines.host import EngineHost
from node.engines.judgement import Claim
from node.engines.replica_ref import ReplicaRef
from node.engines.server_specs import specs_of
from node.engines.vllm.adapters import adapter_flags
from node.settings.config import JoinConfig
from scenarios.engines.adapter_models import MadeAdapter, make_adapter
from scenarios.engines.engine_bench import PROBE_ENV, SMALL, Bench, bench
from scenarios.engines.engine_models import step_of

pytestmark = pytest.mark.vllm

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = [list(range(3 + i, 40 + i)) for i in range(3)]
LONG = list(range(3, 303))
"""A prompt longer than two blocks of the prefix cache."""
WITHIN_S = 300.0
TOKENS = 16


def layout_of(folder: Path) -> Layout:
    return Replica.from_checkpoint(Checkpoint.open(folder)).layout


@pytest.fixture(scope="module")
def one(untied: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A vLLM on one rank with three slots of rank 16. Each test sets the adapters that it uses."""
    slots = AdapterSlots.reserve(layout_of(untied), 3, 16)
    more, home = (*SMALL, "--worker-extension-cls", "swarm_flip.Flip"), tmp_path_factory.mktemp("adapters")
    with bench(untied, home, python, threads=1, slots=slots, more=more, env=PROBE_ENV) as live:
        live.versions = iter(range(1, 1 << 20))  # type: ignore[attr-defined]
        yield live


@pytest.fixture(scope="module")
def two(tied: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The same on two ranks."""
    slots = AdapterSlots.reserve(layout_of(tied), 3, 16)
    with bench(tied, tmp_path_factory.mktemp("ranks"), python, ranks=2, threads=2, slots=slots) as live:
        live.versions = iter(range(1, 1 << 20))  # type: ignore[attr-defined]
        yield live


Fresh = Callable[[Path, list[Path], list[list[int]], int, int], list[Any]]


@pytest.fixture(scope="session")
def fresh(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """Asks a fresh engine for each adapter, loaded from a peft folder, for greedy tokens and log-probabilities."""
    from node.engines.vllm.server import environment
    from scenarios.engines import engine_fresh

    def ask(folder: Path, adapters: list[Path], prompts: list[list[int]], tokens: int, ranks: int) -> list[Any]:
        file = tmp_path_factory.mktemp("fresh") / "questions.json"
        more = {"enable_lora": True, "max_lora_rank": 16} if adapters else {}
        questions = {"prompts": prompts, "tokens": tokens, "folders": [str(folder)], "more": more}
        file.write_text(json.dumps(questions | {"adapters": [str(adapter) for adapter in adapters]}))
        env = environment({"PATH": "/usr/bin:/bin"}, ranks, True, ranks) | PROBE_ENV
        command = [python, engine_fresh.__file__, str(file), str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
        lines = [line for line in done.stdout.splitlines() if line.startswith("FRESH ")]
        assert len(lines) == (len(adapters) or 1), done.stderr[-3000:]
        return [[(ids, logprobs) for ids, logprobs in json.loads(line[6:])] for line in lines]

    return ask


def three(base: Layout) -> list[MadeAdapter]:
    """Adapters of different ranks and modules."""
    slots = AdapterSlots.reserve(base, 3, 16)
    return [
        make_adapter(base, slots, "a", targets=ALL, rank=8),
        make_adapter(base, slots, "b", targets=("q_proj", "v_proj", "up_proj"), rank=16, alpha=5.0, seed=1),
        make_adapter(base, slots, "c", targets=ALL[:5], rank=4, ranks={"o_proj": 9}, use_rslora=True, seed=2),
    ]


def set_adapter(live: Bench, adapter: MadeAdapter, slot: int) -> int:
    version = next(live.versions)  # type: ignore[attr-defined]
    live.set_adapter(adapter, slot, version)
    return version


def update_and_compare(
    live: Bench,
    folder: Path,
    fresh: Fresh,
    home: Path,
    *,
    ranks: int,
    prompts: list[list[int]],
    compared: tuple[int, ...],
) -> None:
    """Updates of three adapters in turn, some of which change modules and rank, up to the last of those `compared` with
    a fresh engine. All live bits are proven after each."""
    adapters = three(live.replica.layout)
    plain = live.greedy(prompts, TOKENS)
    for slot, adapter in enumerate(adapters):
        set_adapter(live, adapter, slot)
    answers: list[Any] = []
    folders: list[Path] = []
    for update in range(max(compared) + 1):
        slot = update % 3
        if update % 7 == 5:  # another shape under the same name
            base, slots = live.replica.layout, AdapterSlots.reserve(live.replica.layout, 3, 16)
            shape = {"targets": ALL[update % 3 :: 2], "rank": 3 + update % 5}
            adapters[slot] = make_adapter(base, slots, "abc"[slot], seed=update, **shape)
        else:
            adapters[slot] = adapters[slot].step(update, 0.3)
        version = set_adapter(live, adapters[slot], slot)
        assert live.engine.adapter_root(slot) == adapters[slot].root(slot)
        assert live.engine.version_of("abc"[slot]) == max((0, version), live.engine.version)
        if update in compared:
            folders.append(adapters[slot].save(home / f"{update}"))
            answers.append(live.greedy(prompts, TOKENS, "abc"[slot]))
    for slot, adapter in enumerate(adapters):
        assert live.engine.adapter_root(slot) == adapter.root(slot)
    assert fresh(folder, folders, prompts, TOKENS, ranks) == answers
    assert live.greedy(prompts, TOKENS) == plain
    assert plain not in answers
    if ranks == 1:  # a vLLM with room for adapters computes the base as one without
        assert fresh(folder, [], prompts, TOKENS, ranks) == [plain]


@pytest.mark.long
def test_after_20_updates_it_equals_fresh_engines(one: Bench, untied: Path, fresh: Fresh, tmp_path: Path) -> None:
    assert ADAPTERS in one.engine.abilities
    update_and_compare(one, untied, fresh, tmp_path, ranks=1, prompts=[*PROMPTS[:2], LONG], compared=(5, 18, 19))


def hits(live: Bench) -> float:
    """Tokens that were found in the prefix cache so far."""
    connection = http.client.HTTPConnection(urlsplit(live.url).netloc, timeout=WITHIN_S)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def test_no_prefix_is_shared_between_adapters_or_versions(one: Bench) -> None:
    a, b, _ = three(one.replica.layout)
    later = a.step(7, 1.0)
    found: list[Any] = [one.greedy([LONG], 8)]
    for slot, adapter in ((0, a), (1, b), (0, later)):
        set_adapter(one, adapter, slot)
        before = hits(one)
        found.append(one.greedy([LONG], 8, adapter.name))
        assert hits(one) == before, "a prefix of another adapter or version was used"
        assert one.greedy([LONG], 8, adapter.name) == found[-1]
        assert hits(one) > before
    before = hits(one)
    assert one.greedy([LONG], 8) == found[0]
    assert hits(one) > before, "the base's prefix was lost"
    assert one.greedy([LONG], 8, "b") == found[2]
    assert len({str(each) for each in found}) == 4


def begun(live: Bench, prompts: list[Prompt], sampling: SamplingParams, adapter: str) -> "Future[list[Completion]]":
    """A flight that has tokens."""
    flight = live.begin(prompts, sampling, adapter)
    number = live.flights
    while not flight.done() and min(live.engine.counts().get(number) or [0]) == 0:
        time.sleep(0.02)
    return flight


LONGEST = SamplingParams(max_tokens=100, temperature=0.0)


@pytest.mark.parametrize("policy", [pytest.param("continue", marks=pytest.mark.long), "recompute"])
def test_only_its_own_sequences_go_on_with_the_new_bits(one: Bench, policy: Any) -> None:
    a, b, _ = three(one.replica.layout)
    first, other = set_adapter(one, a, 0), set_adapter(one, b, 1)
    prompt = [Prompt(tuple(PROMPTS[0]))]
    begun_before = {name: one.begin(prompt, LONGEST, name) for name in ("b", "")}
    wanted = {name: flight.result(WITHIN_S)[0] for name, flight in begun_before.items()}
    one.engine.policy = policy
    try:
        flights = {name: begun(one, prompt, LONGEST, name) for name in ("b", "", "a")}
        second = set_adapter(one, a.step(3, 1.0), 0)
        ended = {name: flight.result(WITHIN_S)[0] for name, flight in flights.items()}
    finally:
        one.engine.policy = "continue"
    for name in ("b", ""):
        assert (ended[name].token_ids, ended[name].logprobs) == (wanted[name].token_ids, wanted[name].logprobs)
    base = one.engine.version
    assert {span.version for span in ended["b"].spans} == {max(base, (0, other))}
    assert {span.version for span in ended[""].spans} == {base}
    before, after = ended["a"].spans
    assert (before.version, after.version) == (max(base, (0, first)), max(base, (0, second)))
    assert 0 < before.end == after.start < LONGEST.max_tokens
    if policy == "recompute":  # then later tokens are those of the new version alone
        rest = one.greedy([[*PROMPTS[0], *ended["a"].token_ids[: before.end]]], 8, "a")[0]
        assert rest[0] == list(ended["a"].token_ids[before.end :][:8])


@pytest.mark.long
def test_with_the_policy_drain_its_sequences_end_with_the_old_bits(one: Bench) -> None:
    a = three(one.replica.layout)[0]
    set_adapter(one, a, 0)
    prompt = [Prompt(tuple(PROMPTS[0]))]
    wanted = one.generate(prompt, LONGEST, "a")[0]
    one.engine.policy = "drain"
    try:
        flight = begun(one, prompt, LONGEST, "a")
        set_adapter(one, a.step(3, 1.0), 0)
        assert flight.done()
    finally:
        one.engine.policy = "continue"
    (found,) = flight.result(0.0)
    assert found.token_ids == wanted.token_ids
    assert len(found.spans) == 1
    assert tuple(one.greedy(PROMPTS[:1], TOKENS, "a")[0][0]) != wanted.token_ids[:TOKENS]


def test_scores_margins_and_replays_are_the_adapters(one: Bench) -> None:
    a, b, _ = three(one.replica.layout)
    version = set_adapter(one, a, 0)
    set_adapter(one, b, 1)
    prompt = tuple(PROMPTS[1])
    sampling = SamplingParams(12, seed=3, options=SamplingOptions(portable=True))
    (drawn,) = one.generate([Prompt(prompt, 5)], sampling, "a")
    scores = one.score(prompt, drawn.token_ids, sampling, "a")
    np.testing.assert_allclose(scores, drawn.logprobs, atol=0.05)
    assert not np.allclose(one.score(prompt, drawn.token_ids, sampling, "b"), scores, atol=0.1)
    claims = [Claim(prompt, drawn.token_ids, sampling, 5, replay=True, adapter=name) for name in ("a", "b", "")]
    ours, theirs, base = one.judge(claims)
    assert ours.scores == drawn.logprobs
    assert not any(ours.margins)
    assert ours.version == max(one.engine.version, (0, version))
    assert any(theirs.margins)
    assert base.scores != drawn.logprobs
    (judged,) = one.judge([Claim(prompt, drawn.token_ids, sampling, 5, previous=True, adapter="a")])
    np.testing.assert_allclose(judged.scores, drawn.logprobs, atol=0.05)
    assert judged.previous == ()


@pytest.mark.long
def test_an_update_of_the_base_keeps_the_adapters(one: Bench) -> None:
    a = three(one.replica.layout)[0]
    set_adapter(one, a, 0)
    before = one.greedy(PROMPTS, TOKENS, "a")
    for share in (0.3, 0.02):  # of the first one, vLLM would have to keep too many old bits
        one.update(step_of(one.replica, one.version, share))
        assert (one.engine.live_hashes() == one.replica.hashes).all()
        assert one.engine.adapter_root(0) == a.root(0)
    sampling = SamplingParams(6, temperature=0.0)
    (drawn,) = one.generate([Prompt(tuple(PROMPTS[0]))], sampling)
    (judged,) = one.judge([Claim(tuple(PROMPTS[0]), drawn.token_ids, sampling, 0, previous=True)])
    assert len(judged.previous) == 6, "the base's scores under the version before do not need the adapters"
    assert one.greedy(PROMPTS, TOKENS, "a") != before
    after = one.greedy(PROMPTS, TOKENS, "a")
    assert one.reload() == one.replica.root
    assert one.engine.adapter_root(0) == a.root(0)
    assert one.greedy(PROMPTS, TOKENS, "a") == after


@pytest.mark.long
def test_a_dropped_adapters_sequences_fail_and_no_others(one: Bench) -> None:
    a, b, _ = three(one.replica.layout)
    set_adapter(one, a, 0)
    set_adapter(one, b, 1)
    prompt = [Prompt(tuple(PROMPTS[0]))]
    wanted = one.generate(prompt, LONGEST, "b")[0].token_ids
    flights = {name: begun(one, prompt, LONGEST, name) for name in ("b", "a")}
    one.engine.drop_adapter(0)
    with pytest.raises(EngineError):
        flights["a"].result(WITHIN_S)
    assert flights["b"].result(WITHIN_S)[0].token_ids == wanted
    for call in (lambda: one.greedy(PROMPTS, 4, "a"), lambda: one.engine.adapter_root(0)):
        with pytest.raises(EngineError):
            call()
    set_adapter(one, a, 0)
    flight = begun(one, prompt, LONGEST, "a")
    set_adapter(one, replace(b, config=replace(b.config, name="z")), 0)  # another adapter in its slot
    with pytest.raises(EngineError):
        flight.result(WITHIN_S)
    assert one.generate(prompt, LONGEST, "z")[0].token_ids == wanted
    one.engine.drop_adapter(0)


def test_a_live_bit_that_changed_is_found(one: Bench) -> None:
    a = three(one.replica.layout)[0]
    set_adapter(one, a, 0)
    for padding in (False, True):
        body = {"method": "flip", "args": [1, "model.layers.1.mlp.down_proj", padding]}
        for wanted in (False, True):
            connection = http.client.HTTPConnection(urlsplit(one.url).netloc, timeout=WITHIN_S)
            connection.request("POST", "/collective_rpc", json.dumps(body), {"content-type": "application/json"})
            assert connection.getresponse().status == 200
            connection.close()
            assert (one.engine.adapter_root(0) == a.root(0)) is wanted


def test_bits_that_are_not_the_roots_are_never_served(one: Bench) -> None:
    a = three(one.replica.layout)[0]
    set_adapter(one, a, 0)
    before = one.greedy(PROMPTS, 8, "a")
    with a.step(1, 1.0).given(0, (0, 1 << 20)) as given, pytest.raises(EngineError, match="not those of version"):
        one.engine.stage_adapter(replace(given, root=a.root(0)))
    with pytest.raises(EngineError, match="no adapter is staged"):
        one.engine.switch_adapter(0)
    assert one.greedy(PROMPTS, 8, "a") == before


def test_what_vllm_cannot_adapt_is_refused_in_one_sentence_with_the_flag(one: Bench) -> None:
    base = one.replica.layout
    wide = make_adapter(base, AdapterSlots.reserve(base, 1, 32), "wide", targets=("q_proj",), rank=32)
    with wide.given(0, (0, 9)) as given, pytest.raises(UsageError, match=r"--max-lora-rank 32"):
        one.engine.stage_adapter(given)
    made = make_adapter(base, AdapterSlots.reserve(base, 1, 16), "head", targets=("q_proj",), rank=2)
    config = replace(made.config, modules=(AdapterModule("lm_head", 2), *made.config.modules))
    head = replace(made, config=config)
    with head.given(0, (0, 9)) as given, pytest.raises(UsageError, match=r"lm_head.*--lora-target-modules"):
        one.engine.stage_adapter(given)
    assert one.greedy(PROMPTS, 4)


class TestVllmAdapters(AdapterContract):
    """The contract of adapters, on the vLLM of this file."""

    @pytest.fixture
    def subject(self, one: Bench) -> Iterator[Subject]:
        for slot in range(3):
            one.engine.drop_adapter(slot)
        one.reload()
        subject = Subject(one.engine, one.replica, one.version)
        yield subject
        one.version = subject.version


@pytest.mark.long
async def test_a_vllm_that_a_node_starts_again_gets_its_adapters_again(
    untied: Path, python: Path, tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(untied)
    replica = Replica.from_checkpoint(checkpoint)
    for name, data in checkpoint.files.items():
        (tmp_path / name).write_bytes(data)
    slots = AdapterSlots.reserve(replica.layout, 3, 16)

    async def source() -> ReplicaRef:
        fd = replica.seal_for_readers()
        return ReplicaRef(replica.layout, fd, tmp_path, (0, 1), replica.root, slots=slots)

    settings = JoinConfig(home=tmp_path, engine="vllm", threads=1, vllm_python=python, vllm_arg=SMALL, engine_port=0)
    host = EngineHost(specs_of(settings)[0], source)
    adapters = three(replica.layout)
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run)
        for slot, adapter in enumerate(adapters):
            with adapter.memory() as fd:
                assert await host.set_adapter(slot, adapter.config, fd, (0, 2 + slot), adapter.root(slot)) is None
        for restarts in range(2):
            with trio.fail_after(2 * WITHIN_S):
                await host.wait_ready()
            assert host.restarts == restarts
            assert host.adapters == {"a": (0, 2), "b": (0, 3), "c": (0, 4)}
            assert ADAPTERS in host.abilities
            for slot, adapter in enumerate(adapters):
                assert await host.prove_adapter(slot) == adapter.root(slot)
            (found,), _ = await host.generate([Prompt((5, 6, 7))], SamplingParams(8), None, "b")
            assert {span.version for span in found.spans} == {(0, 3)}
            if not restarts:
                os.killpg(host._process.pid, signal.SIGKILL)
                while host.ready:  # noqa: ASYNC110 - as a node sees it
                    await trio.sleep(0.1)
        nursery.cancel_scope.cancel()


def test_the_flags_are_the_slots(untied: Path) -> None:
    base = layout_of(untied)
    flags = adapter_flags(base, AdapterSlots.reserve(base, 8, 12))
    assert flags[:5] == ("--enable-lora", "--max-loras", "10", "--max-lora-rank", "16")
    assert flags[5:] == ("--lora-target-modules", *sorted(ALL))


@pytest.mark.long
def test_so_it_does_on_two_ranks(two: Bench, tied: Path, fresh: Fresh, tmp_path: Path) -> None:
    update_and_compare(two, tied, fresh, tmp_path, ranks=2, prompts=PROMPTS[:1], compared=(5,))
