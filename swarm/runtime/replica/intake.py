"""A trainer's own chunks on their way to the disk and into scratch, beside the swarm, which has them already.

Chunks come as fast as they are encoded, and a visit to a worker thread costs more than to write and decode a small
one. So all that have come go in one visit, and the next is made when that is over.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from codec.errors import SwarmError
from swarm.runtime.threads import RunSync
from swarm.store import StoredChunk

__all__ = ["Intake"]

_AHEAD_BYTES: Final = 16 << 20
"""So much may wait in memory: some milliseconds of a disk. Then whoever brings more waits for it."""


class Intake:
    """Keeps chunks, in order."""

    def __init__(
        self,
        keep: Callable[[list[StoredChunk]], None],
        start: Callable[[Callable[[], Awaitable[None]]], None],
        run_sync: RunSync,
    ) -> None:
        """`keep`: called in a worker thread, with the chunks that have come. `start`: begins a task that lives as long
        as the shell."""
        self._keep, self._start, self._run_sync = keep, start, run_sync
        self._waiting: list[StoredChunk] = []
        self._waiting_bytes = 0
        self._busy = False
        self._turn = trio.Event()
        """Set when a visit is over."""
        self._failed: SwarmError | None = None

    async def add(self, chunk: StoredChunk) -> None:
        """Have it kept; waits while too much does. Raises what became of an earlier one (`DiskFull`)."""
        self._waiting.append(chunk)
        self._waiting_bytes += sum(chunk.sizes)
        if not self._busy:
            self._busy = True
            self._start(self._keep_all)
        while self._busy and self._waiting_bytes > _AHEAD_BYTES:
            await self._turn.wait()
        self._complain()

    async def settled(self) -> None:
        """Wait until all is kept. Raises as `add`."""
        while self._busy:
            await self._turn.wait()
        self._complain()

    async def clear(self) -> None:
        """Forget what waits, and how it went; when it comes back, nothing is being kept any more."""
        self._waiting, self._waiting_bytes = [], 0
        while self._busy:
            await self._turn.wait()
        self._failed = None

    async def _keep_all(self) -> None:
        over = False
        try:
            while self._waiting and self._failed is None:
                chunks, self._waiting, self._waiting_bytes = self._waiting, [], 0
                try:
                    await self._run_sync(self._keep, chunks)
                except SwarmError as error:
                    self._failed = error
                self._tell()
            over = True
        finally:
            if not over:  # the shell has ended: nobody is to wait for it, nor to seal what may not be whole
                self._failed = SwarmError("The seed ended before the version was on its disk.")
            self._busy = False
            self._tell()

    def _tell(self) -> None:
        self._turn.set()
        self._turn = trio.Event()

    def _complain(self) -> None:
        if self._failed is not None:
            raise self._failed
