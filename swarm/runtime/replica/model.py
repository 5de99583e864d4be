"""The replica and what is staged for it: every change of the model's bits goes through here.

All methods that touch bits run in worker threads. Writers hold the write gate; readers of a block take no lock and
check sequence numbers instead, so that they never return a mix of two versions. `version` says which version the bits
are; it is None while catching up.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec import Checkpoint, Layered, Layout, Manifest, Replica, StagedChunk, Torn, state_root
from codec.bits import Bits
from codec.live import LiveBlocks
from codec.staging import check_block
from codec.zeros import with_holes, zero_blocks
from swarm.protocol.core.events import VersionId
from swarm.runtime.replica.base_folder import BaseFolder
from swarm.runtime.replica.files import Loan, ReplicaFiles
from swarm.runtime.replica.holding import Holding
from swarm.runtime.replica.own import BELIEVED, NO_HASH, OWN, PROVEN, OwnChunk, actual_hash, hashes_after, write_known
from swarm.runtime.replica.replay import Mismatch, bring_to, listed_chunks
from swarm.runtime.replica.restore import OnDisk, replay_from, restore
from swarm.runtime.replica.scratch import Scratch
from swarm.runtime.replica.write_gate import WriteGate, WriterWaits
from swarm.store import Seal, Store, StoredChunk

__all__ = ["Model"]

Hashes = NDArray[np.uint8]
T = TypeVar("T")

AUDIT_BYTES: Final = 64 << 20
"""What one call of `audit` hashes: some milliseconds."""


class Model:
    """This member's replica, once there is one.

    `base`: the user's own model folder, from which blocks are read instead of fetched. `refer`: it may serve as a
    checkpoint, without being copied to the store. `on_disk`: whether to keep the replica in the store's folder instead
    of in memory (see `OnDisk`). On disk the replica is a checkpoint and the chunks since (`Layered`); while it catches
    up, blocks of several files. `holding`: which blocks it has.
    """

    def __init__(
        self,
        store: Store,
        *,
        base: Path | None = None,
        refer: bool = True,
        stage_bytes: int = 2 << 30,
        on_disk: OnDisk = lambda held_bytes, base_bytes: False,
        holding: Holding | None = None,
    ) -> None:
        self._store = store
        self.holding = holding or Holding(formats=True)
        self._on_disk = on_disk
        self._unproven: NDArray[np.uint8] = np.zeros(0, np.uint8)
        """By block: `PROVEN`, or why its bits have yet to be hashed: `OWN` or `BELIEVED`."""
        self._files = ReplicaFiles(store)
        self.on_damage: Callable[[int], None] = lambda blocks: None
        """Called in a worker thread with the number of blocks found damaged: the bits are no version any more."""
        self.nearly: Seal | None = None
        """The version that the last start would have restored, except for `lost` blocks that the disk did not keep."""
        self.lost = 0
        self.spoiled = False
        """Whether the checkpoint on disk is damaged, so that a new one is due."""
        self._base = BaseFolder(base, refer=refer)
        self.changed_base: Path | None = None
        """The folder that the store refers to, if the last start found it changed or gone."""
        self._checkpointing = threading.Lock()
        self._gate = WriteGate()
        self._scratch = Scratch(stage_bytes)
        self._labels: dict[int, VersionId] = {}
        """By block: its version, for blocks that were fetched while catching up."""
        self._live: LiveBlocks | None = None
        """The engine's memory, from which blocks are read first; None: it is not."""
        self._started = False
        """Whether `open` found blocks of an earlier catch-up."""
        self.replica: Replica | Layered | None = None
        self.version: VersionId | None = None
        """The version of all bits, proven by its root; None while they are of none."""

    @property
    def base(self) -> Path | None:
        """The user's model folder."""
        return self._base.path

    @property
    def layout(self) -> Layout | None:
        return None if self.replica is None else self.replica.layout

    # ------------------------------------------------------------ opening

    def restore(self) -> Seal | None:
        """Restore the newest version that the store can prove. None when it proves none; `nearly` may be set then.

        After a clean shutdown nothing is hashed here: an unproven block is hashed before it is given to a peer, and
        `audit` hashes the others.
        """
        self._files.remove_file()
        self.changed_base = self._store.checkpoints.changed_folder
        found = restore(self._store, self._on_disk, self.holding)
        if found is None:
            return None
        self.replica = found.replica
        self._unproven = np.full(found.replica.layout.n_blocks, BELIEVED if found.believed else PROVEN, np.uint8)
        if (held := self.holding.blocks(found.replica.layout)) is not None:
            self._unproven[~held] = PROVEN
        self._unproven[zero_blocks(found.replica.layout, found.replica.hashes)] = PROVEN
        if found.wrong:
            self.nearly, self.lost = found.seal, len(found.wrong)
            return None
        self.version = found.seal.id
        return found.seal

    def audit(self, max_bytes: int = AUDIT_BYTES) -> int:
        """Hash more of the unproven blocks, while the replica is in use. Returns the bytes hashed; 0: all is proven."""
        done = 0
        for block in map(int, np.flatnonzero(self._unproven)):
            if done >= max_bytes:
                break
            replica = self._whole()
            done += replica.layout.block(block).nbytes
            self._prove(replica, block)
        return done

    def _prove(self, replica: Replica | Layered, block: int) -> bool:
        """Hash an unproven block. Returns whether it has the hash that it must have."""
        try:
            data, digest = replica.read(block)  # `Layered.read` hashes what it builds
        except Torn:
            data, digest = b"", NO_HASH
        if not (isinstance(replica, Layered) and data) and blake3(data).digest() != digest:
            self._recheck((block,))
            return False
        with self._gate.unchanged():
            if replica.hashes[block].tobytes() == digest:  # otherwise a version has changed it meanwhile
                self._unproven[block] = PROVEN
        return True

    def close(self) -> None:
        """Nothing is written any more. If everything is proven, note it on disk: the next start need not hash it."""
        with self._gate.unchanged():
            checkpoint = self._store.recover().checkpoint
            proven = not self.spoiled and BELIEVED not in self._unproven
            if proven and self.version is not None and checkpoint is not None:
                self._store.clean.leave(checkpoint)
        self._files.remove_file()

    def restore_from(self, replica: Replica) -> Seal | None:
        """As `restore`, with these bits in place of a checkpoint. None when the store has no seal of them."""
        seal = replay_from(self._store, replica)
        if seal is not None:
            self.adopt(replica, seal.id)
        return seal

    def open(self, layout_hash: bytes) -> bytes:
        """Create the replica of this layout, which the store holds, from the user's folder and from the blocks of an
        earlier catch-up; empty without them. Returns its root. Raises `UsageError` when the folder has another model.
        """
        if (data := self._store.file(layout_hash)) is None:
            raise Mismatch("the layout is not in the store")
        layout = Layout.from_bytes(data)
        with self._gate.writing():
            if self.replica is None or self.replica.layout.hash != layout_hash:
                self.replica = None
                on_disk = self._on_disk(self.holding.nbytes(layout), layout.base_nbytes)  # raises without room
                self.holding.check_place(layout, on_disk=on_disk)
                held = self.holding.blocks(layout)
                self.replica = self._base.load(layout, self._store.chunks.payload, on_disk=on_disk, held=held)
                self.read_live(self._live)
                for block, data, digest in self._store.partial.load(layout):
                    if held is None or held[block]:
                        self._put(self.replica, block, data, digest)
                        self._started = True
            self._forget_version()
            if len(self._unproven) != layout.n_blocks:
                self._unproven = np.zeros(layout.n_blocks, np.uint8)
            assert self.replica is not None
            return self.replica.root

    @property
    def empty(self) -> bool:
        """Whether the replica has no bits yet, from a folder or an earlier catch-up."""
        return self.base is None and not self._started

    def load_base(self, checkpoint: Checkpoint, layout: Layout) -> Replica:
        """A replica with the checkpoint's bits, not adopted. The next checkpoint with these bits refers to it."""
        return self._base.load_replica(checkpoint, layout)

    def adopt(self, replica: Replica, version: VersionId) -> None:
        """Take `replica`, whose bits all are of `version`: the trainer's own, or a restored one."""
        self.replica, self.version, self.nearly = replica, version, None
        self._unproven = np.zeros(replica.layout.n_blocks, np.uint8)

    # ------------------------------------------------------------ step by step

    def stage(self, chunk: StoredChunk) -> None:
        """Decode a complete chunk into scratch memory, if it is not there; above `stage_bytes` it stays encoded until
        the seal.

        Raises `Torn` for blocks with unexpected bits, whose actual hashes are in `replica.hashes` then, so that a
        comparison with a hash list finds them; `PeerError` for a chunk of another model.
        """
        if self._scratch.full or self._scratch.get(chunk.key) is not None:
            return
        try:
            staged = self._decode(chunk)
        except Torn as error:
            self._recheck(error.blocks)
            raise
        self._scratch.put(chunk.key, staged)

    def stage_own(self, chunk: StoredChunk, known: OwnChunk) -> None:
        """Note what a chunk of this seed's own publisher changes; as `stage`, without decoding."""
        if not self._scratch.full:
            self._scratch.put(chunk.key, known)

    def prepare(self, manifest: Manifest, sealed: bytes) -> None:
        """Check that the staged chunks lead to the manifest's root, then make the seal durable. The bits do not change.

        Raises `Mismatch`, `Torn`, `DiskFull`, `TwoSeals`.
        """
        replica = self._whole()
        chunks = listed_chunks(self._store.chunks, manifest)
        if replica.root != manifest.parent_root:
            raise Mismatch("the replica is not the version that this one follows")
        for chunk in chunks:
            if not chunk.bodiless or self.holding.needs(chunk.header, replica.layout):
                self._staged_or_decoded(chunk)  # raises unless each block gets the hash that the header lists
        hashes = hashes_after(replica.hashes, chunks)
        if state_root(replica.layout.hash, hashes) != manifest.root:
            raise Mismatch("the chunks do not lead to the root that the manifest names")
        self._store.seal(Seal.of(manifest, sealed), hashes)

    def apply(self, manifest: Manifest) -> tuple[StagedChunk, ...] | None:
        """Write the bits of a prepared version. Returns what was written, if all of it was in scratch, decoded."""
        replica, id_ = self._whole(), VersionId(manifest.epoch, manifest.version)
        listed = listed_chunks(self._store.chunks, manifest)
        chunks = [chunk for chunk in listed if not chunk.bodiless]
        held = [self._scratch.get(chunk.key) for chunk in chunks]
        staged = tuple(chunk for chunk in held if isinstance(chunk, StagedChunk))
        changes = staged if len(staged) == len(chunks) else None
        with self._gate.writing():
            if changes is not None:
                replica.scatter(changes)
            for chunk in chunks:
                known = None if changes is not None else self._staged_or_decoded(chunk)
                proven = known is None or write_known(replica, chunk, known, self._store.chunks)
                blocks = [entry.block for entry in chunk.header.blocks]
                self._unproven[blocks] = PROVEN if proven else np.maximum(self._unproven[blocks], OWN)
            if isinstance(replica, Replica) and replica.held is not None:
                replica.note_hashes((entry.block, entry.new_hash) for chunk in listed for entry in chunk.header.blocks)
            self.version = id_
        self._scratch.drop_up_to(id_)
        return changes

    def drop_staged(self, version: VersionId) -> None:
        """Forget what was staged of this version."""
        self._scratch.drop(version)

    # ------------------------------------------------------------ catching up

    def differing(self, hashes: Hashes) -> tuple[int, ...]:
        """The blocks, of those that are held, whose hash is not the one in this list, uint8 (n_blocks, 32)."""
        return self.holding.differing(self._whole(), hashes)

    def write_block(self, block: int, data: bytes, expected_hash: bytes, label: VersionId) -> None:
        """Write a fetched block, of version `label`, into the replica and to disk, so that a kill does not lose it.

        Raises `PeerError` when it does not have `expected_hash`.
        """
        replica = self._whole()
        if isinstance(replica, Layered):
            check_block(replica.layout, block, data, expected_hash)
        with self._gate.writing():
            self.version = None  # before the disk is written: a checkpoint that is being finished is of a version
            if isinstance(replica, Replica):
                replica.write_block(block, data, expected_hash)
        self._store.partial.add(replica.layout, block, data, expected_hash)
        with self._gate.writing():
            if isinstance(replica, Layered):
                self._put(replica, block, data, expected_hash)
            self._labels[block] = label

    def _put(self, replica: Replica | Layered, block: int, data: bytes, digest: bytes) -> None:
        """Take a block that is in the unfinished checkpoint."""
        if isinstance(replica, Replica):
            replica.write_block(block, data, digest)
        else:
            replica.place_block(block, self._store.partial.blocks(replica.layout), digest)

    def replay(self, manifest: Manifest, sealed: bytes) -> tuple[int, ...]:
        """Apply this version's chunks to the blocks whose label is older. Returns the blocks that do not match.

        When no label is newer, the root is compared too, and the version is confirmed.
        """
        replica, id_ = self._whole(), VersionId(manifest.epoch, manifest.version)
        bad: tuple[int, ...] = ()
        if replica.root != manifest.root:
            newer = {block for block, label in self._labels.items() if label > id_}
            with self._gate.writing():
                self.version = None
                bad = bring_to(manifest, replica, self._store, self.holding, newer)
        if not bad and replica.root == manifest.root:
            self.confirm(manifest, sealed)
        return bad

    def confirm(self, manifest: Manifest, sealed: bytes) -> None:
        """Make the seal durable: all bits are of this version. Raises `Mismatch` when their root is another."""
        replica = self._whole()
        if replica.root != manifest.root:
            raise Mismatch("the replica's root is not the manifest's")
        id_ = VersionId(manifest.epoch, manifest.version)
        self._store.seal(Seal.of(manifest, sealed), replica.hashes)
        with self._gate.writing():
            self._forget_version()
            self.version = id_

    # ------------------------------------------------------------ giving

    def read_block(self, block: int) -> tuple[VersionId, bytes] | None:
        """A block and its version; None when there is no such block or no proven version."""
        while self.replica is not None and 0 <= block < self.replica.layout.n_blocks:
            before, version = self._gate.sequence, self.version
            if version is None:
                return None
            if before & 1:
                with self._gate.unchanged():  # a version is being written, which takes milliseconds
                    continue
            replica = self.replica
            if isinstance(replica, Replica) and not replica.holds(block):
                return None
            if self._unproven[block] and not self._prove(replica, block):
                return None
            try:
                data = replica.read_block(block)
            except Torn as error:
                self._recheck(error.blocks)
                return None
            if self._gate.sequence == before:
                return version, data
        return None

    def read(self, use: Callable[[Replica | Layered], T]) -> T | None:
        """Call `use` with the replica, whose bits all are of one version and proven; None while they are of none.

        No version can be written meanwhile, so `use` should only copy what it needs.
        """
        while self.audit():
            pass
        with self._gate.unchanged():
            return use(self._whole()) if self.version is not None else None

    def hashes_at(self, version: VersionId) -> Hashes | None:
        """A copy of all block hashes, if the bits are of this version; else None."""
        with self._gate.unchanged():
            return self._whole().hashes.copy() if self.version == version else None

    def read_live(self, live: LiveBlocks | None) -> None:
        """Read the blocks of a replica on disk from the engine's memory first."""
        self._live = live
        if isinstance(self.replica, Layered):
            self.replica.live = live

    def end_loan(self) -> None:
        """No engine reads what `lend` gave any more: free its disk space until the next loan."""
        with self._gate.unchanged():
            self._files.empty_file()

    def lend(self, *, drafted: bool = False) -> Loan | None:
        """The bits for an engine to map; None while they are of no version. `drafted`: see `ReplicaFiles.lend`.

        Bits in memory change when the replica does. A replica on disk is copied to a file, which every call of this
        method updates, and nothing else does.
        """
        with self._gate.unchanged():
            replica, version = self.replica, self.version
            if replica is None or version is None:
                return None
            loan, wrong = self._files.lend(replica, version, drafted=drafted)
        self._recheck(wrong)
        return loan

    def write_checkpoint(self) -> VersionId | None:
        """Have a checkpoint of the present version on disk, and return the version. Raises `DiskFull`.

        None, and the caller tries again later, when there is no version, it is damaged, or a newer version had to wait
        for `CHECKPOINT_S`.
        """
        while self.audit():
            pass
        with self._checkpointing:
            return self._write_checkpoint()

    def replace_changed_base(self) -> Path | None:
        """If a restart would need the user's folder, and that has changed: write a checkpoint; the folder."""
        folder, replica = self._store.checkpoints.changed_folder, self.replica
        if self.version is None or folder is None:
            return None
        if self._live is not None and self.write_checkpoint() is not None:
            return folder  # the engine has the bits that the folder has lost
        if isinstance(replica, Layered):  # find all that is lost at once, so that one catch-up fetches it
            self._recheck([block for block in range(replica.layout.n_blocks) if replica.wrong(block)])
        return folder if self.write_checkpoint() is not None or self.version is None else None

    def _write_checkpoint(self) -> VersionId | None:
        try:
            with self._gate.unchanged():
                replica, version = self.replica, self.version
                if replica is None or version is None or (isinstance(replica, Replica) and self._unproven.any()):
                    return None
                if self._write_blocking(replica, version):
                    return version
        except WriterWaits:
            return None
        except Torn as error:
            self._recheck(error.blocks)
            return None
        return self._write_layered_checkpoint(replica) if isinstance(replica, Layered) else None

    def _write_blocking(self, replica: Replica | Layered, version: VersionId) -> bool:
        """Refer to the user's folder if it has these bits, else finish what a catch-up began, else write a replica in
        memory; no version is applied meanwhile. False, and nothing is done, for a replica on disk: that need not wait.
        """
        proven = self._base.proven
        if proven is not None and not self.spoiled and self._files.refer(replica, version, proven):
            return True
        if self._store.partial.holds(replica.layout) or (isinstance(replica, Replica) and replica.held is not None):
            self._files.finish_partial(replica, version, self._gate.give_way)
        elif isinstance(replica, Replica):
            self._files.write_checkpoint(replica, version, self._bits_unless_version_waits)
        else:
            return False
        self.spoiled = False
        return True

    def _write_layered_checkpoint(self, replica: Layered) -> VersionId | None:
        with self._gate.unchanged():
            frozen, version = replica.frozen(), self.version
        if version is None or self.replica is not replica:
            return None
        try:
            self._files.write_checkpoint(frozen, version, frozen.with_holes)
        except Torn as error:
            self._recheck(error.blocks)
            return None
        with self._gate.unchanged():
            self._files.rebase(replica, frozen, version)
        self.spoiled = False
        return version

    # ------------------------------------------------------------ within

    def _bits_unless_version_waits(self, name: str) -> Bits | Iterator[Bits | int]:
        """A tensor's bits, for a reader of all tensors that holds the write gate. Raises `WriterWaits`."""
        self._gate.give_way()
        replica = self._whole()
        return replica.bits(name) if name < "~" else with_holes(replica.layout, replica.hashes, name, replica.block)

    def _whole(self) -> Replica | Layered:
        if self.replica is None:
            raise RuntimeError("there is no replica yet")
        return self.replica

    def _decode(self, chunk: StoredChunk) -> StagedChunk:
        body = self._store.chunks.body(chunk.key)
        if body is None:
            raise Mismatch(f"chunk {tuple(chunk.key)} is not in the store")
        return self._whole().stage(chunk.header, body)

    def _recheck(self, blocks: Iterable[int]) -> None:
        """Hash blocks that may be damaged, by a disk or by memory. A damaged block gets its actual hash, so that a
        comparison with a hash list finds it, and the bits are no version any more."""
        replica, wrong = self._whole(), 0
        with self._gate.writing():
            for block in blocks:
                actual = actual_hash(replica, block)
                if actual != replica.hashes[block].tobytes():
                    replica.hashes[block] = np.frombuffer(actual, np.uint8)
                    self.version, wrong = None, wrong + 1
                self._unproven[block] = PROVEN
        if wrong:
            self.spoiled = True
            self.on_damage(wrong)

    def _staged_or_decoded(self, chunk: StoredChunk) -> StagedChunk | OwnChunk:
        return self._scratch.get(chunk.key) or self._decode(chunk)

    def _forget_version(self) -> None:
        self._labels.clear()
        self.version = None
        self._scratch.drop_up_to(None)
