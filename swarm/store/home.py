"""The folder of one swarm: all its state that must outlive the process.

    lock                 locked while a process uses the folder
    swarm.sqlite         records of the core, seals of versions
    chunks/E.V.A         the chunks of attempt A at version E.V
    hashes/ROOT          the block hashes of which ROOT is the root, 32 bytes each
    files/HASH           layouts, configs, tokenizers, named by their BLAKE3
    anchors/E.V/         checkpoints of the replica, or what refers to one in a folder of the user
    partial.files/       a checkpoint that an unfinished catch-up writes
    partial.blocks       the numbers of the blocks in it (`swarm.store.partial`)
    state/               fragments of the trainer's saved states (`node.saved.folder`)
    replica              the replica as a file, on hosts with little memory: during a catch-up, and for an engine to
                         load from; at other times such a host uses a checkpoint and the chunks since (`codec.layered`)
    clean.json           the record of a clean exit

The process has a version once its seal is in the database; the version's chunks are synced before that. Opening
verifies what it finds and ignores what does not verify. So a crash at any step leaves a folder that proves its newest
version, or from which the node can repair it.
"""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blake3 import blake3

from codec import Layout
from codec.errors import UsageError
from swarm.protocol.core.events import VersionId
from swarm.store.checkpoints import SavedCheckpoint, SavedCheckpoints
from swarm.store.chunks import ChunkStore
from swarm.store.clean import Clean
from swarm.store.disk import Disk
from swarm.store.partial import NAMES as PARTIAL_NAMES
from swarm.store.partial import Partial
from swarm.store.records import Records, Seal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint8]

__all__ = ["Recovery", "Store", "drop_bits", "kept_checkpoint", "records_of"]

_FOLDERS = ("chunks", "hashes", "files", "anchors")
SEALS_KEPT: Final = 1024
"""Seals of the newest versions that stay on disk: as many as the runtime keeps in memory (`Manifests`)."""
_SEALS_AT_ONCE: Final = 64
"""Old seals are dropped when there are so many, so that not every version writes to the database once more."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How to reach the newest version that the folder can prove: load `checkpoint` (None: version 0), then replay
    these."""

    checkpoint: SavedCheckpoint | None
    replay: tuple[Seal, ...]


class Store:
    """An open home folder. Safe to use from several threads.

    `chunks`, `records`, `checkpoints`, `partial` and `clean` may be used directly.
    """

    def __init__(
        self,
        folder: Path,
        authority: bytes,
        disk: Disk | None = None,
        *,
        checkpoints_kept: int = 1,
        beside: bool = False,
    ) -> None:
        """Open or create the folder. It verifies all chunks found, so call it in a worker thread.

        `beside`: only read, beside the process that uses the folder. What that process drops meanwhile is missing here.

        Raises `UsageError` if another process uses the folder, or it cannot be written.
        """
        self.folder = folder
        self.disk = disk or Disk()
        if beside:
            if not (folder / "lock").exists():
                raise UsageError(f"{folder.parent} holds nothing of this swarm. Name a folder that does with --home.")
            self._lock = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
        else:
            with self.disk.errors(folder / "lock"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                for name in _FOLDERS:
                    (folder / name).mkdir(exist_ok=True)
                self._lock = _take_lock(folder / "lock")
        try:
            for name in () if beside else _FOLDERS:
                self.disk.remove_unfinished(folder / name)
            self.records = Records(folder / "swarm.sqlite", self.disk)
            self.chunks = ChunkStore(folder / "chunks", authority, self.disk)
            self.chunks.open()
            self.checkpoints = SavedCheckpoints(folder / "anchors", self.disk, checkpoints_kept)
            self.partial = Partial(folder, self.disk)
            self.clean = Clean(folder, self.disk)
            self._listing = threading.RLock()
            """Held from storing a hash list until its version is sealed, and while unused hash lists are removed."""
            self._stray = {path.name for path in (folder / "hashes").iterdir()}
            """Hash lists found on opening. If no seal names one by the next eviction, none ever will."""
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Close the files and release the lock. Nothing is lost if it is not called."""
        self.chunks.close()
        self.records.close()
        os.close(self._lock)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def replica_path(self) -> Path:
        """The path of a replica that is kept in a file."""
        return self.folder / "replica"

    # ------------------------------------------------------------ versions

    def seal(self, seal: Seal, hashes: "Hashes | None" = None) -> None:
        """Make a version durable: store its hash list, sync its chunks, then record its seal.

        `hashes`: the version's block hashes, uint8 (n_blocks, 32). Raises `TwoSeals` if the version is already sealed
        with another root, `DiskFull`.
        """
        with self._listing:
            if hashes is not None:
                self.put_hashes(seal.root, hashes)
            self.chunks.sync(seal.id, seal.attempt)
            self.records.add_seal(seal)

    def newest(self) -> Seal | None:
        """The newest sealed version."""
        sealed = self.records.sealed()
        return self.records.seal(sealed[-1]) if sealed else None

    def recover(self) -> Recovery:
        """The checkpoint from which replay leads to the newest version, and the sealed, complete versions to replay."""
        best: Recovery | None = None
        for checkpoint in self.checkpoints.list():
            chain = self.chain(checkpoint.root, checkpoint.version)
            if best is None or _reach(checkpoint, chain) > _reach(best.checkpoint, best.replay):
                best = Recovery(checkpoint, chain)
        return best or Recovery(None, ())

    def chain(self, root: bytes, after: VersionId | None = None) -> tuple[Seal, ...]:
        """The sealed versions, with all chunks stored, that follow `root`; the newest branch at each fork.

        `after`: the version that has this root. A rollback gives an old root a new version, so the versions that
        followed the root before must not count.
        """
        following: dict[bytes, Seal] = {}
        for seal in self.records.seals():  # oldest first, so that the newest child of a root wins
            if self.whole(seal):
                following[seal.parent_root] = seal
        chain: list[Seal] = []
        while (seal := following.get(root)) is not None and (after is None or seal.id > after):
            chain.append(seal)
            root, after = seal.root, seal.id
        return tuple(chain)

    def whole(self, seal: Seal) -> bool:
        """Whether all chunks of a sealed version are stored, of some perhaps the header only, by the byte count of the
        seal."""
        held = self.chunks.of(seal.id, seal.attempt)
        payload = sum(len(chunk.sealed_header) + chunk.body_bytes for chunk in held)
        return all(chunk.whole or chunk.bodiless for chunk in held) and payload == seal.payload_bytes

    def evict(self, newest: VersionId, keep: int) -> list[VersionId]:
        """Drop the chunks and hash lists of old versions; returns the versions dropped.

        Dropped are the chunks of versions up to `newest`, sealed or not. The last `keep` sealed versions, and those
        after the newest checkpoint, are kept. Old seals are dropped too (`_evict_seals`).
        """
        seals = self.records.sealed()
        checkpoints = self.checkpoints.list()
        if checkpoints:
            self._evict_seals(seals, checkpoints[-1].version)
        needed = set(seals[-keep:]) | {id_ for id_ in seals if checkpoints and id_ > checkpoints[0].version}
        held = {VersionId(chunk.key.epoch, chunk.key.version) for chunk in self.chunks.all()}
        gone = sorted(id_ for id_ in held if id_ <= newest and id_ not in needed)
        for id_ in gone:
            self.chunks.drop(id_)
        self._evict_hashes(needed | {saved.version for saved in checkpoints})
        return gone

    def _evict_seals(self, seals: list[VersionId], checkpoint: VersionId) -> None:
        """Drop old seals of versions before the oldest checkpoint, to which nothing leads any more. `seals`: of all
        versions, oldest first. The first one stays: it says what the base checkpoint is."""
        if len(seals) >= SEALS_KEPT + _SEALS_AT_ONCE:
            gone = [id_ for id_ in seals[1:-SEALS_KEPT] if id_ < checkpoint]
            if gone:
                self.records.drop_seals(gone)

    # ------------------------------------------------------------ hash lists

    def _evict_hashes(self, needed: set[VersionId]) -> None:
        """Drop the hash lists of sealed versions that are not needed, but not those of versions not sealed yet."""
        with self._listing:
            listed = {seal.root.hex() for id_ in needed if (seal := self.records.seal(id_)) is not None}
            for name in {path.name for path in (self.folder / "hashes").iterdir()} - listed:
                if name in self._stray or (len(name) == 64 and self.records.is_root(bytes.fromhex(name))):
                    self.disk.remove(self.folder / "hashes" / name)
            self._stray.clear()

    def put_hashes(self, root: bytes, hashes: "Hashes") -> None:
        """Store the block hashes, uint8 (n, 32), of `root`. The caller must have checked that `root` is theirs."""
        import numpy as np  # a relay's store has no hashes

        with self._listing:
            self.disk.write_whole(self._hashes(root), np.ascontiguousarray(hashes).tobytes())

    def hashes(self, root: bytes) -> "Hashes | None":
        """The block hashes of `root`, uint8 (n, 32), if stored. Check them against the root before use."""
        import numpy as np

        try:
            data = self._hashes(root).read_bytes()
        except FileNotFoundError:
            return None
        return np.frombuffer(data, np.uint8).reshape(-1, 32) if len(data) % 32 == 0 else None

    # ------------------------------------------------------------ files

    def put_file(self, data: bytes) -> bytes:
        """Store bytes under their BLAKE3 hash, which is returned. A damaged file there is replaced."""
        name = blake3(data).digest()
        if self.file(name) is None:
            self.disk.write_whole(self.folder / "files" / name.hex(), data)
        return name

    def file(self, name: bytes) -> bytes | None:
        """The bytes whose BLAKE3 is `name`; None if they are not stored, or damaged."""
        path = self.file_path(name)
        data = None if path is None else path.read_bytes()
        return data if data is not None and blake3(data).digest() == name else None

    def lacking(self, layout: Layout, folder: Path | None) -> tuple[bytes, ...]:
        """The hashes of the layout's files that are not stored, after copying those that `folder` has."""
        lacking = [spec for spec in layout.files if self.file(spec.hash) is None]
        for spec in lacking if folder is not None and folder.is_dir() else ():
            assert folder is not None
            path = folder / spec.name  # safe: a layout has only plain file names
            if path.is_file() and path.stat().st_size == spec.size:
                data = path.read_bytes()
                if blake3(data).digest() == spec.hash:
                    self.put_file(data)
        return tuple(spec.hash for spec in lacking if self.file(spec.hash) is None)

    def file_path(self, name: bytes) -> Path | None:
        path = self.folder / "files" / name.hex()
        return path if path.exists() else None

    def write_checkpoint(self, version: VersionId, root: bytes, layout: bytes, fill: Callable[[Path], None]) -> None:
        """Write a checkpoint; see `SavedCheckpoints.write`."""
        self.checkpoints.write(version, root, layout, fill)

    def _hashes(self, root: bytes) -> Path:
        return self.folder / "hashes" / root.hex()


@contextmanager
def records_of(folder: Path) -> Iterator[Records]:
    """Open only the records of a home, for `with`; the home is locked meanwhile.

    Raises `UsageError` if a process uses the folder, or it does not exist.
    """
    disk = Disk()
    if not folder.is_dir():
        raise UsageError(f"{folder.parent} holds nothing of this seed's swarm. Name the seed's folder with --home.")
    with disk.errors(folder / "lock"):
        lock = _take_lock(folder / "lock")
    try:
        records = Records(folder / "swarm.sqlite", disk)
        try:
            yield records
        finally:
            records.close()
    finally:
        os.close(lock)


def kept_checkpoint(folder: Path) -> Path | None:
    """The folder of the newest checkpoint in a home whose files have not changed; None if there is none."""
    checkpoints = SavedCheckpoints(folder / "anchors", Disk()).list() if (folder / "anchors").is_dir() else []
    return next((saved.folder for saved in checkpoints if saved.trusted), None)


def drop_bits(folder: Path) -> None:
    """Remove all but the records from a home that no process uses, once the model is kept elsewhere."""
    disk = Disk()
    with records_of(folder):
        for name in (*_FOLDERS, *PARTIAL_NAMES, "replica", "state"):
            if (folder / name).exists():
                disk.remove(folder / name)


def _take_lock(path: Path) -> int:
    """Lock the file; the lock ends with the descriptor. Raises `UsageError` if another process holds it."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError(
            f"Another process uses {path.parent}. Stop it first, or set SWARM_HOME to another folder."
        ) from error
    return descriptor


def _reach(checkpoint: SavedCheckpoint | None, chain: tuple[Seal, ...]) -> tuple[VersionId, bool, int]:
    """A sort key: the version that a recovery reaches, then whether its checkpoint is trusted, then less to replay."""
    if chain:
        return chain[-1].id, checkpoint is not None and checkpoint.trusted, -len(chain)
    return (checkpoint.version if checkpoint else VersionId(0, 0)), checkpoint is not None and checkpoint.trusted, 0
