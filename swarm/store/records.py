"""Small durable records in SQLite: those that the core persists, and the seals of versions.

The database uses a write-ahead log that is synced at every commit, and one writer at a time. So after `put` returns,
its records survive a power failure. The seal of an (epoch, version) is never replaced.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from codec import Manifest
from codec.errors import UsageError
from swarm.protocol.core.events import VersionId
from swarm.store.disk import Disk, DiskFull
from swarm.store.private import make_private

__all__ = ["Records", "Seal", "TwoSeals"]

FORMAT: Final = 1
"""`pragma user_version` of the file: the format of the whole home. Files of releases before it was written have 0, and
the same format."""
_SCHEMA = """
create table if not exists records (name text primary key, value blob not null) without rowid;
create table if not exists seals (
    epoch integer not null, version integer not null, attempt integer not null,
    root blob not null, parent_root blob not null, payload_bytes integer not null, manifest blob not null,
    primary key (epoch, version)) without rowid;
"""


LOG_PAGES: Final = 64
"""Pages of 4 KiB after which SQLite copies its write-ahead log into the database and begins the log anew
(https://sqlite.org/wal.html). SQLite's own number is 1000: the log would grow to 4 MiB in a swarm's first hundreds of
versions. One version writes some five pages. A transaction that needs more pages makes the log longer; it is cut when
the log begins anew."""
_PAGE_BYTES: Final = 4096

_LAST: Final = "\U0010ffff"
"""Sorts after every other character."""


class TwoSeals(UsageError):
    """The trainer's key has sealed one version twice with different contents."""


@dataclass(frozen=True, slots=True)
class Seal:
    """A sealed version. `manifest`: the signed bytes. `payload_bytes`: F, the bytes of its chunks."""

    id: VersionId
    attempt: int
    root: bytes
    parent_root: bytes
    payload_bytes: int
    manifest: bytes

    @classmethod
    def of(cls, manifest: Manifest, sealed: bytes) -> "Seal":
        """The record of a verified manifest. `sealed`: its signed bytes."""
        id_ = VersionId(manifest.epoch, manifest.version)
        return cls(id_, manifest.attempt, manifest.root, manifest.parent_root, manifest.payload_bytes, sealed)


class Records:
    """One database file. Safe to use from several threads; each call is one transaction."""

    def __init__(self, path: Path, disk: Disk) -> None:
        """Raises `UsageError` if the file is not such a database, is of a later format, or cannot be written."""
        self.log: Callable[[Sequence[tuple[str, bytes]], Sequence[str]], None] | None = None
        """Makes a change (records, names to drop) durable elsewhere before it is written here, or raises; None: nowhere
        else. A seal goes there as the record `seal`."""
        self._path = path
        self._disk = disk
        self._lock = threading.Lock()
        with disk.errors(path):
            make_private(path)
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)
        try:
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=full")
            self._db.execute(f"pragma wal_autocheckpoint={LOG_PAGES}")
            self._db.execute(f"pragma journal_size_limit={LOG_PAGES * _PAGE_BYTES}")
            (found,) = self._db.execute("pragma user_version").fetchone()
            if found > FORMAT:
                self._db.close()
                raise UsageError(
                    f"{path.parent} was written by a later version of swarm-node (format {found}; this one knows "
                    f"{FORMAT}). Install that version again, or use another folder (--home)."
                )
            self._db.executescript(_SCHEMA)
            if found < FORMAT:
                self._db.execute(f"pragma user_version = {FORMAT}")
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise UsageError(
                f"{path} cannot be read ({error}). On a node, move it away: the node fetches its contents again. "
                "On the seed, restore it from a backup."
            ) from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._disk.errors(self._path):
            try:
                self._db.execute("begin immediate")
                yield self._db
                self._disk.before("commit", self._path)
                self._db.execute("commit")
            except BaseException as error:
                if self._db.in_transaction:
                    self._db.execute("rollback")
                if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
                    raise DiskFull(
                        f"The disk that holds {self._path} is full. Free some space, then start again: "
                        "nothing is damaged."
                    ) from error
                raise

    def put(self, records: Iterable[tuple[str, bytes]], *, drop: Iterable[str] = ()) -> None:
        """Write all of these records, and forget those named `drop`, or do none of it. Durable on return.

        A later record of the same name wins.
        """
        records, drop = list(records), list(drop)
        if self.log is not None:
            self.log(records, drop)
        with self._writing() as db:
            db.executemany("delete from records where name = ?", [(name,) for name in drop])
            db.executemany("insert or replace into records values (?, ?)", records)

    def get(self, name: str) -> bytes | None:
        with self._lock:
            row = self._db.execute("select value from records where name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def all(self, prefix: str = "") -> dict[str, bytes]:
        """Every record whose name starts with `prefix`."""
        with self._lock:
            rows = self._db.execute(
                "select name, value from records where name >= ? and name < ? order by name", (prefix, prefix + _LAST)
            ).fetchall()
        return dict(rows)

    def add_seal(self, seal: Seal) -> None:
        """Write a seal, durable on return. Raises `TwoSeals` if the version is sealed with another root."""
        if self.log is not None and self.seal(seal.id) is None:
            self.log([("seal", seal.manifest)], ())
        with self._writing() as db:
            row = db.execute(
                "select root, manifest from seals where epoch = ? and version = ?", tuple(seal.id)
            ).fetchone()
            if row is not None and row[0] != seal.root:
                raise TwoSeals(
                    f"Version {seal.id} was sealed twice with different contents. Two trainers use one key: stop one "
                    "of them, and start the other with a new epoch."
                )
            if row is None:
                values = (*seal.id, seal.attempt, seal.root, seal.parent_root, seal.payload_bytes, seal.manifest)
                db.execute("insert into seals values (?, ?, ?, ?, ?, ?, ?)", values)

    def drop_seals(self, versions: Iterable[VersionId]) -> None:
        """Forget the seals of these versions."""
        with self._writing() as db:
            db.executemany("delete from seals where epoch = ? and version = ?", [tuple(id_) for id_ in versions])

    def seal(self, version: VersionId) -> Seal | None:
        found = self._seals("where epoch = ? and version = ?", tuple(version))
        return found[0] if found else None

    def sealed(self) -> list[VersionId]:
        """All sealed versions, oldest first."""
        with self._lock:
            rows = self._db.execute("select epoch, version from seals order by epoch, version").fetchall()
        return [VersionId(*row) for row in rows]

    def seals(self) -> list[Seal]:
        """All seals, oldest first."""
        return self._seals("order by epoch, version", ())

    def is_root(self, root: bytes) -> bool:
        """Whether a sealed version has this root."""
        return bool(self._seals("where root = ? limit 1", (root,)))

    def _seals(self, clause: str, values: tuple) -> list[Seal]:
        with self._lock:
            rows = self._db.execute(
                f"select epoch, version, attempt, root, parent_root, payload_bytes, manifest from seals {clause}",
                values,
            ).fetchall()
        return [Seal(VersionId(e, v), attempt, *rest) for e, v, attempt, *rest in rows]
