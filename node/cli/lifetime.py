"""How long a command lives: until its work is done, or a signal asks it to go."""

import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

__all__ = ["Interrupted", "owner_only", "until_signalled"]

T = TypeVar("T")
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_GARBAGE: Final = 10_000
"""Objects made, less those freed, until the youngest are looked through. Thousands of messages a second are made and
freed, and hardly any is part of a cycle: Python's own 700 spends some three percent of a relay's time on looking."""


class Interrupted(Exception):
    """A signal ended the command; everything it had begun is unwound. `args`: the signal's name, the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name, 128 + number)


def owner_only() -> None:
    """From here on whatever this process and its children make is for their owner alone: the home of a swarm holds
    keys, weights and prompts, and may have been made with wide permissions by whoever mounted it."""
    os.umask(0o077)


async def until_signalled(work: Callable[[], Awaitable[T]]) -> T:
    """What `work` returns. SIGINT or SIGTERM cancels it, waits for it to unwind, and raises `Interrupted`.

    A second signal does not wait: the replica proves or repairs itself at the next start, so this is safe.
    """
    gc.set_threshold(_GARBAGE)
    received: list[int] = []
    results: list[T] = []
    work_scope = trio.CancelScope()

    async def watch(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(*_SIGNALS) as signals:
            task_status.started()
            async for number in signals:
                if received:
                    os._exit(128 + number)
                received.append(number)
                print("Stopping; once more to stop at once.", file=sys.stderr, flush=True)
                work_scope.cancel()

    async with trio.open_nursery() as nursery:
        await nursery.start(watch)
        with work_scope:
            results.append(await work())
        nursery.cancel_scope.cancel()
    if received:
        raise Interrupted(received[0])
    return results[0]
