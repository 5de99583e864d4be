"""Has a process of swarm-node start its engine workers by forks, too: a worker imports torch and transformers, for 4 s
of a processor, before it begins.

For processes that were forked themselves; see `scenarios.harness.fork_server`.
"""

import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final

import trio

from scenarios.harness.forked import Forked, ForkServer, can_be_forked

__all__ = ["WORKER", "use"]

WORKER: Final = "node.engines.worker"
_ENGINE: Final = "transformers"
"""Workers with other engines are executed: they import less than was imported for this one."""


def use(requests: socket.socket) -> None:
    """Have `trio.lowlevel.open_process` fork engine workers. `requests`: to the server that this process has from its
    own fork."""
    server, execute = ForkServer(requests), trio.lowlevel.open_process

    async def open_process(command: Sequence[str] | str, **options: Any) -> Any:
        match command:
            case [sys.executable, "-P", "-m", module, *words] if (
                module == WORKER and _ENGINE in words and _can_be_forked(options)
            ):
                # In a thread: with the first request, the server imports for seconds.
                return _Worker(await trio.to_thread.run_sync(lambda: Forked(server, module, words, **options)))
        return await execute(command, **options)

    trio.lowlevel.open_process = open_process


def _can_be_forked(options: dict[str, Any]) -> bool:
    """As for all processes; `PYTHONPATH` leads to the packages that the server has imported."""
    environment = dict(options.get("env") or os.environ)
    environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    if not environment["PYTHONPATH"]:
        del environment["PYTHONPATH"]
    return can_be_forked(options | {"env": environment})


class _Worker:
    """What `node.engines.process` uses of `trio.Process`."""

    def __init__(self, forked: Forked) -> None:
        self._forked = forked
        self.pid = forked.pid

    async def wait(self) -> int:
        """Wait until the process ends; its exit code."""
        if self._forked.returncode is None:
            await trio.lowlevel.wait_readable(self._forked)
        return self._forked.wait()
