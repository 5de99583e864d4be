"""Files of the trainer that every machine of the council has: its optimizer's state, for example.

`SWARM_HOME/kept/NAME/DIGEST` has the bytes whose BLAKE3 is DIGEST. Which of them counts is a record of the council's
log (`kept/NAME`), established once a majority has the bytes.
"""

import contextlib
import os
import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from blake3 import blake3

from codec.errors import PeerError, UsageError
from codec.unpack import unpack
from node.ledger.book import LEDGER
from swarm.store.disk import Disk

__all__ = ["KEEP_REQUEST", "KEPT", "Kept", "KeptFiles", "check_name", "established", "kept_in"]

KEPT: Final = "kept/"
"""How the names of its records begin."""
KEEP_REQUEST: Final = "kept.request"
"""In the home: a file in `kept` that the seed there is to have every machine take. Removed when it is established."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PART_BYTES: Final = 1 << 20


class Kept(NamedTuple):
    """One file. `digest`: its BLAKE3, 32 bytes."""

    name: str
    digest: bytes
    size: int

    def record(self) -> tuple[str, bytes]:
        """The record of the log that says that it counts."""
        return KEPT + self.name, msgspec.msgpack.encode((self.digest, self.size))


_decoder = msgspec.msgpack.Decoder(tuple[bytes, int])


def kept_in(records: Mapping[str, bytes]) -> list[Kept]:
    """The files that count by these records. Raises `PeerError` for a malformed one."""
    found = []
    for key, value in records.items():
        if key.startswith(KEPT) and value:
            found.append(Kept(check_name(key.removeprefix(KEPT)), *unpack(_decoder, value, "kept file")))
    return found


def established(home: Path) -> list[Kept]:
    """The files that count, as the journal in `home` says; empty without one. Reads beside the process of the home."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{home / LEDGER}?mode=ro", uri=True)) as db:
            rows = db.execute("select name, value from council_records where name like 'kept/%'").fetchall()
    except sqlite3.OperationalError:
        return []
    return sorted(kept_in(dict(rows)))


def check_name(name: str) -> str:
    """The name, if it is one. Raises `PeerError`."""
    if _NAME.fullmatch(name) is None:
        raise PeerError(f"kept file: {name[:80]!r} is no name of letters, digits, dots, dashes and underscores")
    return name


class KeptFiles:
    """The folder `kept` of a home. All methods may block."""

    def __init__(self, home: Path, disk: Disk | None = None) -> None:
        self._folder = home / "kept"
        self._disk = disk or Disk()

    def path(self, kept: Kept) -> Path:
        """Where the bytes are, if they are here."""
        return self._folder / check_name(kept.name) / kept.digest.hex()

    def has(self, kept: Kept) -> bool:
        """Whether the bytes are here; they were verified when they came."""
        try:
            return self.path(kept).stat().st_size == kept.size
        except FileNotFoundError:
            return False

    def add(self, source: Path, name: str) -> Kept:
        """Copy a file into the folder, durably. Raises `UsageError` when it cannot be read or written."""
        folder = self._folder / check_name(name)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary, digest, size = folder / ".new", blake3(), 0
        try:
            with open(source, "rb") as file, open(temporary, "wb", opener=_private) as out:
                while part := file.read(_PART_BYTES):
                    digest.update(part)
                    size += len(part)
                    out.write(part)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UsageError(f"Cannot copy {source} to {folder}: {error.strerror}.") from error
        kept = Kept(name, digest.digest(), size)
        self._disk.sync_file(temporary)
        self._disk.put_in_place(temporary, self.path(kept))
        return kept

    def take(self, kept: Kept, file: Path) -> None:
        """Take a file that came from the leader. Raises `PeerError` when it has other bytes."""
        digest = blake3()
        with open(file, "rb") as source:
            while part := source.read(_PART_BYTES):
                digest.update(part)
        if digest.digest() != kept.digest or file.stat().st_size != kept.size:
            raise PeerError(f"kept file: {kept.name} came with other bytes")
        self.path(kept).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._disk.sync_file(file)
        self._disk.put_in_place(file, self.path(kept))

    def copy_out(self, kept: Kept, out: Path) -> None:
        """Copy the bytes to the new file `out`, and verify them. Raises `UsageError`."""
        if not self.has(kept):
            raise UsageError(f"{kept.name} is not on this machine yet: it comes from the machine that leads.")
        digest = blake3()
        try:
            with open(self.path(kept), "rb") as file, open(out, "xb", opener=_private) as to:
                while part := file.read(_PART_BYTES):
                    digest.update(part)
                    to.write(part)
        except OSError as error:
            raise UsageError(f"Cannot write {out}: {error.strerror}.") from error
        if digest.digest() != kept.digest:
            out.unlink()
            raise UsageError(f"{self.path(kept)} is damaged: take it from another machine of the council.")

    def forget_older(self, kept: Kept) -> None:
        """Remove what this file replaces."""
        for path in self.path(kept).parent.iterdir():
            if path.name != kept.digest.hex():
                path.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
