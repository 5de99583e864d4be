"""Complete chunks are written, and stay in memory for children that are behind until nothing has come for a while."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from runtime_kit import AUTHORITY, here_and_now, new_replica
from runtime_kit import step as change

from codec import ChunkKey, open_header, seal_chunk
from swarm.runtime import writers
from swarm.runtime.failure import Failure
from swarm.runtime.writers import ChunkWriter
from swarm.store import Store, StoredChunk


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path, AUTHORITY.public) as store:
        yield store


def received(store: Store, number: int, *, whole: bool = True) -> StoredChunk:
    """A chunk in the store's memory; without its last piece unless it is to be `whole`."""
    replica = new_replica()
    key = ChunkKey(0, 1, 0, number)
    sealed = seal_chunk(key, replica.root, replica.layout.hash, change(replica, 1, 0.5), AUTHORITY)
    header = open_header(sealed.header, AUTHORITY.public)
    chunk, _ = store.chunks.put_header(header, sealed.header)
    for index in range(header.n_pieces if whole else header.n_pieces - 1):
        piece = header.piece_range(index)
        store.chunks.put_piece(key, index, sealed.body[piece.start : piece.stop])
    return chunk


async def test_written_chunks_are_kept_for_a_while(store: Store, autojump_clock: object) -> None:
    writer = ChunkWriter(store.chunks, Failure(), here_and_now)
    chunk = received(store, 0)
    size = store.chunks.memory_bytes
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.write_chunks)
        writer.queue_chunk(chunk)
        await trio.sleep(writers._GATHER_S + 0.1)
        assert chunk.body is not None, "it is written"
        assert store.chunks.memory_bytes == size
        await trio.sleep(writers._KEEP_S + 0.1)
        assert store.chunks.memory_bytes == 0
        assert len(store.chunks.body(chunk.key) or b"") == size
        nursery.cancel_scope.cancel()


async def test_many_complete_chunks_do_not_wait_for_more(
    store: Store, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [received(store, number) for number in range(2)]
    monkeypatch.setattr(writers, "_GATHER_BYTES", chunks[0].body_bytes + 1)
    writer = ChunkWriter(store.chunks, Failure(), here_and_now)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.write_chunks)
        writer.queue_chunk(chunks[0])
        await trio.sleep(writers._GATHER_S / 2)
        assert chunks[0].body is None, "it waits for others"
        writer.queue_chunk(chunks[1])
        await trio.sleep(writers._GATHER_S / 4)
        assert all(chunk.body is not None for chunk in chunks)
        nursery.cancel_scope.cancel()


async def test_memory_is_freed_of_what_costs_least_first(store: Store) -> None:
    writer = ChunkWriter(store.chunks, Failure(), here_and_now)
    written, complete, partial = received(store, 0), received(store, 1), received(store, 2, whole=False)
    store.chunks.spill(written.key, keep=True)
    writer.queue_chunk(complete)
    in_memory = [store.chunks.memory_bytes]
    for chunk in (written, complete, partial):
        assert chunk.memory
        await writer.free_memory(in_memory[-1] - 1)
        assert not chunk.memory
        in_memory.append(store.chunks.memory_bytes)
    assert in_memory == sorted(in_memory, reverse=True)
    assert in_memory[-1] == 0
    await writer.free_memory(0)  # nothing is left to do
