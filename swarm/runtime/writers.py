"""The tasks that write to disk beside the core: its records, and chunks that have become complete.

Both gather what waits and write it in one go, because a worker thread and a transaction cost more than a small write.
"""

import math
from collections import deque
from functools import partial
from typing import Final

import trio

from codec import ChunkKey
from swarm.protocol.core.events import Event, Persist, Persisted
from swarm.runtime.core_loop import PostEvent
from swarm.runtime.failure import Failure
from swarm.runtime.threads import RunSync
from swarm.store import ChunkStore, Records, StoredChunk

__all__ = ["ChunkWriter", "RecordWriter"]

_GATHER_S: Final = 0.2
_GATHER_BYTES: Final = 8 << 20
"""A complete chunk waits this long, or until so much has gathered, so that several are written together."""
_KEEP_BYTES: Final = 32 << 20
_KEEP_S: Final = 2.0
"""Written chunks stay in memory up to this size, until none has been written for so long. A child that is behind gets
them from there; reading them from the disk would hold up the event loop."""


class RecordWriter:
    """Writes the core's records to the database, and posts `Persisted` for each once it is durable."""

    def __init__(self, records: Records, post: PostEvent, run_sync: RunSync) -> None:
        self._records, self._post, self._run_sync = records, post, run_sync
        self._waiting: deque[Persist] = deque()
        self._n_queued = self._n_written = 0
        self._wake = trio.Event()
        self._progress = trio.Event()
        """Set, and replaced, after each transaction."""

    def queue_record(self, effect: Persist) -> None:
        """Have this record written, after those queued before it."""
        self._waiting.append(effect)
        self._n_queued += 1
        self._wake.set()

    async def wait_until_durable(self) -> None:
        """Return when every record that is queued now is on disk."""
        queued = self._n_queued
        while self._n_written < queued:
            await self._progress.wait()

    async def write_records(self) -> None:
        """Write what waits in one transaction, then post the results; repeat until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            batch, self._waiting = self._waiting, deque()
            if batch:
                await self._run_sync(self._records.put, [(effect.name, effect.record) for effect in batch])
                self._n_written += len(batch)
                self._progress.set()
                self._progress = trio.Event()
            for effect in batch:
                result: Event = Persisted(effect.token)
                await self._post(result)


class ChunkWriter:
    """Writes complete chunks from the store's memory to its disk, several at a time."""

    def __init__(self, chunks: ChunkStore, failure: Failure, run_sync: RunSync) -> None:
        self._chunks, self._failure, self._run_sync = chunks, failure, run_sync
        self._unwritten: list[ChunkKey] = []
        """Chunks that are complete and in memory."""
        self._unwritten_bytes = 0
        self._wake = trio.Event()
        self._enough = trio.Event()
        """Set when `_GATHER_BYTES` wait."""
        self._freeing = trio.Lock()

    def queue_chunk(self, chunk: StoredChunk) -> None:
        """Have this complete chunk written."""
        self._unwritten.append(chunk.key)
        self._unwritten_bytes += chunk.body_bytes
        self._wake.set()
        if self._unwritten_bytes >= _GATHER_BYTES:
            self._enough.set()

    async def free_memory(self, most_bytes: int) -> None:
        """Have the store hold `most_bytes` in memory at most: what was written goes first, then complete chunks, and
        pieces of incomplete ones only then, since they are written through the page cache, piece by piece."""
        async with self._freeing:
            for free in (self._forget_written, self._write_complete, self._write_all):
                if self._chunks.memory_bytes <= most_bytes:
                    return
                await free()

    async def write_chunks(self) -> None:
        """Write queued chunks until cancelled. Children that wait for one are served from memory meanwhile."""
        while True:
            with trio.move_on_after(_KEEP_S if self._chunks.written_bytes else math.inf) as quiet:
                await self._wake.wait()
            if quiet.cancelled_caught:
                self._chunks.release_written(0)
                continue
            with trio.move_on_after(_GATHER_S):
                await self._enough.wait()
            await self._run_sync(partial(self._chunks.spill, *self._take_unwritten(), keep=True))
            self._chunks.release_written(_KEEP_BYTES)

    def _take_unwritten(self) -> list[ChunkKey]:
        keys, self._unwritten, self._unwritten_bytes = self._unwritten, [], 0
        self._wake, self._enough = trio.Event(), trio.Event()
        return keys

    async def _forget_written(self) -> None:
        self._chunks.release_written(0)

    async def _write_complete(self) -> None:
        await self._failure.watch(self._run_sync, self._chunks.spill, *self._take_unwritten())

    async def _write_all(self) -> None:
        await self._failure.watch(self._run_sync, self._chunks.spill_all)
