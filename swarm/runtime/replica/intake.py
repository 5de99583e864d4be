"""A trainer's own chunks on their way to the disk and into scratch memory, while the swarm has them already.

Chunks arrive as fast as they are encoded, and a call to a worker thread costs more than writing and decoding a small
chunk. So one call takes all chunks that have arrived, and the next call starts when it is over.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from codec.errors import SwarmError
from swarm.runtime.threads import RunSync
from swarm.store import StoredChunk

__all__ = ["ChunkIntake"]

_MAX_WAITING_BYTES: Final = 16 << 20
"""Chunks that may wait in memory: some milliseconds of a disk. Above this the caller waits."""


class ChunkIntake:
    """Stores chunks in the order in which they arrive."""

    def __init__(
        self,
        store_chunks: Callable[[list[StoredChunk]], None],
        start_task: Callable[[Callable[[], Awaitable[None]]], None],
        run_sync: RunSync,
    ) -> None:
        """`store_chunks` is called in a worker thread with the chunks that have arrived. `start_task` starts a task
        that lives as long as the runtime."""
        self._store_chunks, self._start_task, self._run_sync = store_chunks, start_task, run_sync
        self._waiting: list[StoredChunk] = []
        self._waiting_bytes = 0
        self._busy = False
        self._progress = trio.Event()
        """Set, and replaced, after each call to the worker thread."""
        self._failed: SwarmError | None = None

    async def add_chunk(self, chunk: StoredChunk) -> None:
        """Have `chunk` stored; waits while too many bytes wait. Raises the error of an earlier chunk (`DiskFull`)."""
        self._waiting.append(chunk)
        self._waiting_bytes += sum(chunk.sizes)
        if not self._busy:
            self._busy = True
            self._start_task(self._store_waiting)
        while self._busy and self._waiting_bytes > _MAX_WAITING_BYTES:
            await self._progress.wait()
        self._raise_failure()

    async def wait_until_stored(self) -> None:
        """Return when every chunk is stored. Raises as `add_chunk`."""
        while self._busy:
            await self._progress.wait()
        self._raise_failure()

    async def clear(self) -> None:
        """Forget the chunks that wait, and an earlier error. On return no chunk is being stored."""
        self._waiting, self._waiting_bytes = [], 0
        while self._busy:
            await self._progress.wait()
        self._failed = None

    async def _store_waiting(self) -> None:
        finished = False
        try:
            while self._waiting and self._failed is None:
                chunks, self._waiting, self._waiting_bytes = self._waiting, [], 0
                try:
                    await self._run_sync(self._store_chunks, chunks)
                except SwarmError as error:
                    self._failed = error
                self._signal_progress()
            finished = True
        finally:
            if not finished:  # the runtime has ended: no caller may wait for it, nor seal an incomplete version
                self._failed = SwarmError("The seed ended before the version was on its disk.")
            self._busy = False
            self._signal_progress()

    def _signal_progress(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed
