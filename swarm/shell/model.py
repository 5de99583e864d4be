"""The replica and what is staged for it: every change of our model's bits goes through here.

All methods that touch bits run in worker threads and take the lock for writing bits, or none for reading: the replica's
own sequence numbers keep readers from a mix. What the bits are is said by `version` (None while catching up).
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec import (
    Checkpoint,
    Layout,
    Manifest,
    Replica,
    Staged,
    StagedBlock,
    Torn,
    chunk_id,
    state_root,
    write_checkpoint,
)
from codec.bits import Bits
from codec.errors import PeerError, SwarmError, UsageError
from codec.staging import block_hash, decode
from swarm.protocol.events import VersionId
from swarm.store import Anchor, Seal, Store, StoredChunk

__all__ = ["Mismatch", "Model"]

Hashes = NDArray[np.uint8]
T = TypeVar("T")

READ_S: Final = 30.0
"""For so long a version may wait for an anchor of the one before: 30 GB on an ordinary disk."""


class Mismatch(SwarmError):
    """A version's chunks do not lead to the root that its manifest names. The text says which."""


class _GaveWay(Exception):
    """A version has waited long enough for us."""


class Model:
    """Our replica, once there is one. `base`: the user's own model folder, where blocks are taken from for nothing.

    `on_disk`: asked with the model's bytes whether to keep the replica in the store's folder and not in memory; may
    raise `UsageError`. `unproven`: it was taken as an earlier process left it, not hashed: see `audit`.
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
        self.unproven = False
        self.base = base
        self._stage_bytes = stage_bytes
        self._bits = threading.Lock()
        self._wanted_at = math.inf
        """Since when somebody waits to write bits."""
        """Held by whoever writes bits, and by whoever needs them to stand still for long."""
        self._edits = 0
        """Odd while bits or labels are being written: readers look before and after."""
        self._scratch = threading.Lock()
        self._staged: dict[VersionId, dict[int, Staged]] = {}
        self._staged_bytes = 0
        self._labels: dict[int, VersionId] = {}
        self._started = False
        """An earlier catch-up left blocks that we took up again."""
        self.replica: Replica | None = None
        self.version: VersionId | None = None
        """The version that all the bits are, proven by its root."""

    @property
    def layout(self) -> Layout | None:
        return None if self.replica is None else self.replica.layout

    # ------------------------------------------------------------ opening

    def restore(self) -> Seal | None:
        """Bring back the newest version that the store can prove: anchor, then chunks. None when there is none.

        A replica that was kept on disk comes first. An anchor whose bits are not what its marker says is removed, and
        the next one tried.
        """
        resumed = self._resume()
        if resumed is not None:
            return resumed
        while (anchor := (recovery := self._store.recover()).anchor) is not None:
            replica = self._load(anchor)
            if replica is None:
                self._store.anchors.remove(anchor)
                continue
            last = self._advance(replica, self._store.records.seal(anchor.version), recovery.replay)
            if last is not None:
                return last
            self._store.anchors.remove(anchor)
        return None

    def _resume(self) -> Seal | None:
        """Go on with the file that an earlier process kept its replica in: as it is after a clean end, else hashed."""
        working = self._store.working
        kept = working.look()
        data = None if kept is None else self._store.file(kept.layout)
        if kept is None or data is None:
            working.remove()
            return None
        layout = Layout.from_bytes(data)
        if not self._on_disk(layout.nbytes):
            working.remove()
            return None
        hashes = None if kept.root is None else self._store.hashes(kept.root)
        trusted = hashes is not None and state_root(layout.hash, hashes) == kept.root
        working.take(layout.hash)
        if hashes is None or not trusted:
            hashes = np.zeros((layout.n_blocks, 32), np.uint8)
        try:
            replica = Replica.reopen(working.path, layout, hashes.copy())
        except (PeerError, UsageError):
            return None
        if not trusted:
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                replica.rehash(pool.map)
        seal = self._standing(replica)
        last = None if seal is None else self._advance(replica, seal, self._store.chain(seal.root, seal.id))
        self.unproven = trusted and last is not None
        return last

    def _standing(self, replica: Replica) -> Seal | None:
        """The newest seal at which every block is, or from which a scatter was cut short: its blocks are at either."""
        after: Hashes | None = None
        for seal in reversed(self._store.records.seals()):
            hashes = self._store.hashes(seal.root)
            if hashes is None or len(hashes) != len(replica.hashes):
                after = None
                continue
            at = (replica.hashes == hashes).all(axis=1)
            if at.all() or (after is not None and (at | (replica.hashes == after).all(axis=1)).all()):
                return seal
            after = hashes
        return None

    def audit(self) -> tuple[int, ...]:
        """Hash a replica that was taken as it was left, while it is in use; the blocks whose bits are not their hash's.

        A disk may have lied since. Whoever hears of such blocks stops: the next start hashes first, and repairs.
        """
        replica, wrong = self._whole(), list[int]()
        for block in range(replica.layout.n_blocks if self.unproven else 0):
            data, digest = replica.read(block)
            if blake3(data).digest() != digest:
                wrong.append(block)
        self.unproven = bool(wrong)
        return tuple(wrong)

    def close(self) -> None:
        """Nothing is written any more: leave a replica that is on disk so that the next start need not hash it."""
        replica = self.replica
        if replica is None or not replica.on_disk or self.unproven:
            return
        with self._bits:
            if self.version is not None and self._store.hashes(replica.root) is not None:
                self._store.working.leave(replica.layout.hash, replica.root)

    def restore_from(self, replica: Replica) -> Seal | None:
        """As `restore`, with these bits in the place of an anchor: None when the store has no seal of them."""
        seals = self._store.records.seals()
        seal = next((seal for seal in reversed(seals) if seal.root == replica.root), None)
        return None if seal is None else self._advance(replica, seal, self._store.chain(seal.root, seal.id))

    def _advance(self, replica: Replica, seal: Seal | None, chain: tuple[Seal, ...]) -> Seal | None:
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
        if last is None or replica.root != last.root:
            return None
        self.replica, self.version = replica, last.id
        return last

    def _load(self, anchor: Anchor) -> Replica | None:
        data = self._store.file(anchor.layout)
        if data is None:
            return None
        try:
            replica = self._hashed(Checkpoint.open(anchor.folder), Layout.from_bytes(data))
        except (UsageError, PeerError):
            return None
        return replica if replica.root == anchor.root else None

    def open(self, layout_hash: bytes) -> bytes:
        """Make the replica of this layout (which the store holds): from the user's folder, and what an earlier catch-up
        brought, else empty. Returns its root. Raises `UsageError` when the folder is of another model.
        """
        data = self._store.file(layout_hash)
        if data is None:
            raise Mismatch("the layout is not in the store")
        layout = Layout.from_bytes(data)
        with self._writing():
            if self.replica is None or self.replica.layout.hash != layout_hash:
                self.replica = None
                self.replica = self._from_base(layout)
                for block, data in self._store.partial.load(layout):
                    self.replica.write_block(block, data, blake3(data).digest())
                    self._started = True
            self._forget()
            return self.replica.root

    @property
    def empty(self) -> bool:
        """Nothing of the replica came from anywhere yet."""
        return self.base is None and not self._started

    def adopt(self, replica: Replica, version: VersionId) -> None:
        """The trainer's own replica, or a ready one: all its bits are this version."""
        self.replica, self.version = replica, version

    def needs(self, layout: Layout) -> tuple[bytes, ...]:
        """The hashes of the layout's files that the store lacks, after taking what the user's folder has."""
        lacking = [spec for spec in layout.files if self._store.file(spec.hash) is None]
        base = self.base
        for spec in lacking if base is not None and base.is_dir() else ():
            assert base is not None
            path = base / spec.name  # a plain file name: the layout was checked
            if path.is_file() and path.stat().st_size == spec.size:
                data = path.read_bytes()
                if blake3(data).digest() == spec.hash:
                    self._store.put_file(data)
        return tuple(spec.hash for spec in lacking if self._store.file(spec.hash) is None)

    # ------------------------------------------------------------ step by step

    def stage(self, chunk: StoredChunk) -> None:
        """Decode a whole chunk into scratch; past `stage_bytes` it stays coded until the seal.

        Raises `Torn`, after which `replica.hashes` says of those blocks what they really are, so that a comparison with
        a hash list finds them; `PeerError` for a chunk of another model.
        """
        if self._staged_bytes >= self._stage_bytes:
            return
        try:
            staged = self._decode(chunk)
        except Torn as error:
            self._recheck(error.blocks)
            raise
        version = VersionId(chunk.key.epoch, chunk.key.version)
        with self._scratch:
            self._staged.setdefault(version, {})[chunk.key.seq] = staged
            self._staged_bytes += staged.nbytes

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
        held = self._staged.get(id_, {})
        complete = all(chunk.key.seq in held for chunk in chunks)
        changes = tuple(held[chunk.key.seq] for chunk in chunks) if complete else None
        with self._writing():
            if changes is not None:
                replica.scatter(changes)
            else:
                for chunk in chunks:
                    replica.scatter([self._staged_or_decoded(chunk)])
            self.version = id_
        for version in list(self._staged):  # a copy: the next version's first chunk may be staged right now
            if version <= id_:
                self.drop(version)
        return changes

    def drop(self, version: VersionId) -> None:
        """What was staged of this version is of no use any more."""
        with self._scratch:
            dropped = self._staged.pop(version, {})
            self._staged_bytes -= sum(staged.nbytes for staged in dropped.values())

    # ------------------------------------------------------------ catching up

    def differing(self, hashes: Hashes) -> tuple[int, ...]:
        """The blocks whose hash is not the one in this (n, 32) list."""
        return tuple(int(block) for block in np.flatnonzero((self._whole().hashes != hashes).any(axis=1)))

    def write_block(self, block: int, data: bytes, expected_hash: bytes, label: VersionId) -> None:
        """Put a fetched block in place, on disk too, so that a kill does not lose it. Raises `PeerError`."""
        replica = self._whole()
        with self._writing():
            self.version = None
            replica.write_block(block, data, expected_hash)
            self._labels[block] = label
        self._store.partial.add(replica.layout, block, data)

    def replay(self, manifest: Manifest, sealed: bytes) -> tuple[int, ...]:
        """Apply this version's chunks to the blocks whose label is older. The blocks that do not match (none: all
        well).

        When no label is newer, the root is compared too; its seal is made durable then.
        """
        replica, id_ = self._whole(), VersionId(manifest.epoch, manifest.version)
        bad: tuple[int, ...] = ()
        if replica.root != manifest.root:
            newer = {block for block, label in self._labels.items() if label > id_}
            with self._writing():
                self.version = None
                bad = tuple(self._replay_chunks(replica, manifest, newer))
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
        with self._writing():
            self._forget()
            self.version = id_

    # ------------------------------------------------------------ giving

    def read_block(self, block: int) -> tuple[VersionId, bytes] | None:
        """A block and the version it is of; None when there is no such block or no proven version."""
        while self.replica is not None and 0 <= block < self.replica.layout.n_blocks:
            before, version = self._edits, self.version
            if version is None:
                return None
            if before & 1:
                with self._bits:  # a version is being written: milliseconds
                    continue
            data = self.replica.read_block(block)
            if self._edits == before:
                return version, data
        return None

    def read(self, use: Callable[[Replica], T]) -> T | None:
        """What `use` makes of the replica's bits, all of one version; None while they are of none.

        No version is written meanwhile: it is to copy what it needs, and no more.
        """
        with self._bits:
            return use(self._whole()) if self.version is not None else None

    def write_anchor(self) -> VersionId | None:
        """Write a checkpoint of the version that stands, which stands still meanwhile. Raises `DiskFull`.

        None where there is no version, or a newer one had to wait for `READ_S`: on a disk so slow the next is tried.
        """
        with contextlib.suppress(_GaveWay), self._bits:
            replica, version = self.replica, self.version
            if replica is None or version is None:
                return None
            layout = replica.layout
            self._store.put_file(layout.to_bytes())
            files = {spec.name: data for spec in layout.files if (data := self._store.file(spec.hash)) is not None}
            fill = partial(write_checkpoint, layout=layout, bits=self._patiently, files=files)
            self._store.write_anchor(version, replica.root, layout.hash, fill)
            self._store.partial.clear()
            return version
        return None

    # ------------------------------------------------------------ within

    def _patiently(self, name: str) -> Bits:
        """A tensor's bits, for whoever reads all of them one after the other. Raises `_GaveWay`."""
        if time.monotonic() - self._wanted_at > READ_S:
            raise _GaveWay
        return self._whole().bits(name)

    def _whole(self) -> Replica:
        if self.replica is None:
            raise RuntimeError("there is no replica yet")
        return self.replica

    def _decode(self, chunk: StoredChunk, replica: Replica | None = None) -> Staged:
        body = self._store.chunks.body(chunk.key)
        if body is None:
            raise Mismatch(f"chunk {tuple(chunk.key)} is not in the store")
        return (replica or self._whole()).stage(chunk.header, body)

    def _from_base(self, layout: Layout) -> Replica:
        if self.base is None:
            return Replica.create(layout, self._place(layout))
        return self._hashed(Checkpoint.open(self.base), layout)

    def _hashed(self, checkpoint: Checkpoint, layout: Layout) -> Replica:
        """The checkpoint's bits, copied and hashed by as many threads as there are cores."""
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            return Replica.from_checkpoint(checkpoint, layout, run=pool.map, path=self._place(layout))

    def _place(self, layout: Layout) -> Path | None:
        """The file that the replica is to be kept in; None: memory. Raises `UsageError` when it can be kept nowhere."""
        working = self._store.working
        if not self._on_disk(layout.nbytes):
            working.remove()
            return None
        working.take(layout.hash)
        return working.path

    def _recheck(self, blocks: tuple[int, ...]) -> None:
        replica = self._whole()
        with self._writing():
            for block in blocks:
                actual = block_hash(replica.block(block))
                if actual != replica.hashes[block].tobytes():  # memory that lied: we are no version any more
                    replica.hashes[block] = np.frombuffer(actual, np.uint8)
                    self.version = None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._wanted_at = time.monotonic()
        with self._bits:
            self._wanted_at = math.inf
            self._edits += 1
            try:
                yield
            finally:
                self._edits += 1

    def _listed(self, manifest: Manifest) -> list[StoredChunk]:
        """The chunks that the manifest lists, in order. Raises `Mismatch` when one is not the very one."""
        id_ = VersionId(manifest.epoch, manifest.version)
        chunks = self._store.chunks.of(id_, manifest.attempt)[: len(manifest.chunk_ids)]
        if tuple(chunk_id(chunk.sealed_header) for chunk in chunks) != manifest.chunk_ids:
            raise Mismatch("the chunks are not those that the manifest lists")
        return chunks

    def _staged_or_decoded(self, chunk: StoredChunk) -> Staged:
        held = self._staged.get(VersionId(chunk.key.epoch, chunk.key.version), {})
        return held.get(chunk.key.seq) or self._decode(chunk)

    def _replay_chunks(self, replica: Replica, manifest: Manifest, newer: set[int]) -> Iterator[int]:
        """Bring every older block of this version's chunks to it; yields those that cannot be."""
        id_ = VersionId(manifest.epoch, manifest.version)
        for chunk in self._store.chunks.of(id_, manifest.attempt):
            body = self._store.chunks.body(chunk.key)
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
                    replica.scatter([Staged((StagedBlock(block, *decoded, old_hash, entry.new_hash),))])

    def _forget(self) -> None:
        self._labels.clear()
        self.version = None
        for version in list(self._staged):
            self.drop(version)
