"""From block deltas to a sealed version: packs and signs each chunk, and hands it on as soon as it is full.

The bytes are trusted: the trainer is on this host and runs as the same user. But it may die at any byte; the version
that it leaves open is abandoned, and the next attempt has its own number.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

import numpy as np
import trio
from numpy.typing import NDArray

from codec import (
    BlockDelta,
    Chunk,
    ChunkKey,
    Key,
    Manifest,
    Replica,
    StagedBlock,
    chunk_target,
    piece_target,
    seal_chunk,
    state_root,
)
from codec.choice import usual_payload_bytes
from codec.chunk import CODER_RAW, BlockEntry
from codec.errors import PeerError, UsageError
from codec.pack import ClassPacker
from codec.part_view import PartView
from codec.parts import BASE, Part, PartBlocks, part_classes, part_layout, parts, policy_part
from node.coordinator.format_parts import BaseChanges, FormatParts
from node.coordinator.turns import Busy
from node.trainers.messages import VersionRef
from swarm.runtime.publishing import Attempt
from swarm.runtime.replica.own import OwnChunk
from swarm.store import Seal

__all__ = ["Attempt", "Busy", "Publisher", "Returned", "Sealed", "VersionSink"]


_GROWS: Final = 2
"""A version that has more payload than was expected is taken to have this many times what it has so far."""


class Sealed(NamedTuple):
    """A published version. `root`: over all blocks of the model, as the manifest has it. `part_root`: over those of the
    part that was published. `parts`: that the version changed, and the published one in any case."""

    root: bytes
    payload_bytes: int
    chunks: int
    part_root: bytes
    parts: frozenset[Part]


class Returned(NamedTuple):
    """The head after a return to an older version. `payload_bytes`: of its delta; 0 when it was the head already."""

    epoch: int
    version: int
    root: bytes
    payload_bytes: int


class VersionSink(Protocol):
    """What the publisher asks of the swarm."""

    @property
    def head(self) -> tuple[int, int]:
        """(epoch, version) of the replica."""
        ...

    @property
    def replica(self) -> Replica:
        """The authoritative bits: the parent version until `seal` returns."""
        ...

    @property
    def key(self) -> Key:
        """The swarm's key."""
        ...

    def coder(self) -> int:
        """How the next version's blocks are to be coded: `codec.chunk.CODER_RICE` or `CODER_PCO`."""
        ...

    async def find(self, root: bytes | None, version: int | None) -> Seal:
        """A sealed version, by its root or its number. Raises `UsageError` when there is no such version."""
        ...

    async def open_attempt(
        self, back_to: Seal | None = None, trainer_step: int | None = None, part: Part = BASE
    ) -> Attempt:
        """Durably begin the next version or its next attempt; `back_to`: an older version again, in a new epoch.
        `part`: the one that its trainer publishes."""
        ...

    def rewind(self, to: Seal, skip: range = range(0)) -> AsyncGenerator[list[tuple[BlockDelta, int]], None]:
        """The deltas that turn the replica into an older version, from what the store keeps, some at a time; each with
        its number of changed elements. `skip`: blocks that are left as they are.

        Raises `UsageError` when the store does not keep enough.
        """
        ...

    async def add_chunk(self, chunk: Chunk, known: OwnChunk | None = None) -> None:
        """Store and assign a chunk of the open attempt. Waits while the store is behind; never for a slow peer.

        `known`: what the chunk changes, so that it need not be decoded.
        """
        ...

    def payload(self, key: ChunkKey, block: int) -> tuple[BlockEntry, bytes] | None:
        """The entry and payload of a block in a chunk that was added. Called from worker threads."""
        ...

    async def seal(self, manifest: Manifest, parts: frozenset[Part]) -> bytes:
        """Make the version durable, send its seal, apply it to the replica; its root. `parts`: that it changes."""
        ...

    async def abandon(self) -> None:
        """Drop the open attempt, if there is one."""
        ...


class Publisher:
    """Publishes the versions of one seed. Calls come one at a time: begin, add..., end, begin, ...

    A version is published for one part of the model (`codec.parts`), where the base goes with its draft model: its
    blocks have their numbers in that part, its trainer signs off the root of that part, and all other blocks stay as
    they are.
    """

    def __init__(self, seed: VersionSink, classes: Sequence[int] | None = None) -> None:
        """`classes`: of each block of the model, its class; no chunk then has blocks of two. None: there is one. No
        chunk has blocks of two parts in any case."""
        self.seed = seed
        self._classes = part_classes(seed.replica.layout, classes)
        self._ranges = parts(seed.replica.layout)
        self._formats = FormatParts(seed.replica.layout)
        self._parts: dict[Part | None, PartBlocks] = {}
        self._last_payload_bytes: dict[Part, int] = {}
        """By part, of its last version since this process started."""
        self._open: _Version | None = None
        self._opening = False

    @property
    def busy(self) -> bool:
        """A version is open, or is being opened."""
        return self._opening or self._open is not None

    @property
    def hashes(self) -> NDArray[np.uint8]:
        """Block hashes of the open version's part as far as they are known, uint8 (n_blocks of the part, 32). Raises
        `PeerError` when none is open."""
        return self._current().part_hashes

    @property
    def root(self) -> bytes:
        """The root that the open version has so far, over all blocks of the model. Raises `PeerError` when none is
        open."""
        return self._current().root()

    @property
    def part_root(self) -> bytes:
        """As `root`, over the blocks of the open version's part. Raises `PeerError` when none is open."""
        return self._current().part_root()

    def blocks_of(self, part: Part | None) -> PartBlocks:
        """A part of the model as a layout of its own, the base with its draft; None: the whole. Raises `PeerError` for
        one that the model does not have."""
        if part not in self._parts:
            layout = self.seed.replica.layout
            if part is None:
                self._parts[part] = PartBlocks(BASE, layout, 0, 0)
            else:
                self._parts[part] = policy_part(layout) if part == BASE else part_layout(layout, part)
        return self._parts[part]

    def view(self, part: Part) -> PartView:
        """A part of the seed's replica, against which its trainer's blocks are compared. Raises `PeerError` for one
        that the model does not have."""
        return PartView(self.seed.replica, self.blocks_of(part))

    async def begin(
        self,
        again: VersionRef | None = None,
        expected_bytes: int = 0,
        trainer_step: int | None = None,
        part: Part = BASE,
    ) -> Attempt:
        """Open the next version. `again`: an older version instead, whose exact bits the trainer will send.
        `expected_bytes`: of its payload, if the trainer knows. `trainer_step`: the trainer's own count, for people.
        `part`: the one that the trainer publishes; of an older version, the seed restores the other parts itself.

        Raises `Busy` when a version is open, `UsageError` when there is no such older one, `PeerError` for a part that
        the model does not have.
        """
        blocks = self.blocks_of(part)
        target = None if again is None else await self.seed.find(again.root, again.version)
        return await self._begin(blocks, target, expected_bytes, trainer_step)

    async def _begin(
        self, part: PartBlocks, target: Seal | None, expected_bytes: int = 0, trainer_step: int | None = None
    ) -> Attempt:
        if self.busy:
            raise Busy("Another trainer is publishing to this seed. Publish from one process at a time.")
        self._opening = True  # before anything is awaited: two trainers may ask at once
        try:
            attempt = await self.seed.open_attempt(target, trainer_step, BASE if target is not None else part.part)
            if len(self._ranges) > 1:  # the version before may be of another part
                usual_bytes = usual_payload_bytes(part.layout)
                last_bytes = self._last_payload_bytes.get(part.part, 0)
                attempt = attempt._replace(expected_bytes=usual_bytes, last_payload_bytes=last_bytes)
            expected_bytes = attempt.last_payload_bytes or expected_bytes or attempt.expected_bytes
            attempt = attempt._replace(expected_bytes=expected_bytes)
            self._open = _Version(attempt, self.seed, target, self._classes, part)
        finally:
            self._opening = False
        return attempt

    async def go_back(self, wanted: VersionRef) -> Returned:
        """Make an older version the head again, in a new epoch, from what the seed keeps. No effect if it is the head.

        Raises `UsageError` when there is no such version, or too little of it is kept; `Busy`.
        """
        target = await self.seed.find(wanted.root, wanted.version)
        if target.root == self.seed.replica.root:
            return Returned(*self.seed.head, target.root, 0)
        attempt = await self._begin(self.blocks_of(None), target)
        try:
            changed = 0
            async with aclosing(self.seed.rewind(target)) as parts:
                async for part in parts:
                    await self.add([delta for delta, _ in part])
                    changed += sum(count for _, count in part)
            sealed = await self.end(changed, target.root)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self.abandon()
            raise
        return Returned(attempt.epoch, attempt.version, sealed.root, sealed.payload_bytes)

    async def add(self, deltas: Sequence[BlockDelta], known: Sequence[StagedBlock] = ()) -> None:
        """Add changed blocks, in any order, each once. Raises `PeerError` for an impossible or repeated block.

        The blocks have their numbers in the part. `known`: what some of these deltas change, in any order.
        """
        version = self._current()
        first = version.part.first
        if first:
            deltas = [replace(delta, block=delta.block + first) for delta in deltas]
            known = [replace(block, block=block.block + first) for block in known]
        version.known |= {block.block: block for block in known}
        for delta in deltas:
            version.note(delta)
            if self._formats.is_source(delta.block):
                version.changes.note(delta.block, version.known.get(delta.block))
            for full in version.packer.add(delta):
                await version.send(full)

    async def end(self, changed: int, root: bytes) -> Sealed:
        """Seal the version. `root`: of its part, computed by the trainer from its own bits; raises `PeerError` if ours
        differs."""
        version = self._current()
        if version.part_root() != root:
            raise PeerError("publish.root: the blocks received do not add up to the trainer's weights")
        if version.target is not None:
            changed += await self._restore_others(version, version.target)
        elif version.changes:
            await self._add_formats(version)
        if version.target is not None and version.root() != version.target.root:
            raise UsageError(
                f"These weights are not those of version {version.target.id}, to which you return: load the "
                "checkpoint that was published as that version."
            )
        for rest in version.packer.flush():
            await version.send(rest)
        changed_parts = self._changed_parts(version)
        await self.seed.seal(version.manifest(changed), changed_parts)
        self._open = None
        self._last_payload_bytes[version.part.part] = version.payload_bytes
        return Sealed(version.root(), version.payload_bytes, len(version.chunk_ids), root, changed_parts)

    def _changed_parts(self, version: "_Version") -> frozenset[Part]:
        """The parts that the version changes, and the one that is published, also when nothing of it changes."""
        ranges = [(found.part, found.blocks) for found in self._ranges]
        changed = frozenset(part for part, blocks in ranges if version.seen[blocks.start : blocks.stop].any())
        whole = len(version.part.blocks) == len(version.seen)
        return changed if whole and changed else changed | {version.part.part}

    async def _restore_others(self, version: "_Version", target: Seal) -> int:
        """Add what the other parts were in an older version. Returns how many elements that changes."""
        if len(version.part.blocks) == len(version.seen):
            return 0
        changed = 0
        async with aclosing(self.seed.rewind(target, version.part.blocks)) as found:
            async for some in found:
                for delta, count in some:
                    version.note_restored(delta)
                    changed += count
                    for full in version.packer.add(delta):
                        await version.send(full)
        return changed

    async def _add_formats(self, version: "_Version") -> None:
        """Add what the version changes in the formats, once all of its base is in chunks."""
        for rest in version.packer.flush():
            await version.send(rest)
        found = self._formats.deltas(self.seed.replica, version.changes, self.seed.coder())
        async with aclosing(found) as deltas:
            async for some in deltas:
                for delta, known in some:
                    version.note_restored(delta)
                    if known is not None:
                        version.known[delta.block] = known
                    for full in version.packer.add(delta):
                        await version.send(full)

    async def abandon(self) -> None:
        """Drop the open version, if there is one."""
        if self._open is not None:
            self._open = None
            await self.seed.abandon()

    def _current(self) -> "_Version":
        if self._open is None:
            raise PeerError("publish: no version is open")
        return self._open


class _Version:
    """The open version so far."""

    def __init__(
        self,
        attempt: Attempt,
        seed: VersionSink,
        target: Seal | None,
        classes: Sequence[int] | None,
        part: PartBlocks,
    ) -> None:
        self.attempt = attempt
        self.part = part
        self.target = target
        self.seed = seed
        self.packer = ClassPacker(chunk_target(attempt.expected_bytes), classes)
        self.known: dict[int, StagedBlock] = {}
        """What the blocks change that are not in a chunk yet, where the trainer has said it."""
        self.hashes = seed.replica.hashes.copy()
        self.seen = np.zeros(seed.replica.layout.n_blocks, np.bool_)
        self.chunk_ids: list[bytes] = []
        self.changes = BaseChanges(seed.replica, self._payload)
        """What it changes in blocks on which formats depend."""
        self._chunk_of: dict[int, ChunkKey] = {}
        """By block of these: the chunk that it is in."""
        self.payload_bytes = 0

    def note(self, delta: BlockDelta) -> None:
        """Note a block of the trainer. Raises `PeerError` for one that is not in its part, or that came before."""
        blocks = self.part.blocks
        if delta.block not in blocks:
            raise PeerError(f"publish.block: {delta.block - blocks.start} of {len(blocks)}")
        if self.seen[delta.block]:
            raise PeerError(f"publish.block: {delta.block - blocks.start} came twice")
        self.note_restored(delta)

    def note_restored(self, delta: BlockDelta) -> None:
        """Note a block, of any part, that the seed itself has found."""
        self.seen[delta.block] = True
        self.hashes[delta.block] = np.frombuffer(delta.new_hash, np.uint8)

    @property
    def part_hashes(self) -> NDArray[np.uint8]:
        blocks = self.part.blocks
        return self.hashes[blocks.start : blocks.stop]

    def part_root(self) -> bytes:
        return state_root(self.part.layout.hash, self.part_hashes)

    def root(self) -> bytes:
        return state_root(self.seed.replica.layout.hash, self.hashes)

    async def send(self, deltas: list[BlockDelta]) -> None:
        attempt = self.attempt
        expected = max(attempt.expected_bytes, _GROWS * self.payload_bytes)
        self.packer.target_bytes = chunk_target(expected)
        key = ChunkKey(attempt.epoch, attempt.version, attempt.attempt, len(self.chunk_ids))
        self._chunk_of |= {delta.block: key for delta in deltas if delta.block in self.changes}
        chunk = seal_chunk(
            key,
            attempt.parent_root,
            self.seed.replica.layout.hash,
            deltas,
            self.seed.key,
            piece_target(expected, attempt.nodes, attempt.link_mbit),
        )
        self.chunk_ids.append(chunk.id)
        self.payload_bytes += chunk.nbytes
        await self.seed.add_chunk(chunk, self._take_known(deltas))

    def _payload(self, block: int) -> tuple[BlockEntry, bytes] | None:
        key = self._chunk_of.get(block)
        return None if key is None else self.seed.payload(key, block)

    def _take_known(self, deltas: list[BlockDelta]) -> OwnChunk | None:
        """What these blocks change; None unless the trainer has said it of each, or sent its new bits (raw)."""
        found = [self.known.pop(delta.block, None) for delta in deltas]
        if any(block is None and delta.coder != CODER_RAW for block, delta in zip(found, deltas, strict=True)):
            return None
        return OwnChunk(tuple(block for block in found if block is not None))

    def manifest(self, changed: int) -> Manifest:
        attempt = self.attempt
        return Manifest(
            swarm=self.seed.key.public,
            epoch=attempt.epoch,
            version=attempt.version,
            attempt=attempt.attempt,
            parent_root=attempt.parent_root,
            root=self.root(),
            layout_hash=self.seed.replica.layout.hash,
            chunk_ids=tuple(self.chunk_ids),
            payload_bytes=self.payload_bytes,
            changed=changed,
        )
