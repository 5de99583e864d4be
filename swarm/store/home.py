"""One swarm's folder: everything about it that must outlive the process.

    lock                 held while a process uses the folder
    swarm.sqlite         records of the core, seals of versions
    chunks/E.V.A         the chunks of attempt A at version E.V
    hashes/ROOT          the block hashes that add up to ROOT, 32 bytes each
    files/HASH           layouts, configs, tokenizers, by their BLAKE3
    anchors/E.V/         loadable checkpoints
    partial              blocks fetched by a catch-up that is not over
    replica              the replica, where memory is short and it is not an anchor and the chunks since: while it
                         catches up, and for an engine to load from
    clean.json           the last process ended as it should

A version counts as ours from the moment its seal is in the database, and its chunks are synced before that. What is
found on opening is verified or dropped, so a crash at any step leaves a folder that proves its newest version or
repairs it.
"""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec import Layout
from codec.errors import UsageError
from swarm.protocol.core.events import VersionId
from swarm.store.anchors import Anchor, Anchors
from swarm.store.chunks import ChunkStore
from swarm.store.clean import Clean
from swarm.store.disk import Disk
from swarm.store.partial import Partial
from swarm.store.records import Records, Seal

__all__ = ["Recovery", "Store", "drop_bits", "kept_checkpoint", "records_of"]

_FOLDERS = ("chunks", "hashes", "files", "anchors")
Hashes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Recovery:
    """The newest version that this folder can prove: load `anchor` (None: start from v = 0), then replay these."""

    anchor: Anchor | None
    replay: tuple[Seal, ...]


class Store:
    """An open home folder. `chunks`, `records`, `anchors`, `partial` and `clean` may be used directly. Safe to
    use from several threads."""

    def __init__(self, folder: Path, authority: bytes, disk: Disk | None = None) -> None:
        """Open or make it; verifies the chunks found, so call it off the loop when there may be many.

        Raises `UsageError` when another process holds the folder or the disk refuses.
        """
        self.folder = folder
        self.disk = disk or Disk()
        with self.disk.errors(folder / "lock"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in _FOLDERS:
                (folder / name).mkdir(exist_ok=True)
            self._lock = _take_lock(folder / "lock")
        try:
            for name in _FOLDERS:
                self.disk.remove_unfinished(folder / name)
            self.records = Records(folder / "swarm.sqlite", self.disk)
            self.chunks = ChunkStore(folder / "chunks", authority, self.disk)
            self.chunks.open()
            self.anchors = Anchors(folder / "anchors", self.disk)
            self.partial = Partial(folder, self.disk)
            self.clean = Clean(folder, self.disk)
            self._listing = threading.RLock()
            """Held while a hash list becomes a sealed version's, and while those of none are removed."""
            self._stray = {path.name for path in (folder / "hashes").iterdir()}
            """Hash lists that were here at the start: of those that no seal names by the next eviction, none ever will
            be."""
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Let the folder go. Nothing is lost by not calling it."""
        self.chunks.close()
        self.records.close()
        os.close(self._lock)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def replica_path(self) -> Path:
        """Where a replica goes that is not to be in memory."""
        return self.folder / "replica"

    # ------------------------------------------------------------ versions

    def seal(self, seal: Seal, hashes: Hashes | None = None) -> None:
        """From here on this version is ours whatever happens: its chunks are synced, then its seal is.

        `hashes`: its (n, 32) block hashes, which are kept first. Raises `TwoSeals` when another one with a different
        root stands, `DiskFull`.
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
        """Of all anchors, the one that leads furthest; and the sealed, whole versions that lead on from it."""
        best: Recovery | None = None
        for anchor in self.anchors.list():
            chain = self.chain(anchor.root, anchor.version)
            if best is None or _reach(anchor, chain) > _reach(best.anchor, best.replay):
                best = Recovery(anchor, chain)
        return best or Recovery(None, ())

    def chain(self, root: bytes, after: VersionId | None = None) -> tuple[Seal, ...]:
        """The sealed versions whose chunks are all here that lead on from `root`; the newest branch where it forks.

        `after`: the version that has this root. A way back gives an old root a new version, from which nothing older
        leads on.
        """
        following: dict[bytes, Seal] = {}
        for seal in self.records.seals():  # oldest first: the newest child of a root is the one that stays
            if self.whole(seal):
                following[seal.parent_root] = seal
        chain: list[Seal] = []
        while (seal := following.get(root)) is not None and (after is None or seal.id > after):
            chain.append(seal)
            root, after = seal.root, seal.id
        return tuple(chain)

    def whole(self, seal: Seal) -> bool:
        """Whether all the chunk bytes that this seal counts are here."""
        held = self.chunks.of(seal.id, seal.attempt)
        payload = sum(len(chunk.sealed_header) + chunk.body_bytes for chunk in held)
        return all(chunk.whole for chunk in held) and payload == seal.payload_bytes

    def evict(self, newest: VersionId, keep: int) -> list[VersionId]:
        """Drop the chunks and hash lists of all but the last `keep` sealed versions, and what was never sealed up to
        `newest`. What leads on from the newest anchor stays, and so does every seal. Which versions went.
        """
        seals = self.records.sealed()
        anchors = self.anchors.list()
        needed = set(seals[-keep:]) | {id_ for id_ in seals if anchors and id_ > anchors[0].version}
        held = {VersionId(chunk.key.epoch, chunk.key.version) for chunk in self.chunks.all()}
        gone = sorted(id_ for id_ in held if id_ <= newest and id_ not in needed)
        for id_ in gone:
            self.chunks.drop(id_)
        self._evict_hashes(needed)
        return gone

    # ------------------------------------------------------------ hash lists

    def _evict_hashes(self, needed: set[VersionId]) -> None:
        """Drop the lists of sealed versions that are not needed. One whose seal is still to come is let be."""
        with self._listing:
            listed = {seal.root.hex() for id_ in needed if (seal := self.records.seal(id_)) is not None}
            for name in {path.name for path in (self.folder / "hashes").iterdir()} - listed:
                if name in self._stray or (len(name) == 64 and self.records.is_root(bytes.fromhex(name))):
                    self.disk.remove(self.folder / "hashes" / name)
            self._stray.clear()

    def put_hashes(self, root: bytes, hashes: Hashes) -> None:
        """Keep the (n, 32) block hashes that add up to `root`; the caller has checked that they do."""
        with self._listing:
            self.disk.write_whole(self._hashes(root), np.ascontiguousarray(hashes).tobytes())

    def hashes(self, root: bytes) -> Hashes | None:
        """The (n, 32) block hashes of `root`, if they are here. Check them against the root before use."""
        try:
            data = self._hashes(root).read_bytes()
        except FileNotFoundError:
            return None
        return np.frombuffer(data, np.uint8).reshape(-1, 32) if len(data) % 32 == 0 else None

    def hashes_path(self, root: bytes) -> Path | None:
        path = self._hashes(root)
        return path if path.exists() else None

    # ------------------------------------------------------------ files

    def put_file(self, data: bytes) -> bytes:
        """Keep these bytes under their hash, which is returned. What lies there damaged is replaced."""
        name = blake3(data).digest()
        if self.file(name) is None:
            self.disk.write_whole(self.folder / "files" / name.hex(), data)
        return name

    def file(self, name: bytes) -> bytes | None:
        """The bytes whose BLAKE3 is `name`; None when they are not here, or not what they were."""
        path = self.file_path(name)
        data = None if path is None else path.read_bytes()
        return data if data is not None and blake3(data).digest() == name else None

    def lacking(self, layout: Layout, folder: Path | None) -> tuple[bytes, ...]:
        """The hashes of the layout's files that are not here, after taking what the user's `folder` has."""
        lacking = [spec for spec in layout.files if self.file(spec.hash) is None]
        for spec in lacking if folder is not None and folder.is_dir() else ():
            assert folder is not None
            path = folder / spec.name  # a plain file name: the layout was checked
            if path.is_file() and path.stat().st_size == spec.size:
                data = path.read_bytes()
                if blake3(data).digest() == spec.hash:
                    self.put_file(data)
        return tuple(spec.hash for spec in lacking if self.file(spec.hash) is None)

    def file_path(self, name: bytes) -> Path | None:
        path = self.folder / "files" / name.hex()
        return path if path.exists() else None

    def write_anchor(self, version: VersionId, root: bytes, layout: bytes, fill: Callable[[Path], None]) -> None:
        """Write a checkpoint; see `Anchors.write`."""
        self.anchors.write(version, root, layout, fill)

    def _hashes(self, root: bytes) -> Path:
        return self.folder / "hashes" / root.hex()


@contextmanager
def records_of(folder: Path) -> Iterator[Records]:
    """The records of a home that no process uses: its lock is held meanwhile, and chunks are not looked at.

    Raises `UsageError` when a process uses the folder, or it is not there.
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
    """The newest checkpoint in a home, whole on disk; None when there is none."""
    anchors = Anchors(folder / "anchors", Disk()).list() if (folder / "anchors").is_dir() else []
    return next((anchor.folder for anchor in anchors if anchor.trusted), None)


def drop_bits(folder: Path) -> None:
    """Remove from a home that no process uses all but its records: the model is kept elsewhere by now."""
    disk = Disk()
    with records_of(folder):
        for name in (*_FOLDERS, "partial", "partial.list", "replica"):
            if (folder / name).exists():
                disk.remove(folder / name)


def _take_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError(
            f"Another process uses {path.parent}. Stop it first, or set SWARM_HOME to another folder."
        ) from error
    return descriptor


def _reach(anchor: Anchor | None, chain: tuple[Seal, ...]) -> tuple[VersionId, bool, int]:
    """How far a recovery leads; among equals a trusted anchor first, then the one with less to replay."""
    if chain:
        return chain[-1].id, anchor is not None and anchor.trusted, -len(chain)
    return (anchor.version if anchor else VersionId(0, 0)), anchor is not None and anchor.trusted, 0
