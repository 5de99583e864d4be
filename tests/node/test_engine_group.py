"""Several engines used as one: the least busy generates, each commits by itself, and a failure delays no other."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
import trio.testing

from codec.errors import UsageError
from node.engines.base import JUDGES, REPLAYS, Prompt, SamplingParams
from node.engines.group import LATE_S, EngineGroup, GroupedEngine
from node.engines.host import Commitment, EngineFailed, EngineHost, EngineLost
from node.engines.room import NO_ROOM_TOLD

SAMPLING = SamplingParams(max_tokens=4)


class Fake:
    """An engine host whose calls take a given time."""

    def __init__(self, name: str, version: int = 0, commit_s: float = 0.0) -> None:
        self.name, self.commit_s = name, commit_s
        self.version, self.root = (0, version), bytes([version]) * 32
        self.preemptible, self.continuous_batching, self.scores = True, False, False
        self.room = NO_ROOM_TOLD
        self.restarts = self.reloads = 0
        self.up = trio.Event()
        self.up.set()
        self.fails = False
        self.live = b""
        self.torn = False
        self.abilities = frozenset[str]()
        self.adapters: dict[str, tuple[int, int]] = {}
        self.asleep = False
        self.waits_for = ""
        self.broken = trio.Event()
        """It cannot be started."""
        self.replica = (0, version)
        self.staged: list[str] = []
        self.stage_s, self.generate_s = 0.0, 1.0
        self.told = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await self.broken.wait()
        self.up = trio.Event()
        raise UsageError(f"{self.name} has no kernel for this GPU.")

    def lacks(self, version: tuple[int, int]) -> bool:
        return self.ready and self.version < version

    async def reload(self) -> None:
        await trio.sleep(1.0)
        self.reloads += 1
        self.version = self.replica

    async def sleep(self) -> None:
        self.asleep, self.up = True, trio.Event()

    def wake(self) -> None:
        self.asleep = False

    @property
    def ready(self) -> bool:
        return self.up.is_set()

    async def wait_ready(self) -> None:
        await self.up.wait()

    async def generate(
        self, prompts: Any, sampling: SamplingParams, counts: Any = None, adapter: str = "", draws: Any = None
    ) -> Any:
        for _ in range(10):
            await trio.sleep(self.generate_s / 10)
            if self.told:
                counts((1,) * len(prompts))
        return [self.name] * len(prompts), self.generate_s

    async def stage(self, fd: int, version: tuple[int, int]) -> float:
        await trio.sleep(self.stage_s)
        self.staged.append(os.readlink(f"/proc/self/fd/{fd}"))
        if self.fails:
            raise EngineFailed("no", poisoned=False)
        return 0.1

    async def commit(self, version: tuple[int, int], root: bytes) -> Commitment | None:
        await trio.sleep(self.commit_s)
        if self.fails:
            raise EngineLost("gone")
        self.version, self.root = version, root
        return Commitment(self.commit_s, 0.0)

    async def prove(self) -> bytes:
        return self.live or self.root

    async def prove_adapters(self) -> bool:
        return not self.torn


def group_of(*fakes: Fake) -> EngineGroup:
    return EngineGroup(cast(list[EngineHost], list(fakes)))


async def test_work_goes_to_the_least_busy_host(autojump_clock):
    a, b, away = Fake("a"), Fake("b"), Fake("away")
    away.up = trio.Event()
    group = group_of(a, b, away)
    names: list[str] = []

    async def one(count: int) -> None:
        made, _ = await group.generate([Prompt((1,))] * count, SAMPLING)
        names.append(cast(Any, made)[0])

    async with trio.open_nursery() as nursery:
        for count in (3, 1, 1):
            nursery.start_soon(one, count)
            await trio.testing.wait_all_tasks_blocked()
    assert sorted(names) == ["a", "b", "b"]


def test_hosts_of_several_classes_promise_no_bits_together():
    one, two, away = Fake("one"), Fake("two"), Fake("away")
    one.abilities = frozenset({JUDGES, REPLAYS, "class:a"})
    two.abilities = frozenset({JUDGES, REPLAYS, "class:b"})
    away.up = trio.Event()
    assert group_of(one, one).abilities == one.abilities
    assert group_of(one, two).abilities == {JUDGES}
    assert group_of(one, away).abilities == one.abilities, "it has measured nothing yet"


@asynccontextmanager
async def running(*fakes: Fake) -> AsyncIterator[EngineGroup]:
    group = group_of(*fakes)
    async with trio.open_nursery() as nursery:
        await nursery.start(group.run)
        yield group
        nursery.cancel_scope.cancel()


async def test_each_host_commits_by_itself_and_gets_work_for_what_it_has_proven(autojump_clock):
    quick, slow, broken = Fake("quick"), Fake("slow", commit_s=4.0), Fake("broken")
    broken.fails = True
    async with running(quick, slow, broken) as group:
        assert await group.stage(0, (0, 1)) == 0.1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(group.commit, (0, 1), b"r" * 32)
            await trio.sleep(1.0)
            assert (quick.version, slow.version) == ((0, 1), (0, 0))
            assert (group.version, group.root) == ((0, 1), b"r" * 32)
            for _ in range(3):  # the slow one is at the version before, and gets none of this work
                made, _ = await group.generate([Prompt((1,))], SAMPLING)
                assert cast(Any, made) == ["quick"]
        assert slow.version == (0, 1)
        broken.up = trio.Event()
        assert await group.prove() == (b"r" * 32, True)
        slow.root = b"x" * 32
        assert await group.prove() == (b"", True), "engines with different bits have no common root"
        slow.live = b"y" * 32
        assert await group.prove() == (b"", False)


async def test_an_engine_that_hangs_delays_no_version_and_is_filled_again_when_it_answers(autojump_clock):
    good, hangs = Fake("good"), Fake("hangs", commit_s=200.0)
    async with running(good, hangs) as group:
        for number in (1, 2, 3):
            good.replica = hangs.replica = (0, number)
            before = trio.current_time()
            await group.stage(0, (0, number))
            assert await group.commit((0, number), bytes([number]) * 32) is not None
            assert trio.current_time() - before <= (LATE_S + 0.1 if number == 1 else 0.1)
            assert (group.version, group.ready) == ((0, number), True)
            assert not group.lacks((0, number)), "what was left behind takes no version"
            made, _ = await group.generate([Prompt((1,))], SAMPLING)
            assert cast(Any, made) == ["good"]
        assert [engine.late for engine in group.engines] == [False, True]
        await trio.sleep(210)
        assert (hangs.version, hangs.reloads) == ((0, 3), 1)
        assert [engine.late for engine in group.engines] == [False, False]
        hangs.commit_s = 0.0
        await group.stage(0, (0, 4))
        await group.commit((0, 4), b"4" * 32)
        assert good.version == hangs.version == (0, 4)


async def test_what_a_hanging_engine_was_to_generate_is_given_up_and_what_it_still_draws_is_not(autojump_clock):
    good, hangs = Fake("good"), Fake("hangs", commit_s=200.0)
    hangs.generate_s = 20.0
    for draws in (False, True):
        good.version = hangs.version = (0, 0)
        hangs.told = draws
        ended: list[str] = []
        async with running(good, hangs) as group:

            async def one(group: EngineGroup, ended: list[str]) -> None:
                try:
                    made, _ = await group.generate([Prompt((1,))], SAMPLING)
                    ended.append(cast(Any, made)[0])
                except EngineLost:
                    ended.append("lost")

            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(one, group, ended)
                    await trio.testing.wait_all_tasks_blocked()
                await group.commit((0, 1), b"r" * 32)
            assert ended == ["good", "hangs" if draws else "lost"]
            assert [engine.sequences for engine in group.engines] == [0, 0]


async def test_an_engine_that_stages_late_has_the_patch_although_the_caller_closed_it(autojump_clock, tmp_path):
    good, late = Fake("good"), Fake("late")
    late.stage_s = 60.0
    (tmp_path / "patch").touch()
    fd = os.open(tmp_path / "patch", os.O_RDONLY)
    async with running(good, late) as group:
        await group.stage(fd, (0, 1))
        os.close(fd)
        await group.commit((0, 1), b"r" * 32)
        late.replica = (0, 1)
        await trio.sleep(70)
        assert good.staged == late.staged == [str(tmp_path / "patch")]
        assert (late.version, late.reloads) == ((0, 1), 1)


async def test_nothing_is_drawn_from_an_older_version_when_the_newest_engine_is_lost(autojump_clock):
    newest, older = Fake("newest", version=2), Fake("older", version=1)
    async with running(newest, older) as group:
        assert group.ready
        newest.up = trio.Event()
        assert (group.version, group.ready) == ((0, 2), False)
        with pytest.raises(EngineLost):
            await group.generate([Prompt((1,))], SAMPLING)
        await group.wait_up()  # the older one can be given the version
        assert group.lacks((0, 2))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(group.wait_ready)
            await group.stage(0, (0, 2))
            await group.commit((0, 2), b"2" * 32)
        made, _ = await group.generate([Prompt((1,))], SAMPLING)
        assert cast(Any, made) == ["older"]


async def test_an_engine_that_cannot_start_is_given_up_while_another_one_serves(autojump_clock):
    good, bad = Fake("good"), Fake("bad")

    async def lose_both() -> None:
        async with running(good, bad) as group:
            bad.broken.set()
            await trio.testing.wait_all_tasks_blocked()
            await group.wait_filled()
            assert [engine.out for engine in group.engines] == ["", "bad has no kernel for this GPU."]
            assert group.ready
            good.broken.set()
            await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as raised:
        await lose_both()
    assert raised.group_contains(UsageError, match="good has no kernel")


async def test_all_engines_sleep_and_wake(autojump_clock):
    a, b = Fake("a"), Fake("b")
    async with running(a, b) as group:
        assert not group.asleep
        await group.sleep()
        assert group.asleep
        assert not group.ready
        group.wake()
        assert not group.asleep
        b.up.set()
        await group.wait_ready()


async def test_a_group_without_a_ready_host_raises(autojump_clock):
    alone = Fake("alone")
    alone.fails = True
    async with running(alone) as group:
        with pytest.raises(EngineLost):
            await group.commit((0, 1), b"r" * 32)
        alone.up = trio.Event()
        assert not group.ready
        with pytest.raises(EngineLost):
            await group.generate([Prompt((1,))], SAMPLING)
        with trio.move_on_after(1.0) as scope:
            await group.wait_ready()
        assert scope.cancelled_caught
        alone.up.set()
        await group.wait_ready()


async def test_a_group_waits_for_engines_that_are_planned_later(autojump_clock):
    group = EngineGroup()
    assert not group.ready
    assert not group.lacks((0, 1))
    assert group.abilities == frozenset()
    assert (group.version, group.root, group.waits_for) == ((0, 0), b"", "the model, to assign devices by its size")
    host = Fake("a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(group.wait_ready)
        await trio.sleep(3.0)
        group.use([GroupedEngine(cast(EngineHost, host))])
    assert group.ready


async def test_a_host_that_was_loading_when_a_version_came_without_a_patch_is_filled_when_it_is_ready(autojump_clock):
    fake = Fake("loading")
    fake.up = trio.Event()
    async with running(fake) as group:
        fake.replica = (1, 1)
        for _ in range(2):
            await group.reload((1, 1))  # it loads what the replica was before
        assert fake.reloads == 0
        fake.up.set()
        await trio.sleep(2.0)
        assert (fake.version, fake.reloads) == ((1, 1), 1)


async def test_a_host_that_was_loading_when_others_committed_is_filled_when_it_is_ready(autojump_clock):
    quick, loading, current = Fake("quick"), Fake("loading"), Fake("current", version=1)
    for away in (loading, current):
        away.up = trio.Event()
        away.replica = (0, 1)
    async with running(quick, loading, current) as group:
        await group.commit((0, 1), b"r" * 32)
        assert (quick.version, loading.version) == ((0, 1), (0, 0))
        for away in (loading, current):
            away.up.set()
        await trio.sleep(2.0)
        assert [fake.version for fake in (quick, loading, current)] == [(0, 1)] * 3
        assert (loading.reloads, current.reloads) == (1, 0)
