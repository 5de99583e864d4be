"""Databases are readable only by their owner, regardless of the folder and of earlier modes."""

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from codec.errors import UsageError
from node.ledger.book import Book
from node.settings.contact import Contact
from swarm.store.disk import Disk
from swarm.store.private import close_to_others
from swarm.store.records import Records


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Path]:
    """A folder with mode 0777, and a process with umask 0."""
    before = os.umask(0)
    folder = tmp_path / "wide"
    folder.mkdir()
    folder.chmod(0o777)
    yield folder
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


def test_new_files_are_private(wide: Path) -> None:
    book, records = Book(wide / "ledger.sqlite"), Records(wide / "swarm.sqlite", Disk())
    records.put([("a", b"b")])
    Disk().write_whole(wide / "clean.json", b"{}")
    (wide / "contact.json.new").touch(0o666)
    Contact(bytes(32), ("/ip4/127.0.0.1/tcp/1",), "wan").write(wide)
    assert {"ledger.sqlite", "ledger.sqlite-wal", "swarm.sqlite", "swarm.sqlite-wal", "contact.json"} <= set(
        modes(wide)
    )
    assert set(modes(wide).values()) == {0o600}
    book.close()
    records.close()


def test_a_readable_file_is_made_private_with_a_warning(wide: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = wide / "ledger.sqlite"
    kept = sqlite3.connect(path)
    kept.execute("pragma journal_mode = wal")
    kept.execute("create table mine (x)")
    assert len(modes(wide)) == 3
    assert all(mode & 0o044 for mode in modes(wide).values())
    Book(path).close()
    assert modes(wide)["ledger.sqlite"] == 0o600
    assert [name for name, mode in modes(wide).items() if mode & 0o077] == []
    assert caplog.text.count("ledger.sqlite could be read by other users") == 1
    caplog.clear()
    Book(path).close()
    assert caplog.text == ""
    kept.close()


def test_missing_files_and_those_of_others_are_not_changed(wide: Path) -> None:
    assert not close_to_others(wide / "nothing")
    assert list(wide.iterdir()) == []


def test_a_ledger_that_cannot_be_created_raises(wide: Path) -> None:
    with pytest.raises(UsageError, match="Cannot open the ledger"):
        Book(wide / "no folder" / "ledger.sqlite")
