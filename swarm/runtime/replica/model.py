"""The replica and what is staged for it: every change of our model's bits goes through here.

All methods that touch bits run in worker threads and take the lock for writing bits, or none for reading: the replica's
own sequence numbers keep readers from a mix. What the bits are is said by `version` (None while catching up).
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec import (
    Checkpoint,
    Layered,
    Layout,
    Manifest,
    Replica,
    Staged,
    Torn,
    chunk_id,
    state_root,
)
from codec.bits import Bits
from codec.errors import PeerError, SwarmError
from codec.staging import block_hash
from swarm.protocol.core.events import VersionId
from swarm.runtime.replica.gate import Gate
from swarm.runtime.replica.keep import Keep, Loan
from swarm.runtime.replica.replay import replay_chunks
from swarm.runtime.replica.restore import restore
from swarm.runtime.replica.scratch import Scratch
from swarm.store import Seal, Store, StoredChunk

__all__ = ["Mismatch", "Model"]

Hashes = NDArray[np.uint8]
T = TypeVar("T")

AUDIT_BYTES: Final = 64 << 20
"""Hashed at a time: some milliseconds."""
_NO_HASH: Final = bytes(32)
READ_S: Final = 30.0
"""For so long a version may wait for an anchor of the one before: 30 GB on an ordinary disk."""


class Mismatch(SwarmError):
    """A version's chunks do not lead to the root that its manifest names. The text says which."""


class _GaveWay(Exception):
    """A version has waited long enough for us."""


class Model:
    """Our replica, once there is one. `base`: the user's own model folder, where blocks are taken from for nothing.

    `on_disk`: asked with the model's bytes whether to keep the replica in the store's folder and not in memory; may
    raise `UsageError`. On disk it is an anchor and the chunks since (`Layered`); but while it catches up, a file.
    """

    def __init__(
        self,
        store: Store,
        *,
        base: Path | None = None,
        stage_bytes: int = 2 << 30,
        on_disk: Callable[[int], bool] = lambda model_bytes: False,
    ) -> None:
        self._store = store
        self._on_disk = on_disk
        self._unproven: NDArray[np.bool_] = np.zeros(0, np.bool_)
        """The blocks that were taken as a clean end left them, and not hashed since."""
        self._keep = Keep(store)
        self.on_damage: Callable[[int], None] = lambda blocks: None
        """Told, in a worker thread, that so many blocks are not what they must be: we are no version any more."""
        self.nearly: Seal | None = None
        """The version that we would be, but for `lost` blocks of the last start's, which the disk did not keep."""
        self.lost = 0
        self.spoiled = False  # an anchor is due: the one on disk is not what it must be
        self.base = base
        self._gate = Gate()
        self._scratch = Scratch(stage_bytes)
        self._labels: dict[int, VersionId] = {}
        self._started = False  # an earlier catch-up left blocks that we took up again
        self.replica: Replica | Layered | None = None
        self.version: VersionId | None = None
        """The version that all the bits are, proven by its root."""

    @property
    def layout(self) -> Layout | None:
        return None if self.replica is None else self.replica.layout

    # ------------------------------------------------------------ opening

    def restore(self) -> Seal | None:
        """Bring back the newest version that the store can prove. None when there is none: perhaps one `nearly`.

        After a clean end nothing is hashed: a block that is not proven yet is hashed before anybody is given it, and
        `audit` hashes the others.
        """
        self._keep.forget()
        found = restore(self._store, self._place)
        if found is None:
            return None
        self.replica = found.replica
        self._unproven = np.full(found.replica.layout.n_blocks, found.believed)
        if found.wrong:
            self.nearly, self.lost = found.seal, len(found.wrong)
            return None
        self.version = found.seal.id
        return found.seal

    def audit(self, most_bytes: int = AUDIT_BYTES) -> int:
        """Hash some more of what was taken on trust; how many bytes, 0 when all is proven. In use meanwhile."""
        done = 0
        for block in map(int, np.flatnonzero(self._unproven)):
            if done >= most_bytes:
                break
            replica = self._whole()
            done += replica.layout.block(block).nbytes
            self._prove(replica, block)
        return done

    def _prove(self, replica: Replica | Layered, block: int) -> bool:
        """Whether a block that was taken on trust deserved it."""
        try:
            data, digest = replica.read(block)  # what is made anew is hashed there
            right = isinstance(replica, Layered) or blake3(data).digest() == digest
        except Torn:
            right = False
        if right:
            self._unproven[block] = False
        else:
            self._recheck((block,))
        return right

    def close(self) -> None:
        """Nothing is written any more: if all is proven, say so, and the next start need not hash it."""
        with self._gate.still():
            anchor = self._store.recover().anchor
            if self.version is not None and anchor is not None and not self.spoiled and not self._unproven.any():
                self._store.clean.leave(anchor)
        self._keep.forget()

    def restore_from(self, replica: Replica) -> Seal | None:
        """As `restore`, with these bits in the place of an anchor: None when the store has no seal of them."""
        seals = self._store.records.seals()
        seal = next((seal for seal in reversed(seals) if seal.root == replica.root), None)
        return None if seal is None else self._advance(replica, seal, self._store.chain(seal.root, seal.id))

    def _advance(self, replica: Replica, seal: Seal, chain: tuple[Seal, ...]) -> Seal | None:
        """Bring a replica that is at `seal` along `chain` as far as its chunks prove; it is ours then."""
        last = seal
        for seal in chain:
            try:
                for chunk in self._store.chunks.of(seal.id, seal.attempt):
                    replica.scatter([self._decode(chunk, replica)])
            except (Torn, PeerError, Mismatch):
                break
            if replica.root != seal.root:
                break
            last = seal
        if replica.root != last.root:
            return None
        self.adopt(replica, last.id)
        return last

    def open(self, layout_hash: bytes) -> bytes:
        """Make the replica of this layout (which the store holds): from the user's folder, and what an earlier catch-up
        brought, else empty. Returns its root. Raises `UsageError` when the folder is of another model.
        """
        data = self._store.file(layout_hash)
        if data is None:
            raise Mismatch("the layout is not in the store")
        layout = Layout.from_bytes(data)
        with self._gate.writing():
            if isinstance(self.replica, Layered) and self.replica.layout.hash == layout_hash:
                self.replica = self._keep.file_of(self.replica)[0]
            elif self.replica is None or self.replica.layout.hash != layout_hash:
                self.replica = None
                self.replica = self._from_base(layout)
                for block, data in self._store.partial.load(layout):
                    self.replica.write_block(block, data, blake3(data).digest())
                    self._started = True
            self._forget()
            if len(self._unproven) != layout.n_blocks:
                self._unproven = np.zeros(layout.n_blocks, np.bool_)
            assert self.replica is not None
            return self.replica.root

    @property
    def empty(self) -> bool:
        """Nothing of the replica came from anywhere yet."""
        return self.base is None and not self._started

    def adopt(self, replica: Replica, version: VersionId) -> None:
        """The trainer's own replica, or a ready one: all its bits are this version."""
        self.replica, self.version, self.nearly = replica, version, None
        self._unproven = np.zeros(replica.layout.n_blocks, np.bool_)

    # ------------------------------------------------------------ step by step

    def stage(self, chunk: StoredChunk) -> None:
        """Decode a whole chunk into scratch; past `stage_bytes` it stays coded until the seal.

        Raises `Torn`, after which `replica.hashes` says of those blocks what they really are, so that a comparison with
        a hash list finds them; `PeerError` for a chunk of another model.
        """
        if self._scratch.full:
            return
        try:
            staged = self._decode(chunk)
        except Torn as error:
            self._recheck(error.blocks)
            raise
        self._scratch.put(chunk.key, staged)

    def prepare(self, manifest: Manifest, sealed: bytes) -> None:
        """Compare roots, then make the seal durable: from here on the version stands. Nothing of the bits changes.

        Raises `Mismatch`, `Torn`, `DiskFull`, `TwoSeals`.
        """
        replica = self._whole()
        chunks = self._listed(manifest)
        if replica.root != manifest.parent_root:
            raise Mismatch("the replica is not the version that this one follows")
        hashes = replica.hashes.copy()
        for chunk in chunks:
            for block in self._staged_or_decoded(chunk):
                hashes[block.block] = np.frombuffer(block.new_hash, np.uint8)
        if state_root(replica.layout.hash, hashes) != manifest.root:
            raise Mismatch("the chunks do not lead to the root that the manifest names")
        self._store.seal(Seal.of(manifest, sealed), hashes)

    def scatter(self, manifest: Manifest) -> tuple[Staged, ...] | None:
        """Write the bits of a prepared version. Returns what was written if all of it was in scratch, else None."""
        replica, id_ = self._whole(), VersionId(manifest.epoch, manifest.version)
        chunks = self._listed(manifest)
        held = [self._scratch.get(chunk.key) for chunk in chunks]
        staged = tuple(each for each in held if each is not None)
        changes = staged if len(staged) == len(chunks) else None
        with self._gate.writing():
            if changes is not None:
                replica.scatter(changes)
            else:
                for chunk in chunks:
                    replica.scatter([self._staged_or_decoded(chunk)])
            self._unproven[[entry.block for chunk in chunks for entry in chunk.header.blocks]] = False
            self.version = id_
        self._scratch.drop_up_to(id_)
        return changes

    def drop(self, version: VersionId) -> None:
        """What was staged of this version is of no use any more."""
        self._scratch.drop(version)

    # ------------------------------------------------------------ catching up

    def differing(self, hashes: Hashes) -> tuple[int, ...]:
        """The blocks whose hash is not the one in this (n, 32) list."""
        return tuple(int(block) for block in np.flatnonzero((self._whole().hashes != hashes).any(axis=1)))

    def write_block(self, block: int, data: bytes, expected_hash: bytes, label: VersionId) -> None:
        """Put a fetched block in place, on disk too, so that a kill does not lose it. Raises `PeerError`."""
        replica = self._writable()
        with self._gate.writing():
            self.version = None
            replica.write_block(block, data, expected_hash)
            self._labels[block] = label
        self._store.partial.add(replica.layout, block, data)

    def replay(self, manifest: Manifest, sealed: bytes) -> tuple[int, ...]:
        """Apply this version's chunks to the blocks whose label is older. The blocks that do not match (none: all
        well).

        When no label is newer, the root is compared too; its seal is made durable then.
        """
        replica, id_ = self._writable(), VersionId(manifest.epoch, manifest.version)
        store = self._store.chunks
        bad: tuple[int, ...] = ()
        if replica.root != manifest.root:
            newer = {block for block, label in self._labels.items() if label > id_}
            with self._gate.writing():
                self.version = None
                bad = tuple(replay_chunks(replica, store.of(id_, manifest.attempt), store, newer))
            if not bad and not newer and replica.root != manifest.root:
                hashes = self._store.hashes(manifest.root)
                bad = tuple(range(replica.layout.n_blocks)) if hashes is None else self.differing(hashes)
        if not bad and replica.root == manifest.root:
            self.settle(manifest, sealed)
        return bad

    def settle(self, manifest: Manifest, sealed: bytes) -> None:
        """The bits are this version, proven by the root. Raises `Mismatch` when they are not."""
        replica = self._whole()
        if replica.root != manifest.root:
            raise Mismatch("the replica's root is not the manifest's")
        id_ = VersionId(manifest.epoch, manifest.version)
        self._store.seal(Seal.of(manifest, sealed), replica.hashes)
        with self._gate.writing():
            self._forget()
            self.version = id_

    # ------------------------------------------------------------ giving

    def read_block(self, block: int) -> tuple[VersionId, bytes] | None:
        """A block and the version it is of; None when there is no such block or no proven version."""
        while self.replica is not None and 0 <= block < self.replica.layout.n_blocks:
            before, version = self._gate.turn, self.version
            if version is None:
                return None
            if before & 1:
                with self._gate.still():  # a version is being written: milliseconds
                    continue
            replica = self.replica
            if self._unproven[block] and not self._prove(replica, block):
                return None
            try:
                data = replica.read_block(block)
            except Torn as error:
                self._recheck(error.blocks)
                return None
            if self._gate.turn == before:
                return version, data
        return None

    def read(self, use: Callable[[Replica | Layered], T]) -> T | None:
        """What `use` makes of the replica's bits, all of one version and proven; None while they are of none.

        No version is written meanwhile: it is to copy what it needs, and no more.
        """
        while self.audit():
            pass
        with self._gate.still():
            return use(self._whole()) if self.version is not None else None

    def lend(self) -> Loan | None:
        """The bits for an engine to map; None while they are of no version. They move on when the replica does; where
        it is on disk, a file is made for it, and brought up to date by every call and never otherwise."""
        with self._gate.still():
            replica, version = self.replica, self.version
            if replica is None or version is None:
                return None
            wrong: tuple[int, ...] = ()
            if isinstance(replica, Layered):
                replica, wrong = self._keep.file_of(replica)
            if not wrong:
                self._keep.lent = True
                return Loan(replica.layout, replica.seal_for_readers(), version, replica.root)
        self._recheck(wrong)
        return None

    def write_anchor(self) -> VersionId | None:
        """Write a checkpoint of the version that stands. Raises `DiskFull`.

        In memory the version stands still meanwhile; on disk it need not, and what was written is the replica then.
        None where there is no version, or it is damaged, or a newer one had to wait for `READ_S`: the next is tried.
        """
        while self.audit():
            pass
        if isinstance(self.replica, Layered):
            return self._write_newer_anchor(self.replica)
        with contextlib.suppress(_GaveWay), self._gate.still():
            replica, version = self.replica, self.version
            if replica is None or version is None:
                return None
            self._keep.write_anchor(replica, version, self._patiently)
            self.spoiled = False
            if isinstance(replica, Replica) and replica.path is not None:
                self.replica = self._keep.go_on(version) or replica
            return version
        return None

    def _write_newer_anchor(self, replica: Layered) -> VersionId | None:
        with self._gate.still():
            frozen, version = replica.frozen(), self.version
        if version is None or self.replica is not replica:
            return None
        try:
            self._keep.write_anchor(frozen, version, frozen.parts)
        except Torn as error:
            self._recheck(error.blocks)
            return None
        with self._gate.still():
            self._keep.rebase(replica, frozen, version)
        self.spoiled = False
        return version

    # ------------------------------------------------------------ within

    def _patiently(self, name: str) -> Bits:
        """A tensor's bits, for whoever reads all of them one after the other. Raises `_GaveWay`."""
        if self._gate.kept_waiting_s > READ_S:
            raise _GaveWay
        return self._whole().bits(name)

    def _whole(self) -> Replica | Layered:
        if self.replica is None:
            raise RuntimeError("there is no replica yet")
        return self.replica

    def _writable(self) -> Replica:
        """The replica, which has been opened to catch up."""
        replica = self._whole()
        if not isinstance(replica, Replica):
            raise RuntimeError("the replica was not opened")
        return replica

    def _decode(self, chunk: StoredChunk, replica: Replica | None = None) -> Staged:
        body = self._store.chunks.body(chunk.key)
        if body is None:
            raise Mismatch(f"chunk {tuple(chunk.key)} is not in the store")
        return (replica or self._whole()).stage(chunk.header, body)

    def _from_base(self, layout: Layout) -> Replica:
        path = self._place(layout)
        replica = Replica.create(layout) if path is None else self._keep.new(layout)
        if self.base is not None:
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                replica.load(Checkpoint.open(self.base), pool.map)
        return replica

    def _place(self, layout: Layout) -> Path | None:
        """The file that the replica is to be kept in; None: memory. Raises `UsageError` when it can be kept nowhere."""
        return self._store.replica_path if self._on_disk(layout.nbytes) else None

    def _recheck(self, blocks: Iterable[int]) -> None:
        """Hash blocks that there is doubt about: those that are not what they must be (a disk lied, or memory) get the
        hash that they have, so that a comparison with a hash list finds them, and we are no version any more."""
        replica, wrong = self._whole(), 0
        with self._gate.writing():
            for block in blocks:
                try:
                    actual = block_hash(replica.block(block))
                except Torn:
                    actual = _NO_HASH
                if actual != replica.hashes[block].tobytes():
                    replica.hashes[block] = np.frombuffer(actual, np.uint8)
                    self.version, wrong = None, wrong + 1
                self._unproven[block] = False
        if wrong:
            self.spoiled = True
            self.on_damage(wrong)

    def _listed(self, manifest: Manifest) -> list[StoredChunk]:
        """The chunks that the manifest lists, in order. Raises `Mismatch` when one is not the very one."""
        id_ = VersionId(manifest.epoch, manifest.version)
        chunks = self._store.chunks.of(id_, manifest.attempt)[: len(manifest.chunk_ids)]
        if tuple(chunk_id(chunk.sealed_header) for chunk in chunks) != manifest.chunk_ids:
            raise Mismatch("the chunks are not those that the manifest lists")
        return chunks

    def _staged_or_decoded(self, chunk: StoredChunk) -> Staged:
        return self._scratch.get(chunk.key) or self._decode(chunk)

    def _forget(self) -> None:
        self._labels.clear()
        self.version = None
        self._scratch.drop_up_to(None)
