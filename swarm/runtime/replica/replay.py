"""A version's chunks in the store, and how they are applied to a replica whose blocks are of several versions."""

from collections.abc import Collection, Iterable, Iterator

from codec import Layered, Manifest, Replica, StagedBlock, StagedChunk, chunk_id
from codec.errors import SwarmError
from codec.staging import decode
from swarm.protocol.core.version import VersionId
from swarm.store import ChunkStore, StoredChunk

__all__ = ["Mismatch", "listed_chunks", "replay_chunks"]


class Mismatch(SwarmError):
    """A version's chunks do not lead to the root that its manifest names. The text names the step that failed."""


def listed_chunks(store: ChunkStore, manifest: Manifest) -> list[StoredChunk]:
    """The chunks that the manifest lists, in order. Raises `Mismatch` when the store has others."""
    chunks = store.of(VersionId(manifest.epoch, manifest.version), manifest.attempt)[: len(manifest.chunk_ids)]
    if tuple(chunk_id(chunk.sealed_header) for chunk in chunks) != manifest.chunk_ids:
        raise Mismatch("the chunks are not those that the manifest lists")
    return chunks


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
