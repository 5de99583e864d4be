"""Starts the tasks of py-libp2p's services, each under a guard.

The library's own task manager looks through all tasks of a service, to find which one starts another: 1.4 ms with 2,000
tasks, 5.8 ms with 8,000 (`python -m scenarios.bench.tasks`). A seed has two tasks for each node, and each connection
starts two more. And an exception in one task would end the service, with the connections of all peers.
"""

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import trio
from libp2p.tools.anyio_service import Service

from swarm.guard import Source, guarded
from swarm.transport.base import Unreachable
from swarm.transport.connection.migrating_connection import lost_is_broken

__all__ = ["GuardedService", "GuardedTasks"]


class GuardedTasks:
    """What a service of the library has for its task manager, with another `run_task`; the rest is the manager's. So
    daemon tasks have no guard: if one ends, the service ends."""

    def __init__(self, manager: Any, nursery: trio.Nursery, source: Source) -> None:
        """`nursery`: open as long as the service runs."""
        self._manager, self._nursery, self._source = manager, nursery, source

    def run_task(self, function: Callable[..., Awaitable[Any]], *args: Any, name: object = None) -> None:
        """Start a task. Raises `Unreachable` when the service has ended."""

        async def run() -> None:
            with guarded(self._source), lost_is_broken():
                await function(*args)

        try:
            self._nursery.start_soon(run, name=name or function)
        except RuntimeError as error:  # the nursery is closed
            raise Unreachable("the transport does not serve any more") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class GuardedService(Service):
    """Comes before a service of the library among the bases of a class, and has its tasks started by `GuardedTasks`."""

    task_source: ClassVar[Source]
    """On what the tasks work."""

    async def run(self) -> None:
        """Run until cancelled, with all tasks."""
        async with trio.open_nursery() as self._tasks:
            await super().run()  # the library's service  # pyright: ignore[reportAbstractUsage]

    @property
    def manager(self) -> Any:
        """Starts tasks."""
        return GuardedTasks(super().manager, self._tasks, self.task_source)
