"""What a machine of the council has on disk: its ballot, and the replicated state with the position of its last entry.

The state is the ledger's book, with two tables more: the records of the seed's store, and the position. An entry
changes all of them in one transaction, so that a crash leaves a state that is the log up to exactly its position. A
snapshot is a copy of the book's file. The ballot is in a file of its own, which no snapshot replaces.
"""

import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from codec.errors import PeerError, UsageError
from node.council.changes import decode_change
from node.ledger.book import Book
from swarm.protocol.council.events import Ballot
from swarm.protocol.council.messages import START, Entry, Position
from swarm.store.disk import Disk

__all__ = ["BALLOT_FILE", "Journal"]

BALLOT_FILE: Final = "council.ballot"
_TABLES: Final = """
create table if not exists council_records (name text primary key, value blob not null) without rowid;
create table if not exists council_position (id integer primary key check (id = 1), term integer not null,
    place integer not null);
"""
_MAY: Final = frozenset(
    {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ,
     sqlite3.SQLITE_FUNCTION}
)  # fmt: skip
"""What the statements of an entry may do. The tables of SQLite itself and of the council are not theirs."""


class Journal:
    """The disk of one machine. All methods may block, and `snapshot` and `install` may take long."""

    def __init__(self, home: Path, book: Book, disk: Disk | None = None) -> None:
        """`book`: the open ledger of `home`. Raises `UsageError` when the ballot cannot be read."""
        self._book = book
        self._path = home / BALLOT_FILE
        self._disk = disk or Disk()
        with book.transaction() as db:
            for statement in _TABLES.split(";"):
                db.execute(statement)

    @property
    def is_new(self) -> bool:
        """Whether this machine has never been part of a council."""
        return not self._path.exists()

    def ballot(self) -> Ballot:
        """The ballot; an empty one before the first is saved. Raises `UsageError` when the file is damaged."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Ballot)
        except FileNotFoundError:
            return Ballot(0, b"")
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise UsageError(
                f"{self._path} cannot be read ({error}). This machine may have voted and cannot know for whom: give it "
                "another home, and put its new id into every machine's --council."
            ) from error

    def save_ballot(self, ballot: Ballot) -> None:
        """Durable on return."""
        self._disk.write_whole(self._path, msgspec.json.encode(ballot))

    @property
    def last(self) -> Position:
        """The position of the newest entry; `START` for a machine that has no state yet."""
        with self._book.transaction() as db:
            row = db.execute("select term, place from council_position").fetchone()
        return START if row is None else Position(*row)

    def found(self, records: Mapping[str, bytes]) -> None:
        """Make the book and these records the state that the council begins with. Its position is a random number, so
        that two machines that both found one do not take their states for the same."""
        self._book.secret()
        with self._book.transaction() as db:
            db.execute("delete from council_records")
            _put_records(db, list(records.items()))
            _put_position(db, Position(0, 1 + secrets.randbits(40)))

    def store(self, entries: Sequence[Entry]) -> None:
        """Apply entries and advance the position, all or none, durable on return. Raises `PeerError` for an entry that
        would do anything else."""
        changes = [decode_change(entry.body) for entry in entries]
        with self._book.transaction() as db:
            for change in changes:
                db.set_authorizer(_authorize)
                try:
                    for statement in change.statements:
                        db.execute(*statement)
                except sqlite3.DatabaseError as error:
                    if "authorized" in str(error) or "prohibited" in str(error):
                        raise PeerError(f"entry: {error}") from error
                    raise
                finally:
                    db.set_authorizer(None)
                db.executemany("delete from council_records where name = ?", [(name,) for name in change.dropped])
                _put_records(db, change.records)
            _put_position(db, entries[-1].position)

    def records(self) -> dict[str, bytes]:
        """The replicated records of the seed's store."""
        with self._book.transaction() as db:
            return dict(db.execute("select name, value from council_records").fetchall())

    def snapshot(self, path: Path) -> Position:
        """Write a copy of the state to a new file; its position."""
        self._book.copy_to(path)
        copy = sqlite3.connect(path)
        try:
            return Position(*copy.execute("select term, place from council_position").fetchone())
        finally:
            copy.close()

    def install(self, path: Path, last: Position) -> None:
        """Replace the state by a snapshot, all or none, and remove the file. Raises `PeerError` when the snapshot is
        damaged or not of this position."""
        try:
            copy = sqlite3.connect(path)
            try:
                row = copy.execute("select term, place from council_position").fetchone()
                sound = copy.execute("pragma quick_check").fetchone()[0] == "ok"
            finally:
                copy.close()
        except sqlite3.DatabaseError as error:
            raise PeerError(f"snapshot: {error}") from error
        if row is None or Position(*row) != last or not sound:
            raise PeerError("snapshot: damaged, or of another position")
        self._book.replace_by(path)
        path.unlink()


def _put_records(db: sqlite3.Connection, records: Sequence[tuple[str, bytes]]) -> None:
    db.executemany("insert or replace into council_records values (?, ?)", records)


def _put_position(db: sqlite3.Connection, last: Position) -> None:
    db.execute("insert or replace into council_position values (1, ?, ?)", last)


def _authorize(action: int, first: str | None, *_: str | None) -> int:
    changes_rows = action in (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE)
    if action not in _MAY or (changes_rows and (first or "").startswith(("sqlite_", "council_"))):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK
