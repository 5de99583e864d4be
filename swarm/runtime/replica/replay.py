"""Applies a version's chunks to a replica whose blocks are of several versions, block by block."""

from collections.abc import Collection, Iterable, Iterator

from codec import Layered, Replica, StagedBlock, StagedChunk
from codec.staging import decode
from swarm.store import ChunkStore, StoredChunk

__all__ = ["replay_chunks"]


def replay_chunks(
    replica: Replica | Layered, chunks: Iterable[StoredChunk], store: ChunkStore, newer: Collection[int]
) -> Iterator[int]:
    """Bring every block of these chunks to their version, except those that are at it, or beyond it (`newer`).

    Yields the blocks that cannot be brought there, because their bits are not those of the version before.
    """
    for chunk in chunks:
        body = store.body(chunk.key)
        if body is None:
            continue
        for entry, payload in zip(chunk.header.blocks, chunk.header.payloads(body), strict=True):
            block = entry.block
            old_hash = replica.hashes[block].tobytes()
            if block in newer or old_hash == entry.new_hash:
                continue
            decoded = decode(entry, payload, replica.block(block), replica.layout.block(block).dtype)
            if decoded is None:
                yield block
            else:
                staged = StagedBlock(block, *decoded, old_hash, entry.new_hash)
                replica.scatter([StagedChunk((staged,), chunk.key)])
