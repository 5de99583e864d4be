"""The iterator that `Swarm.rollouts` returns: for `for` loops, and for `async for` under asyncio and trio."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from node.ipc.channel import ChannelClosed, ChannelTimeout
from node.trainers.rollout_group import RefusedPrompt, RolloutGroup

__all__ = ["RolloutStream"]

T = TypeVar("T")
Answer = RolloutGroup | RefusedPrompt


class Batch(Protocol):
    """What the stream asks of the call that it iterates over."""

    aborts: deque[int]
    stopped: threading.Event

    def drop_aborted(self) -> None:
        """Abort the groups in `aborts`."""
        ...


class RolloutStream:
    """Groups in the order in which they are complete; made by `Swarm.rollouts`.

    `for group in stream` and `async for group in stream` give the same groups; use one of them. The asynchronous one
    runs under asyncio and under trio. It waits in a thread, in which prompts are read too, and stops no other task. A
    wait that is cancelled, or that a timeout ends, loses no group: the next one gets it.

    `with stream` or `async with stream` closes the stream at the end of the block. A stream that nobody refers to any
    more is closed as well, but one whose `async for` was left early holds on to its prompts until its thread ends.
    """

    def __init__(self, groups: Generator[Answer, None, None], batch: Batch) -> None:
        """For `Swarm.rollouts`. `groups`: the answers; a generator that `batch.stopped` ends."""
        self._groups = groups
        self._batch = batch
        self._running = threading.Lock()
        """Held while a thread runs the generator."""
        self._step: Future[Answer | None] | None = None
        """The step that an asynchronous caller waits for, or has left. Its result after the last answer is None."""

    def abort(self, index: int) -> None:
        """The group of prompt `index` (counted from 0) is no longer wanted, and the stream does not yield it.

        Its work leases end, and nodes stop generating it. A prompt that was not read yet is not offered. Nothing
        happens for a group that was yielded. Any thread may call this, also while another waits for a group.
        """
        self._batch.aborts.append(index)
        if self._running.acquire(blocking=False):  # else the thread that runs the generator looks at it
            try:
                with contextlib.suppress(ChannelClosed, ChannelTimeout):  # the next step notices
                    self._batch.drop_aborted()
            finally:
                self._running.release()

    def close(self) -> None:
        """Withdraw the prompts that are left, and end. Safe to call twice, and from another thread than the one that
        waits for a group, which then gets no more."""
        self._batch.stopped.set()
        with self._running:
            self._groups.close()

    async def aclose(self) -> None:
        """As `close`, without stopping other tasks."""
        await _wait(_in_thread(self.close))

    # ------------------------------------------------------------ for

    def __iter__(self) -> "RolloutStream":
        return self

    def __next__(self) -> Answer:
        with self._running:
            return next(self._groups)

    def __enter__(self) -> "RolloutStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ async for

    def __aiter__(self) -> "RolloutStream":
        return self

    async def __anext__(self) -> Answer:
        if self._step is None:
            self._step = _in_thread(lambda: next(self, None))
        step = self._step
        await _wait(step)
        self._step = None
        if (found := step.result()) is None:
            raise StopAsyncIteration
        return found

    async def __aenter__(self) -> "RolloutStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """The result of `function`, which runs in a daemon thread of its own: it does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="swarm-rollouts", daemon=True).start()
    return future


async def _wait(future: Future[Any]) -> None:
    """Wait until `future` has a result or an error, under asyncio or trio. Cancelling the wait leaves it running."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        await _wait_in_trio(future)
        return
    done = asyncio.Event()
    future.add_done_callback(lambda _: _from_thread(loop, done))
    await done.wait()


def _from_thread(loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
        loop.call_soon_threadsafe(done.set)


async def _wait_in_trio(future: Future[Any]) -> None:
    import trio

    done, token = trio.Event(), trio.lowlevel.current_trio_token()

    def tell(_: object) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(done.set)

    future.add_done_callback(tell)
    await done.wait()
