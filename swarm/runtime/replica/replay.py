"""A version's chunks in the store, and how they are applied to a replica whose blocks are of several versions."""

from collections.abc import Collection, Iterable, Iterator

from codec import Layered, Manifest, Replica, StagedBlock, StagedChunk, chunk_id, state_root
from codec.errors import SwarmError
from codec.staging import decode
from swarm.protocol.core.version import VersionId
from swarm.runtime.replica.holding import Holding
from swarm.store import ChunkStore, Store, StoredChunk

__all__ = ["Mismatch", "bring_to", "listed_chunks", "replay_chunks"]


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
    held = replica.held if isinstance(replica, Replica) else None
    for chunk in chunks:
        body = store.body(chunk.key)
        if body is None:
            continue
        for entry, payload in zip(chunk.header.blocks, chunk.header.payloads(body), strict=True):
            block = entry.block
            old_hash = replica.hashes[block].tobytes()
            if block in newer or old_hash == entry.new_hash or not (held is None or held[block]):
                continue
            decoded = decode(entry, payload, replica.block(block), replica.layout.block(block).dtype)
            if decoded is None:
                yield block
            else:
                staged = StagedBlock(block, *decoded, old_hash, entry.new_hash)
                replica.scatter([StagedChunk((staged,), chunk.key)])


def bring_to(
    manifest: Manifest, replica: Replica | Layered, store: Store, holding: Holding, newer: Collection[int]
) -> tuple[int, ...]:
    """Bring the replica to this version, from blocks of the version before and `newer` ones. Returns the blocks that do
    not match: without newer ones those that the version's hash list, or the root, shows to be wrong."""
    if isinstance(replica, Replica) and replica.held is not None:
        _note_others(replica, store, manifest)
    chunks = store.chunks.of(VersionId(manifest.epoch, manifest.version), manifest.attempt)
    bad = tuple(replay_chunks(replica, chunks, store.chunks, newer))
    if not bad and not newer and replica.root != manifest.root:
        hashes = store.hashes(manifest.root)
        bad = holding.all(replica.layout) if hashes is None else holding.differing(replica, hashes)
    return bad


def _note_others(replica: Replica, store: Store, manifest: Manifest) -> None:
    """Give the blocks that the replica does not hold the hashes that they have in this version: by its hash list if the
    store has one, else by the headers of its chunks, on top of those of the version before."""
    hashes = store.hashes(manifest.root)
    if hashes is not None and len(hashes) != replica.layout.n_blocks:
        hashes = None
    if hashes is not None and replica.held is not None and state_root(replica.layout.hash, hashes) == manifest.root:
        replica.hashes[~replica.held] = hashes[~replica.held]
        return
    for chunk in store.chunks.of(VersionId(manifest.epoch, manifest.version), manifest.attempt):
        replica.note_hashes((entry.block, entry.new_hash) for entry in chunk.header.blocks)
