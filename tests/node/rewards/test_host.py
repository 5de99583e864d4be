"""Rewards in processes of their own: a function that hangs, dies or lies about its type costs one sample."""

import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from rewards_kit import ids

from codec.errors import UsageError
from node.engines.base import RewardAsked
from node.rewards.functions import built_in
from node.rewards.host import RewardHost, RewardLimits
from node.rewards.outcome import MAX_WHY, Outcome


@asynccontextmanager
async def hosting(given: Sequence[str], model: Path, **limits: float) -> AsyncIterator[RewardHost]:
    host = RewardHost(given, model, RewardLimits(**limits))  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run)
        yield host
        nursery.cancel_scope.cancel()


async def compute(host: RewardHost, name: str, completion: str, metadata: bytes = b"{}", prompt: str = "?") -> Outcome:
    with trio.fail_after(60):
        return await host.compute(RewardAsked(name, metadata), ids(prompt), ids(completion))


async def test_a_function_gets_the_texts_and_the_metadata(model: Path, functions: Path) -> None:
    async with hosting([f"texts={functions}:texts", f"length={functions}:length"], model) as host:
        outcome = await compute(host, "texts", "answer", b'{"answer":[1,"x"]}', "ask ")
        assert outcome == Outcome(None, "ValueError: ask |answer|{'answer': [1, 'x']}")
        assert await compute(host, "length", "answer", b'{"more":0.5}') == Outcome(6.5)
        assert (host.computed, host.failed) == (2, 1)
        assert {ability.partition("@")[0] for ability in host.abilities} >= {"reward:texts", "reward:length"}
        assert host.abilities > {reward.ability for reward in built_in().values()}


async def test_what_is_built_in_needs_no_process_until_it_is_asked_for(model: Path) -> None:
    async with hosting([], model) as host:
        assert host.abilities == {reward.ability for reward in built_in().values()}
        assert await compute(host, "exact_match", "42", b'{"answer":"42"}') == Outcome(1.0)
        assert await compute(host, "exact_match@" + "0" * 16, "41", b'{"answer":"42"}') == Outcome(0.0)


@pytest.mark.parametrize(
    ("name", "completion", "why", "lost"),
    [
        ("crash", "crash", "its process ended", True),
        ("nan", "nan", "it returned nan, not a finite number", False),
        ("nan", "inf", "it returned inf, not a finite number", False),
        ("wrong", "text", "it returned a value of type str, not a number", False),
        ("huge", "text", "it returned a value of type str, not a number", False),
        ("leaves", "text", "SystemExit: no", False),
        ("hungry", "text", "it needs more memory than it may have", True),
        ("no_such", "text", "this node has no reward no_such", True),
    ],
)
async def test_what_goes_wrong_costs_one_sample(
    model: Path, functions: Path, name: str, completion: str, why: str, lost: bool
) -> None:
    given = [f"{each}={functions}:{each}" for each in ("crash", "nan", "wrong", "huge", "leaves", "hungry", "length")]
    async with hosting(given, model, memory_mb=2048) as host:
        assert await compute(host, name, completion) == Outcome(None, why, lost)
        assert await compute(host, "length", "abc") == Outcome(3.0)


async def test_a_function_that_hangs_is_killed_and_the_next_sample_has_a_new_process(
    model: Path, functions: Path
) -> None:
    async with hosting([f"hang={functions}:hang"], model, within_s=1.0) as host:
        began = time.monotonic()
        assert await compute(host, "hang", "hang") == Outcome(None, "it took more than 1 s", True)
        assert time.monotonic() - began < 30
        assert await compute(host, "hang", "on") == Outcome(1.0)


async def test_a_process_that_is_killed_costs_no_sample(model: Path, functions: Path) -> None:
    """By the system, which lacks memory, or by a person; also while it is idle."""
    async with hosting([f"hang={functions}:hang"], model, within_s=30.0) as host:
        assert await compute(host, "hang", "on") == Outcome(1.0)
        (process,) = host._idle
        os.kill(process._process.pid, signal.SIGKILL)
        assert await compute(host, "hang", "on") == Outcome(1.0)
        assert (host.computed, host.failed) == (2, 0)


async def test_one_that_hangs_leaves_the_others(model: Path, functions: Path) -> None:
    async with hosting([f"hang={functions}:hang"], model, within_s=20.0) as host:
        assert await compute(host, "hang", "on") == Outcome(1.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute, host, "hang", "hang")
            await trio.sleep(0.1)
            assert await compute(host, "hang", "on") == Outcome(1.0)
            nursery.cancel_scope.cancel()
        assert await compute(host, "hang", "on") == Outcome(1.0)


async def test_what_functions_print_is_lost_and_reasons_are_short(model: Path, functions: Path) -> None:
    async with hosting([f"noisy={functions}:noisy", f"long={functions}:long_reason"], model) as host:
        assert await compute(host, "noisy", "x") == Outcome(1.0)
        outcome = await compute(host, "long", "x")
        assert outcome.value is None
        assert MAX_WHY - 3 <= len(outcome.why) <= MAX_WHY
        assert "\n" not in outcome.why


async def test_no_process_is_left(model: Path, functions: Path) -> None:
    async with hosting([f"length={functions}:length"], model) as host:
        await compute(host, "length", "x")
        pids = [process._process.pid for process in host._idle]
        assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("metadata", [b"[]", b"{", b"[" * 10_000, b"\xff"])
async def test_metadata_that_is_no_object_gives_a_reason(model: Path, functions: Path, metadata: bytes) -> None:
    async with hosting([f"length={functions}:length"], model) as host:
        outcome = await compute(host, "length", "x", metadata)
        assert (outcome.value, outcome.lost) == (None, False)
        assert "metadata" in outcome.why


async def test_a_model_without_a_tokenizer_has_no_rewards_but_a_reason(tmp_path: Path) -> None:
    async with hosting([], tmp_path) as host:
        outcome = await compute(host, "json_valid", "{}")
        assert outcome == Outcome(None, "the model has no tokenizer.json, so its tokens have no text")


async def test_a_function_that_cannot_be_loaded_is_an_error_of_the_operators(model: Path) -> None:
    host = RewardHost(["f=no_such_module:f"], model)
    with pytest.raises(UsageError, match=r"--reward f=no_such_module:f cannot be used: .*no_such_module"):
        await host.run()
    host = RewardHost(["f=os:_exit", "g=no_such:g"], model)
    with pytest.raises(UsageError, match="swarm_version"):
        await host.run()
