"""Complete chunks are written, and stay in memory for children that are behind until nothing has come for a while."""

from pathlib import Path

import trio
from runtime_kit import AUTHORITY, here_and_now, new_replica
from runtime_kit import step as change

from codec import ChunkKey, open_header, seal_chunk
from swarm.runtime import writers
from swarm.runtime.failure import Failure
from swarm.runtime.writers import ChunkWriter
from swarm.store import Store


async def test_written_chunks_are_kept_for_a_while(tmp_path: Path, autojump_clock: object) -> None:
    replica = new_replica()
    sealed = seal_chunk(ChunkKey(0, 1, 0, 0), replica.root, replica.layout.hash, change(replica, 1), AUTHORITY)
    with Store(tmp_path, AUTHORITY.public) as store:
        writer = ChunkWriter(store.chunks, Failure(), here_and_now)
        header = open_header(sealed.header, AUTHORITY.public)
        chunk, _ = store.chunks.put_header(header, sealed.header)
        for index in range(header.n_pieces):
            piece = header.piece_range(index)
            store.chunks.put_piece(header.key, index, sealed.body[piece.start : piece.stop])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.write_chunks)
            writer.queue_chunk(chunk)
            await trio.sleep(writers._GATHER_S + 0.1)
            assert chunk.body is not None, "it is written"
            assert store.chunks.memory_bytes == len(sealed.body)
            await trio.sleep(writers._KEEP_S + 0.1)
            assert store.chunks.memory_bytes == 0
            assert store.chunks.body(chunk.key) == sealed.body
            nursery.cancel_scope.cancel()
