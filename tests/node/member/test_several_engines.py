"""A worker over a group of engines, with the ledger, under a virtual clock: losses of one, sleep, and capacity."""

import sqlite3
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from work_kit import SAMPLING, Swarm, TimedEngine, collect, gid

from node.engines.group import EngineGroup
from node.engines.host import EngineHost, EngineLost
from node.ledger.binding import Binding
from node.ledger.packing import pack_tokens
from node.member.engine_sleep import EngineSleep


class TimedHost(TimedEngine):
    """A timed engine as the host of one process. `crashes`: it ends soon after the call that begins next."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.preemptible = self.continuous_batching = True
        self.crashes = False
        self.asleep = False
        self.restarts = self.reloads = 0
        self.waits_for = ""
        self.busy = 0
        self.most = 0
        self.made = 0
        self.down_s = 30.0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep_forever()

    async def generate(self, prompts: Sequence[Any], sampling: Any, counts: Any = None, *more: Any) -> Any:
        self.busy += len(prompts)
        self.most = max(self.most, self.busy)
        crashes, self.crashes = self.crashes, False
        try:
            if crashes:
                await trio.sleep(0.1)
                trio.lowlevel.spawn_system_task(self._restart)
                raise EngineLost("gone")
            found = await super().generate(prompts, sampling, counts)
            self.made += len(prompts)
            return found
        finally:
            self.busy -= len(prompts)

    async def _restart(self) -> None:
        self.up = trio.Event()
        self.restarts += 1
        await trio.sleep(self.down_s)
        self.up.set()

    async def sleep(self) -> None:
        self.asleep, self.up = True, trio.Event()

    def wake(self) -> None:
        self.asleep = False
        self.up.set()


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[Swarm]:
    async with trio.open_nursery() as nursery:
        yield Swarm(tmp_path, nursery)
        nursery.cancel_scope.cancel()


async def start(swarm: Swarm, *hosts: TimedHost, batch: int = 4) -> EngineGroup:
    group = EngineGroup(cast(list[EngineHost], list(hosts)))
    await swarm.nursery.start(group.run)
    await swarm.add_node(1, rate=0.0, engine=group, capacity=2 * batch, batch=batch)
    swarm.worker(1).batch.engines = len(hosts)
    return group


def prompt_of(i: int) -> bytes:
    return pack_tokens((1, 2, i))


def requeued(swarm: Swarm) -> int:
    """Samples that came back to the ledger."""
    return sqlite3.connect(swarm.path).execute("select count(*) from requeues").fetchone()[0]


async def test_each_engine_gets_a_batch_of_its_own(swarm: Swarm, autojump_clock: Any) -> None:
    service = await swarm.start_service()
    a, b = TimedHost(100.0), TimedHost(100.0)
    await start(swarm, a, b)
    session = service.open("s", Binding(4, SAMPLING))
    await collect(service, session, 40)
    assert a.most == b.most == 4
    assert abs(a.made - b.made) <= 16
    assert a.made + b.made == 160


async def test_the_loss_of_one_engine_costs_its_own_samples_only(swarm: Swarm, autojump_clock: Any) -> None:
    service = await swarm.start_service()
    a, b = TimedHost(100.0), TimedHost(100.0)
    await start(swarm, a, b)
    session = service.open("s", Binding(4, SAMPLING))
    await collect(service, session, 5)
    a.crashes = True
    groups = await collect(service, session, 20, first=100)
    assert len(groups) == 20
    assert (a.restarts, b.restarts) == (1, 0)
    assert requeued(swarm) == 0, "the other engine generated them"
    made = b.made
    await trio.sleep(40)
    await collect(service, session, 10, first=200)
    assert a.ready
    assert b.made - made < 40, "the first one works again"


async def test_a_sample_that_ends_engines_is_given_back_after_the_second(swarm: Swarm, autojump_clock: Any) -> None:
    service = await swarm.start_service()
    a, b, c = TimedHost(100.0), TimedHost(100.0), TimedHost(100.0)
    await start(swarm, a, b, c)
    session = service.open("s", Binding(1, SAMPLING))
    a.crashes = b.crashes = True
    service.offer(session, gid(0), prompt_of(0))
    await collect(service, session, 1, offers=0)
    assert (a.restarts, b.restarts) == (1, 1)
    assert requeued(swarm) == 1
    assert c.made == 1


async def test_asleep_a_node_takes_no_work_and_awake_it_goes_on(swarm: Swarm, autojump_clock: Any) -> None:
    service = await swarm.start_service()
    a, b = TimedHost(100.0), TimedHost(100.0)
    group = await start(swarm, a, b)
    woken: list[str] = []
    sleep = EngineSleep(group, swarm.worker(1), lambda: woken.append("restored"), runs_apart=False)
    session = service.open("s", Binding(4, SAMPLING))
    for i in range(4):
        service.offer(session, gid(i), prompt_of(i))
    await trio.sleep(1.0)
    assert await sleep.sleep(100.0) is True
    accepted = service.status().accepted
    assert accepted >= 8
    assert (service.status().samples_leased, requeued(swarm)) == (0, 0), "what it had was finished"
    assert (sleep.asleep, a.asleep, b.asleep) == (True, True, True)
    service.offer(session, gid(10), prompt_of(10))
    await trio.sleep(60.0)
    assert (service.status().accepted, service.status().samples_leased) == (accepted, 0)
    assert await sleep.wake(100.0) is True
    await trio.sleep(30.0)
    assert service.status().groups_open == 0
    assert woken == ["restored"]


async def test_what_is_not_finished_before_sleep_is_given_back(swarm: Swarm, autojump_clock: Any) -> None:
    service = await swarm.start_service()
    a = TimedHost(1.0)
    group = await start(swarm, a)
    sleep = EngineSleep(group, swarm.worker(1), lambda: None, runs_apart=False)
    session = service.open("s", Binding(4, SAMPLING))
    service.offer(session, gid(0), prompt_of(0))
    await trio.sleep(1.0)
    assert await sleep.sleep(2.0) is False
    await trio.sleep(1.0)
    assert (service.status().samples_free, service.status().samples_leased) == (4, 0)
