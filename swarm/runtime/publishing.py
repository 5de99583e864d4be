"""The authority's way to publish: attempts, chunks, seals. Each step is durable before any member hears of it.

    open_attempt   the attempt's number is on disk before its first chunk is signed, so no two attempts share a number;
                   the way back to an older version is an attempt at that version in the next epoch
    add_chunk      assigned to members at once; meanwhile stored, and decoded into scratch memory, unless the publisher
                   has said what it changes (`swarm.runtime.replica.own`)
    seal           waits until all chunks are stored; compares roots; syncs the chunks, then records the seal; then
                   announces it to the swarm; then writes the bits

A crash before the seal is recorded leaves a dead attempt, whose seal no member can have seen. A crash after it leaves a
version that the next start replays from the store. The database refuses a second root for one version in any case.
"""

import math
from collections.abc import AsyncGenerator, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from codec import BlockDelta, Chunk, ChunkKey, Key, Manifest, Replica, open_header
from codec.chunk import BlockEntry
from codec.errors import UsageError
from swarm.protocol.core.events import LocalAbandon, LocalChunk, LocalSeal, VersionApplied, VersionId
from swarm.runtime.replica.intake import ChunkIntake
from swarm.runtime.replica.jobs import Jobs
from swarm.runtime.replica.manifests import Manifests
from swarm.runtime.replica.model import Model
from swarm.runtime.replica.own import OwnChunk
from swarm.runtime.replica.rewind import Rewind
from swarm.runtime.runtime import Runtime
from swarm.runtime.sessions.inbound import header_stored
from swarm.runtime.threads import RunSync, in_thread
from swarm.store import Seal, Store, StoredChunk

__all__ = ["Attempt", "SeedPublisher", "genesis"]

_ATTEMPTS: Final = "attempts/"
"""Records of the newest attempt at each version that is not sealed: `attempts/EPOCH.VERSION`."""
_BLOCKS_AT_A_TIME: Final = 16
"""Blocks of a rewind that one call to a worker thread prepares."""


class Attempt(NamedTuple):
    """One attempt at publishing one version.

    `last_payload_bytes`: payload of the version before (0: there was none). `nodes`: how many are connected.
    `link_mbit`: the rate at which the version can reach all of them at best (infinite: unknown). `expected_bytes`: what
    its payload will have, about (0: unknown); chunks and pieces get their sizes by it.
    """

    epoch: int
    version: int
    attempt: int
    parent_root: bytes
    last_payload_bytes: int
    nodes: int
    link_mbit: float = math.inf
    expected_bytes: int = 0


def genesis(
    store: Store, model: Model, replica: Replica, key: Key, *, files: Mapping[str, bytes], epoch: int = 0
) -> Seal:
    """Make `replica` version 0 of a new swarm: sealed, durable, with its hash list. Runs in a worker thread.

    `files`: the contents of the layout's small files, by name (`Checkpoint.files`), which new members fetch.
    Raises `UsageError` when this store has a sealed version already.
    """
    newest = store.newest()
    if newest is not None:
        raise UsageError(
            f"{store.folder} holds a swarm at version {newest.id}. Start it as it is, or use another folder."
        )
    root = replica.root
    manifest = Manifest(key.public, epoch, 0, 0, b"\0" * 32, root, replica.layout.hash, (), 0, 0)
    sealed = manifest.seal(key)
    for data in files.values():
        store.put_file(data)
    store.put_file(replica.layout.to_bytes())
    store.put_hashes(root, replica.hashes)
    model.adopt(replica, VersionId(epoch, 0))
    model.write_checkpoint()
    seal = Seal.of(manifest, sealed)
    store.seal(seal)
    return seal


class SeedPublisher:
    """What `node.coordinator.publisher` uses of the swarm. One attempt is open at a time, and calls do not overlap."""

    def __init__(
        self, key: Key, runtime: Runtime, store: Store, jobs: Jobs, manifests: Manifests, run_sync: RunSync = in_thread
    ) -> None:
        self.key = key
        self._runtime = runtime
        self._store = store
        self._jobs = jobs
        self._manifests = manifests
        self._run_sync = run_sync
        self._open: Attempt | None = None
        self._intake = ChunkIntake(self._store_chunks, runtime.start_task, run_sync)

    @property
    def replica(self) -> Replica:
        """The trainer's replica; it is at the parent version until `seal` returns."""
        replica = self._jobs.model.replica
        assert isinstance(replica, Replica), "a seed starts with a replica, in memory"
        return replica

    @property
    def head(self) -> VersionId:
        """The version of the replica."""
        version = self._jobs.model.version
        assert version is not None, "a seed starts with a sealed version"
        return version

    async def find(self, root: bytes | None, version: int | None) -> Seal:
        """The newest sealed version with this root, or of this number in the history of the head.

        Raises `UsageError` when there is none.
        """
        return await self._run_sync(self._find, root, version)

    async def open_attempt(self, back_to: Seal | None = None) -> Attempt:
        """Durably begin an attempt at the next version; chunks of earlier attempts at it are dropped.

        `back_to`: publish this older version again instead, under its own number in a new epoch. Every node then
        continues from it, and rollouts of the versions in between are refused.
        """
        await self.abandon()
        attempt = await self._run_sync(self._next_attempt, back_to)
        self._open = attempt
        return attempt

    async def add_chunk(self, chunk: Chunk, known: OwnChunk | None = None) -> None:
        """Assign a chunk of the open attempt to members, and have it stored. Waits while the disk or the decoder is far
        behind, never for a peer. Raises the error of an earlier chunk (`DiskFull`).

        `known`: what the chunk changes; None: unknown, so it is decoded.
        """
        attempt = self._current()
        header = chunk.opened or open_header(chunk.header, self.key.public)
        assert header.key[:3] == attempt[:3], "a chunk of another attempt"
        stored, _ = self._store.chunks.put_header(header, chunk.header)
        for index in range(header.n_pieces):
            piece = header.piece_range(index)
            self._store.chunks.put_piece(header.key, index, chunk.body[piece.start : piece.stop])
        if known is not None:
            self._jobs.model.stage_own(stored, known)
        await self._runtime.post(LocalChunk(header_stored(stored, None, None)))
        await self._intake.add_chunk(stored)

    def payload(self, key: ChunkKey, block: int) -> tuple[BlockEntry, bytes] | None:
        """The entry and payload of a block in a chunk that was added. Called from worker threads."""
        return self._store.chunks.payload(key, block)

    async def seal(self, manifest: Manifest) -> bytes:
        """Make the version durable, send its seal, apply it to the replica. Returns its root.

        Raises `DiskFull`; `Mismatch` when the chunks do not lead to the manifest's root. The attempt stays open then.
        """
        attempt = self._current()
        assert (manifest.epoch, manifest.version, manifest.attempt) == attempt[:3], "a manifest of another attempt"
        await self._intake.wait_until_stored()
        sealed = manifest.seal(self.key)
        self._manifests.note(sealed)
        await self._runtime.shelter(lambda: self._publish(manifest, sealed))
        self._open = None
        return manifest.root

    async def abandon(self) -> None:
        """Give up the open attempt, if there is one, and drop its chunks."""
        if self._open is not None:
            attempt, self._open = self._open, None
            await self._intake.clear()
            await self._runtime.apply(LocalAbandon(VersionId(attempt.epoch, attempt.version), attempt.attempt))

    async def _publish(self, manifest: Manifest, sealed: bytes) -> None:
        await self._jobs.publish(manifest, sealed, lambda: self._runtime.apply(LocalSeal(sealed)))
        self._runtime.perform([VersionApplied(VersionId(manifest.epoch, manifest.version), manifest)])

    def _current(self) -> Attempt:
        if self._open is None:
            raise RuntimeError("no attempt is open")
        return self._open

    async def rewind(self, to: Seal, skip: range = range(0)) -> AsyncGenerator[list[tuple[BlockDelta, int]], None]:
        """The deltas that turn the replica into an older version: (delta, elements changed), some blocks at a time.

        `skip`: blocks that are left as they are. Raises `UsageError` when what the store keeps does not lead to it.
        """
        blocks = Rewind(self._store, self.replica, self._jobs.model.base).deltas(to, skip)
        while part := await self._run_sync(_next_blocks, blocks):
            yield part

    def _store_chunks(self, chunks: list[StoredChunk]) -> None:
        self._store.chunks.spill(*(chunk.key for chunk in chunks), wanted=True)  # members will read them soon
        for chunk in chunks:
            self._jobs.model.stage(chunk)

    def _find(self, root: bytes | None, version: int | None) -> Seal:
        seals = self._store.records.seals()
        newest = seals[-1]
        for seal in reversed(seals):
            if seal.root == root or (version is not None and seal.id.version == version <= newest.id.version):
                return seal
        named = f"with the root {root.hex()}" if root is not None else f"{version}"
        raise UsageError(
            f"This swarm has no version {named}; its newest is {newest.id.version}. "
            "Publish the weights that you have as a new one, with publish()."
        )

    def _next_attempt(self, back_to: Seal | None) -> Attempt:
        newest = self._store.newest()
        assert newest is not None, "a seed starts with a sealed version"
        id_ = VersionId(newest.id.epoch, newest.id.version + 1)
        if back_to is not None:
            id_ = VersionId(newest.id.epoch + 1, back_to.id.version)
        name = f"{_ATTEMPTS}{id_}"
        known = self._store.records.all(_ATTEMPTS)
        number = int(known[name]) + 1 if name in known else 0
        # No attempt at a version up to the newest sealed one will ever be made again.
        sealed = [other for other in known if _version_in(other) <= newest.id]
        self._store.records.put([(name, str(number).encode())], drop=sealed)
        for stale in range(number):
            self._store.chunks.drop(id_, stale)
        return Attempt(*id_, number, newest.root, newest.payload_bytes, len(list(self._runtime.peers)))


def _version_in(name: str) -> VersionId:
    epoch, _, version = name.removeprefix(_ATTEMPTS).partition(".")
    return VersionId(int(epoch), int(version))


def _next_blocks(blocks: Iterator[tuple[BlockDelta, int]]) -> list[tuple[BlockDelta, int]]:
    return list(islice(blocks, _BLOCKS_AT_A_TIME))
