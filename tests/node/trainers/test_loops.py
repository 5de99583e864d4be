"""What training loops need: async iteration, prompts with options of their own, early stop, partial groups, lags."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from seed_kit import RunningSeed, running

from codec.errors import UsageError
from node import PromptSpec, RolloutGroup, SamplingParams, Swarm, SwarmTimeout
from node.engines.base import OPTIONS, SamplingOptions
from node.ledger.messages import Abilities, SignedRollout, Withdraw, WorkLease, decode, encode
from node.ledger.packing import unpack_tokens
from node.trainers.messages import Room

SAMPLING = SamplingParams(max_tokens=4, stop_tokens=(2,))
PROMPTS = [[i] for i in range(6)]


class Tap:
    """Records what the node of a seed is sent, and answers only leases of the prompts for which `answers` is true."""

    def __init__(self, there: RunningSeed, answers: Callable[[int], bool] = lambda prompt: True) -> None:
        self.leases: list[WorkLease] = []
        self.withdrawn: list[int] = []
        send = there.node.send

        async def tapped(node: bytes, body: bytes) -> None:
            match decode(body):
                case WorkLease() as lease:
                    self.leases.append(lease)
                    if not answers(unpack_tokens(lease.prompt)[0]):
                        return
                case Withdraw(leases):
                    self.withdrawn += leases
            await send(node, body)

        there.service._send = tapped

    def held(self, prompt: int) -> set[int]:
        return {lease.lease for lease in self.leases if unpack_tokens(lease.prompt)[0] == prompt}


@pytest.fixture
def there(tmp_path: Path) -> Iterator[RunningSeed]:
    with running(tmp_path) as seed:
        yield seed


@pytest.fixture
def swarm(there: RunningSeed) -> Iterator[Swarm]:
    with Swarm.attach(home=there.home) as swarm:
        yield swarm


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ------------------------------------------------------------ async for


def run_in_both(main: Callable[[], Any]) -> list[Any]:
    return [asyncio.run(main()), trio.run(main)]


def test_async_for_gives_every_group_under_asyncio_and_trio(swarm: Swarm) -> None:
    async def main() -> list[int]:
        return [group.index async for group in swarm.rollouts(PROMPTS, 2, SAMPLING, timeout_s=30)]

    assert [sorted(found) for found in run_in_both(main)] == [[0, 1, 2, 3, 4, 5]] * 2


@pytest.mark.slow
def test_other_tasks_run_while_one_waits_and_a_cancelled_wait_loses_nothing(there: RunningSeed, swarm: Swarm) -> None:
    async def main() -> tuple[int, list[int]]:
        there.node.paused, beats = True, 0
        async with swarm.rollouts(PROMPTS[:2], 1, SAMPLING, timeout_s=30) as groups:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(groups), 0.05)
                beats += 1
            there.node.paused = False
            there.call(there.service.member_lost, there.node.key.public)  # its leases go out again
            return beats, sorted([group.index async for group in groups])

    assert asyncio.run(main()) == (3, [0, 1])

    async def trio_main() -> list[int]:
        there.node.paused = True
        async with swarm.rollouts(PROMPTS[:1], 1, SAMPLING, timeout_s=30) as groups:
            with trio.move_on_after(0.05):
                await anext(groups)
            there.node.paused = False
            await trio.to_thread.run_sync(there.call, there.service.member_lost, there.node.key.public)
            return [group.index async for group in groups]

    assert trio.run(trio_main) == [0]


def test_an_error_reaches_the_task_that_waits(there: RunningSeed, swarm: Swarm) -> None:
    there.node.paused = True

    async def main() -> None:
        await anext(swarm.rollouts(PROMPTS, 1, SAMPLING, timeout_s=0.3))

    for run in (asyncio.run, lambda coroutine: trio.run(lambda: coroutine)):
        with pytest.raises(SwarmTimeout, match="No group was completed within 0 s"):
            run(main())


def test_close_ends_a_wait_in_another_thread_and_withdraws_the_work(there: RunningSeed, swarm: Swarm) -> None:
    there.node.paused = True
    stream = swarm.rollouts(PROMPTS, 1, SAMPLING, timeout_s=60)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.extend(stream))
    waiting.start()
    eventually(lambda: there.call(lambda: there.service.status().groups_open) == 6)
    stream.close()
    waiting.join(5)
    assert (waiting.is_alive(), got) == (False, [])
    eventually(lambda: there.call(lambda: there.service.status().groups_open) == 0)
    with pytest.raises(StopIteration):
        next(stream)


# ------------------------------------------------------------ prompts with options of their own


def test_a_prompt_has_its_own_sampling_number_and_metadata(there: RunningSeed, swarm: Swarm) -> None:
    tap = Tap(there)
    own = SamplingParams(max_tokens=3, temperature=0.5, stop_tokens=(2,), seed=7)
    prompts = [PromptSpec([1], own, 3, {"task": "a"}), [2], PromptSpec([3], metadata="b"), PromptSpec([], metadata=4)]
    found = {group.index: group for group in swarm.rollouts(prompts, 2, SAMPLING, timeout_s=30)}
    assert {index: group.metadata for index, group in found.items()} == {0: {"task": "a"}, 1: None, 2: "b", 3: 4}
    assert found[3].refused is not None
    assert [(len(found[i].rollouts), found[i].n, found[i].sampling) for i in range(3)] == [
        (3, 3, own), (2, 2, SAMPLING), (2, 2, SAMPLING)
    ]  # fmt: skip
    leased = {unpack_tokens(lease.prompt)[0]: (lease.sampling.temperature, lease.sampling.seed) for lease in tap.leases}
    assert leased == {1: (0.5, 7), 2: (1.0, 0), 3: (1.0, 0)}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (PromptSpec([1], n=0), "n=0: 1 to 4096"),
        (PromptSpec([1], sampling={"max_tokens": 1}), "give SamplingParams"),  # type: ignore[arg-type]
        (PromptSpec([1], SAMPLING.with_options(adapter="x")), "adapter 'x'"),
        (PromptSpec([1, -2]), "token id -2"),
        (PromptSpec("text"), None),
    ],
)
def test_a_prompt_with_an_impossible_option_is_refused_alone(swarm: Swarm, spec: PromptSpec, why: str | None) -> None:
    if why is None:  # no prompt of its kind can be read
        with pytest.raises(UsageError, match="base folder"):
            list(swarm.rollouts([spec], 1, SAMPLING))
        return
    refused, group = sorted(swarm.rollouts([spec, [5]], 1, SAMPLING, timeout_s=30), key=lambda found: found.index)
    assert why in (refused.refused or "")
    assert group.refused is None


def test_an_option_of_one_prompt_that_no_node_has_is_named(there: RunningSeed, swarm: Swarm) -> None:
    there.call(there.service.hear, there.node.key.public, encode(Abilities((OPTIONS,), "a kind")))
    exact = PromptSpec([1], SamplingParams(max_tokens=4, options=SamplingOptions(exact=True)))
    stream = swarm.rollouts([exact], 1, SAMPLING, timeout_s=1.0)
    there.seed.members = []
    with pytest.raises(SwarmTimeout):
        next(stream)
    stream = swarm.rollouts([exact], 1, SAMPLING, timeout_s=30.0)
    waiting = threading.Thread(target=lambda: list(stream))
    waiting.start()
    eventually(lambda: ["exact"] in there.call(lambda: list(there.service.status().unmet.values())))
    stream.close()
    waiting.join(5)


def test_a_key_is_bound_to_each_prompts_own_sampling(swarm: Swarm) -> None:
    hot, cold = (SamplingParams(max_tokens=4, temperature=t, stop_tokens=(2,)) for t in (1.5, 0.1))
    first = list(swarm.rollouts([PromptSpec([1], hot)], 1, SAMPLING, key="k", timeout_s=30))
    again = list(swarm.rollouts([PromptSpec([1], hot)], 1, SAMPLING, key="k", timeout_s=30))
    assert [group.rollouts[0].token_ids for group in first] == [group.rollouts[0].token_ids for group in again]
    with pytest.raises(UsageError, match="bound to"):
        list(swarm.rollouts([PromptSpec([1], cold)], 1, SAMPLING, key="k", timeout_s=30))


def test_a_single_spec_in_the_place_of_a_list_is_refused(swarm: Swarm) -> None:
    with pytest.raises(UsageError, match="one PromptSpec"):
        swarm.rollouts(PromptSpec([1]), 1, SAMPLING)  # type: ignore[arg-type]


# ------------------------------------------------------------ filters, early stop, abort


def test_the_first_groups_are_taken_and_the_rest_is_aborted(there: RunningSeed, swarm: Swarm) -> None:
    tap = Tap(there, lambda prompt: prompt < 4)
    stream = swarm.rollouts(PROMPTS, 2, SAMPLING, take=3, timeout_s=30)
    got = [next(stream) for _ in range(3)]
    assert all(group.refused is None and group.index < 4 for group in got)
    eventually(lambda: tap.held(4) | tap.held(5) <= set(tap.withdrawn))  # while the trainer uses the third
    assert there.call(lambda: there.service.status().samples_leased) == 0
    assert list(stream) == []
    eventually(lambda: there.call(lambda: there.service.status().groups_ready) == 0)


def test_a_filter_goes_on_until_enough_groups_pass(swarm: Swarm) -> None:
    read: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for i in range(1000):
            read.append(i)
            yield [i]

    def even(group: RolloutGroup) -> bool:
        return group.index % 2 == 0

    got = [group.index for group in swarm.rollouts(prompts(), 1, SAMPLING, keep=even, take=4, timeout_s=30)]
    assert len(got) == 4
    assert all(index % 2 == 0 for index in got)
    assert len(read) < 100
    assert list(swarm.rollouts(PROMPTS, 1, SAMPLING, keep=lambda group: False, take=1, timeout_s=30)) == []
    with pytest.raises(UsageError, match="take"):
        swarm.rollouts(PROMPTS, 1, SAMPLING, take=0)


def test_an_aborted_group_is_not_generated_and_not_yielded(there: RunningSeed, swarm: Swarm) -> None:
    tap = Tap(there, lambda prompt: prompt != 2)
    stream = swarm.rollouts(PROMPTS, 1, SAMPLING, timeout_s=30)
    first = next(stream)
    eventually(lambda: bool(tap.held(2)))
    stream.abort(2)
    eventually(lambda: tap.held(2) <= set(tap.withdrawn))
    assert sorted([first.index, *(group.index for group in stream)]) == [0, 1, 3, 4, 5]


def test_a_group_is_aborted_while_the_loop_waits_for_it_and_a_prompt_before_it_is_read(
    there: RunningSeed, swarm: Swarm
) -> None:
    Tap(there, lambda prompt: prompt != 0)
    stream = swarm.rollouts((prompt for prompt in PROMPTS[:3]), 1, SAMPLING, timeout_s=30)
    stream.abort(1)
    threading.Timer(0.5, stream.abort, (0,)).start()
    assert [group.index for group in stream] == [2]


def test_a_seed_of_an_older_release_is_named(swarm: Swarm, there: RunningSeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.coordinator.trainer_server.Room", lambda allowed, speaks: Room(allowed))
    assert len(list(swarm.rollouts(PROMPTS, 1, SAMPLING, timeout_s=30))) == 6
    for prompts, more in ((PROMPTS, {"take": 2}), (PROMPTS, {"priority": 1}), ([PromptSpec([1], n=2)], {})):
        with pytest.raises(UsageError, match="older release"):
            list(swarm.rollouts(prompts, 1, SAMPLING, timeout_s=30, **more))  # type: ignore[arg-type]


# ------------------------------------------------------------ partial groups, lags


def test_a_partial_group_comes_at_its_deadline(there: RunningSeed, swarm: Swarm) -> None:
    withdrawn: list[int] = []
    send = there.node.send

    async def only_two(node: bytes, body: bytes) -> None:
        """The engine finishes the samples 1 and 2 of each lease, and never the others."""
        match decode(body):
            case WorkLease() as lease:
                for sample in (s for s in lease.samples if s in (1, 2)):
                    there.service.hear(node, encode(SignedRollout(there.node.draw(lease, sample))))
                return
            case Withdraw(leases):
                withdrawn.extend(leases)
        await send(node, body)

    there.service._send = only_two
    began = time.monotonic()
    (group,) = swarm.rollouts([[1]], 5, SAMPLING, partial_after_s=1.0, least=2, timeout_s=30)
    assert 1.0 <= time.monotonic() - began < 10
    assert (len(group.rollouts), group.n, group.is_partial) == (2, 5, True)
    assert [rollout.token_ids[1] for rollout in group.rollouts] == [11, 12], "samples 1 and 2"
    eventually(lambda: bool(withdrawn))
    with pytest.raises(UsageError, match="partial_s"):
        swarm.rollouts([[1]], 5, SAMPLING, partial_after_s=-1.0)


def test_lags_from_what_was_trained(there: RunningSeed, swarm: Swarm) -> None:
    swarm._max_lag = 0
    assert len(list(swarm.rollouts(PROMPTS, 1, SAMPLING, lag_from="trained", timeout_s=30))) == 6
    swarm.mark_trained()
    assert len(list(swarm.rollouts(PROMPTS, 1, SAMPLING, timeout_s=30))) == 6, "it counts from the sealed version"
    with pytest.raises(SwarmTimeout):
        next(swarm.rollouts(PROMPTS, 1, SAMPLING, lag_from="trained", timeout_s=1.0))
    swarm._max_lag = 1
    assert len(list(swarm.rollouts(PROMPTS, 1, SAMPLING, lag_from="trained", timeout_s=30))) == 6


def test_an_evaluation_beside_the_training_is_counted_apart_and_comes_first(there: RunningSeed, swarm: Swarm) -> None:
    tap = Tap(there)
    there.node.paused = True
    greedy = SamplingParams(max_tokens=4, temperature=0.0, stop_tokens=(2,))
    training = swarm.rollouts([[i] for i in range(30)], 1, SAMPLING, timeout_s=30)
    evaluation = swarm.rollouts([[100], [101]], 1, greedy, purpose="evaluate", priority=1, timeout_s=30)
    got: dict[str, list[int]] = {}
    loops = [
        threading.Thread(target=lambda name=name, groups=groups: got.update({name: [one.index for one in groups]}))
        for name, groups in (("training", training), ("evaluation", evaluation))
    ]
    loops[0].start()
    eventually(lambda: there.call(lambda: there.service.status().groups_open) > 8)
    loops[1].start()
    eventually(lambda: there.call(lambda: there.service.status().groups_evaluating) == 2)
    tap.leases.clear()
    there.node.paused = False
    there.call(there.service.member_lost, there.node.key.public)
    for loop in loops:
        loop.join(20)
    assert {name: sorted(found) for name, found in got.items()} == {
        "training": list(range(30)), "evaluation": [0, 1]
    }  # fmt: skip
    first = [unpack_tokens(lease.prompt)[0] for lease in tap.leases[:2]]
    assert sorted(first) == [100, 101]
    assert {lease.sampling.temperature for lease in tap.leases[:2]} == {0.0}
    assert there.call(lambda: there.service.status().groups_evaluating) == 0
