"""Several engines used as one: the least busy generates, each commits by itself, and a failure delays no other."""

from typing import Any, cast

import pytest
import trio
import trio.testing

from node.engines.base import JUDGES, REPLAYS, Prompt, SamplingParams
from node.engines.group import EngineGroup
from node.engines.host import Commitment, EngineFailed, EngineHost, EngineLost

SAMPLING = SamplingParams(max_tokens=4)


class Fake:
    """An engine host whose calls take a given time."""

    def __init__(self, name: str, version: int = 0, commit_s: float = 0.0) -> None:
        self.name, self.commit_s = name, commit_s
        self.version, self.root = (0, version), bytes([version]) * 32
        self.preemptible, self.continuous_batching, self.scores = True, False, False
        self.restarts = self.reloads = 0
        self.up = trio.Event()
        self.up.set()
        self.fails = False
        self.live = b""
        self.torn = False
        self.abilities = frozenset[str]()

    @property
    def ready(self) -> bool:
        return self.up.is_set()

    async def wait_ready(self) -> None:
        await self.up.wait()

    async def generate(
        self, prompts: Any, sampling: SamplingParams, counts: Any = None, adapter: str = "", draws: Any = None
    ) -> Any:
        await trio.sleep(1.0)
        return [self.name] * len(prompts), 1.0

    async def stage(self, fd: int, version: tuple[int, int]) -> float:
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


async def test_each_host_commits_by_itself(autojump_clock):
    quick, slow, broken = Fake("quick"), Fake("slow", commit_s=5.0), Fake("broken")
    broken.fails = True
    group = group_of(quick, slow, broken)
    assert await group.stage(0, (0, 1)) == 0.1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(group.commit, (0, 1), b"r" * 32)
        await trio.sleep(1.0)
        assert (quick.version, slow.version) == ((0, 1), (0, 0))
        assert group.version == (0, 0), "the group must not offer a version that some host lacks"
    assert slow.version == (0, 1)
    broken.up = trio.Event()
    assert (group.version, group.root) == ((0, 1), b"r" * 32)
    assert await group.prove() == (b"r" * 32, True)
    slow.root = b"x" * 32
    assert await group.prove() == (b"", True), "engines with different bits have no common root"
    slow.live = b"y" * 32
    assert await group.prove() == (b"", False)


async def test_a_group_without_a_ready_host_raises(autojump_clock):
    alone = Fake("alone")
    alone.fails = True
    group = group_of(alone)
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
