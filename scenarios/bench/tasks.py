"""Measures what it costs to start a task in a service of py-libp2p, by how many of its tasks run.

    python -m scenarios.bench.tasks
    python -m scenarios.bench.tasks --tasks 1000 4000 --json

A seed has two tasks for each connection in its network service, and starts two more for a new one. The library's task
manager and ours (`swarm.transport.tasks`) are measured in one run: the median time of one start, on one thread.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

import trio
import trio.testing
from libp2p.tools.anyio_service import Service, background_trio_service

from swarm.guard import Source
from swarm.transport.tasks import GuardedService

__all__ = ["main", "measure"]

_STARTS: Final = 20
"""Measured for each number of tasks."""
_TASKS: Final = (100, 2000, 8000)


class _Library(Service):
    """A service that only runs what is started in it."""

    async def run(self) -> None:
        await self.manager.wait_finished()


class _Ours(GuardedService, _Library):
    task_source = Source.CONNECTION


async def _start_us(service: Service, tasks: Sequence[int]) -> list[float]:
    """Microseconds for one start, for each number of running tasks (ascending)."""
    found = []
    async with background_trio_service(service):
        await trio.testing.wait_all_tasks_blocked()
        running = 0
        for wanted in tasks:
            await _start(service.manager.run_task, wanted - running)
            times = []
            for _ in range(_STARTS):
                begun = time.perf_counter()
                service.manager.run_task(trio.sleep_forever)
                times.append(time.perf_counter() - begun)
            running = wanted + _STARTS
            found.append(median(times) * 1e6)
    return found


async def _start(run_task: Callable[[Any], None], count: int) -> None:
    for _ in range(count):
        run_task(trio.sleep_forever)
    await trio.testing.wait_all_tasks_blocked()


def measure(tasks: Sequence[int]) -> list[dict[str, float]]:
    """A row for each number of tasks: `tasks`, `library_us` and `ours_us`, microseconds for one start."""
    tasks = sorted(tasks)
    library, ours = trio.run(_start_us, _Library(), tasks), trio.run(_start_us, _Ours(), tasks)
    return [
        {"tasks": count, "library_us": round(theirs, 1), "ours_us": round(own, 1)}
        for count, theirs, own in zip(tasks, library, ours, strict=True)
    ]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks", type=int, nargs="+", default=_TASKS, metavar="N", help="how many run (default: 100 2000 8000)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    rows = measure(options.tasks)
    if options.json:
        print(json.dumps(rows))
        return 0
    print("tasks that run   the library's manager, us   ours, us")
    for row in rows:
        print(f"{row['tasks']:14d}   {row['library_us']:25.1f}   {row['ours_us']:8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
