"""A swarm of real processes to attack, and measurements of it: heartbeats, leases, memory, logs, CPU time."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from kit import Words, checkpoint, holds, root_of, step, weights
from peer_kit import Member

from codec.sign import Key
from node.host.port import free_port
from node.settings import keyfile
from scenarios.harness.processes import next_line
from scenarios.harness.swarm import Swarm, swarm_in
from scenarios.harness.usage import ProcessUsage

MIB = 1 << 20
FLOOD_S = float(os.environ.get("ADVERSARY_SECONDS", "3"))
"""How long floods last: seconds in CI's short form, more under `make adversary`."""
FULL = FLOOD_S > 10
"""Run every attack (`make adversary`); otherwise only the most expensive ones, to save time in CI."""
PASSES = int(os.environ.get("ADVERSARY_PASSES", "3"))
"""Number of versions that are timed with, and without, an attack; the medians are compared."""
TICKET_NODES = 64
PUBLISHED_WITHIN_S = 180.0
"""Time limit for a version to be sealed under an attack, s."""
BEAT_S = 0.5
"""The heartbeat period of the loopback preset, s."""
LATE_S = 1.0
"""No heartbeat may be later than this during an attack, s."""

FIRST = weights()
OBSERVER = Key(b"\x07" * 32)


class Arena:
    """A seed (`seed`) and a node (`box`), each listening on a known port."""

    def __init__(self, swarm: Swarm, words: Words, density: float = 0.01) -> None:
        """`density`: the share of the elements that a version changes."""
        self.swarm = swarm
        self.words = words
        self.density = density
        self.version = 0
        self.seed_port, self.box_port = free_port(), free_port()
        self._publisher: subprocess.Popen[str] | None = None

    def start(
        self,
        *,
        box: bool = True,
        base: Path | None = None,
        announce: int | None = None,
        up_mbit: float = 0.0,
        **options: Any,
    ) -> None:
        """Start the seed, and the node if `box`. `announce`: the port at which others reach the seed, if it is not its
        own. `up_mbit`: the seed's uplink, Mbit/s; 0: not limited."""
        swarm, self.options = self.swarm, options
        more: tuple[str, ...] = () if announce is None else ("--announce", f"127.0.0.1:{announce}")
        more += ("--up-mbit", str(up_mbit)) if up_mbit else ()
        self.base = base or checkpoint(swarm.folder / "base", self.words)
        swarm.seed(self.base, "--listen", f"127.0.0.1:{self.seed_port}", *more, **options)
        self.ticket = swarm.ticket("--nodes", str(TICKET_NODES))
        self.key = keyfile.load(swarm.home("seed") / "authority.key")
        if box:
            swarm.start(
                "box", "join", self.ticket, "--engine", "none", "--listen", f"127.0.0.1:{self.box_port}", **options
            )
            swarm.until("box", holds(root_of(self.words)))

    @property
    def seed_public(self) -> bytes:
        return self.key.public

    @property
    def box_public(self) -> bytes:
        return keyfile.load(self.swarm.home("box") / "node.key").public

    def process(self, name: str = "seed") -> ProcessUsage:
        return ProcessUsage(self.swarm.running[name].pid)

    def another_ticket(self, nodes: int = TICKET_NODES) -> str:
        return self.swarm.ticket("--nodes", str(nodes))

    # ------------------------------------------------------------ verdicts

    def alive(self, name: str = "seed") -> bool:
        return self.swarm.running[name].poll() is None

    def log(self, name: str = "seed") -> str:
        return self.swarm.log(name, 1 << 26)

    def log_events(self, name: str = "seed") -> Counter[str]:
        """The number of log lines of a process, by event."""
        return Counter(re.findall(r'"event": ?"([^"]*)"', self.log(name)))

    def unharmed(self, after: str = "") -> None:
        """Assert that every process runs, and that no guard has logged a bug."""
        for name in self.swarm.running:
            log = self.log(name)
            assert self.alive(name), f"{name} has ended after {after}: {log[-3000:]}"
            assert "a bug of ours" not in log, log[-3000:]
            assert "Traceback" not in log, log[-3000:]

    def leases_lost(self) -> int:
        return self.log().count('"lease_expired"')

    def honest_leases_lost(self) -> list[str]:
        """Return which of the box and the observer lost a lease. An attacker that stops renewing loses its own, as it
        should."""
        honest = [OBSERVER.public.hex()[:8]]
        if "box" in self.swarm.running:
            honest.append(self.box_public.hex()[:8])
        lost = [line for line in self.log().splitlines() if '"lease_expired"' in line]
        return [line for line in lost if any(peer in line for peer in honest)]

    def still_works(self) -> None:
        """Publish a version and wait until the box holds it."""
        self.swarm.until("box", holds(self.publish()))

    async def works(self) -> None:
        await trio.to_thread.run_sync(self.still_works)

    async def flight_s(self) -> float:
        """Publish a version; returns the seconds from its start until the box held it, by the logs."""
        await self.works()
        began = self.swarm.until_event("seed", "publishing", version=f"0.{self.version}")
        logged = partial(self.swarm.until_event, "box", "holds", 10.0, version=f"0.{self.version}")
        return await trio.to_thread.run_sync(logged) - began

    def publish(self) -> str:
        """Publish the next version; returns its root in hex, as the seed reports it."""
        self.version += 1
        self.words = step(self.words, self.version, self.density)
        folder = checkpoint(self.swarm.folder / f"step_{self.version}", self.words)
        if self._publisher is None or self._publisher.poll() is not None:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            command = [sys.executable, str(Path(__file__).parent / "publisher.py"), str(self.swarm.home("seed"))]
            environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
            self._publisher = self.swarm.popen("publisher", command, environment=environment, **pipes)
        print(folder, file=self._publisher.stdin, flush=True)
        answer = json.loads(next_line(self._publisher, within_s=PUBLISHED_WITHIN_S))
        shutil.rmtree(folder)
        return answer["root"]

    async def lets_in(self, within_s: float = 10.0, ticket: str = "") -> float:
        """Assert that a new machine with a valid ticket is admitted in time; returns the seconds that it took."""
        member = Member(Key.generate(), ticket or await trio.to_thread.run_sync(self.another_ticket), name="honest")
        began = trio.current_time()
        with trio.move_on_after(within_s):
            async with member.running():
                while not await member.enter():  # noqa: ASYNC110
                    await trio.sleep(0.2)
                return trio.current_time() - began
        self.unharmed()
        pytest.fail(f"a machine with a valid ticket was not let in within {within_s:g} s")


@contextlib.contextmanager
def arena_in(folder: Path, words: Words | None = None, density: float = 0.01, **options: Any) -> Iterator[Arena]:
    """`options`: as `Arena.start`, or the environment of its processes."""
    with swarm_in(folder) as swarm:
        arena = Arena(swarm, words or FIRST, density)
        arena.start(**options)
        yield arena


class Observer:
    """An honest member in the test's process that measures how late heartbeats are.

    On a busy machine the test's own loop may be late too; its lateness is subtracted.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.own_late_s = 0.0

    async def watch_self(self) -> None:
        while True:
            before = trio.current_time()
            await trio.sleep(0.05)
            self.own_late_s = max(self.own_late_s, trio.current_time() - before - 0.05)

    def reset(self) -> None:
        """Forget the measurements until now."""
        self.member.beats = self.member.beats[-1:]
        self.own_late_s = 0.0

    @property
    def late_s(self) -> float:
        """The worst lateness of a heartbeat since `reset`, s, including one that has not arrived yet."""
        times = [*self.member.beats, trio.current_time()]
        return max((b - a - BEAT_S for a, b in pairwise(times)), default=0.0) - self.own_late_s


@asynccontextmanager
async def observed(arena: Arena) -> AsyncIterator[Observer]:
    """An observer while the block runs."""
    member = Member(OBSERVER, arena.ticket, name="observer")
    observer = Observer(member)
    async with member.running(), trio.open_nursery() as nursery:
        assert await member.enter()
        await member.attach(0)
        nursery.start_soon(member.live)
        nursery.start_soon(observer.watch_self)
        with trio.fail_after(20):
            while len(member.beats) < 3:  # noqa: ASYNC110
                await trio.sleep(0.05)
        observer.reset()
        yield observer
        nursery.cancel_scope.cancel()
