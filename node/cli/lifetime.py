"""How long a command runs: until its work is done, or until a signal asks it to stop."""

import gc
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

import trio

from node.settings.logs import note_stopping

__all__ = ["GARBAGE", "Interrupted", "OnTerm", "owner_only", "until_signalled"]

T = TypeVar("T")
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
GARBAGE: Final = 10_000
"""Threshold of the garbage collector's first generation. A process makes and frees thousands of messages a second,
hardly any part of a cycle; with Python's own threshold of 700 a relay spends some 3 % of its time on collections."""


class Interrupted(Exception):
    """A signal ended the command, after its tasks were cancelled. `args`: the signal's name, the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name, 128 + number)


def owner_only() -> None:
    """From here on only the owner can read files that this process and its children make: a home holds keys, weights
    and prompts, and may itself have wide permissions."""
    os.umask(0o077)


class OnTerm(NamedTuple):
    """What SIGTERM does first: `ask` has the work end by itself, which may take `within_s`; then it is cancelled."""

    ask: Callable[[], None]
    within_s: float


async def until_signalled(work: Callable[[], Awaitable[T]], on_term: OnTerm | None = None) -> T:
    """Run `work` and return its result. SIGINT or SIGTERM cancels it, waits for it to end, and raises `Interrupted`.

    With `on_term`, SIGTERM asks the work to end by itself; if it does in time, its result is returned. A second signal
    ends the process at once. That is safe: the replica is verified or repaired at the next start.
    """
    gc.set_threshold(GARBAGE)
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
                if on_term is not None and number == signal.SIGTERM:
                    work_scope.deadline = trio.current_time() + on_term.within_s
                    on_term.ask()
                    continue
                note_stopping()
                work_scope.cancel()

    async with trio.open_nursery() as nursery:
        await nursery.start(watch)
        with work_scope:
            results.append(await work())
        nursery.cancel_scope.cancel()
    ended_by_itself = bool(results) and on_term is not None and received == [signal.SIGTERM]
    if received and not ended_by_itself:
        raise Interrupted(received[0])
    return results[0]
