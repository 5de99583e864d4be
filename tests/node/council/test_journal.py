"""What a machine of the council has on disk."""

from pathlib import Path

import pytest

from codec.errors import PeerError, UsageError
from node.council.changes import decode_change, encode_change
from node.council.journal import BALLOT_FILE, Journal
from node.ledger.book import Book
from swarm.protocol.council.events import Ballot
from swarm.protocol.council.messages import START, Entry, Position

HEAD = ("insert or replace into heads values (?, ?, ?)", (0, 1, b"root"))


def opened(home: Path) -> tuple[Journal, Book]:
    home.mkdir(exist_ok=True)
    book = Book(home / "ledger.sqlite")
    return Journal(home, book), book


def rows(book: Book) -> list:
    with book.transaction() as db:
        return db.execute("select * from heads").fetchall()


def entry(term: int, index: int, **change) -> Entry:
    return Entry(term, index, encode_change(**change))


def test_a_new_machine_has_nothing(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    assert journal.is_new
    assert (journal.ballot(), journal.last, journal.records()) == (Ballot(0, b""), START, {})


def test_the_ballot_outlives_the_process(tmp_path: Path) -> None:
    journal, book = opened(tmp_path)
    journal.save_ballot(Ballot(7, b"A" * 32))
    book.close()
    again, _ = opened(tmp_path)
    assert not again.is_new
    assert again.ballot() == Ballot(7, b"A" * 32)
    (tmp_path / BALLOT_FILE).write_bytes(b"[7")
    with pytest.raises(UsageError, match="may have voted"):
        again.ballot()


def test_entries_change_the_book_the_records_and_the_position_together(tmp_path: Path) -> None:
    journal, book = opened(tmp_path)
    journal.store([
        Entry(3, 1, b""),
        entry(3, 2, statements=[HEAD], records=[("boot", b"5"), ("grant/0", b"g")]),
        entry(3, 3, records=[("boot", b"6")], dropped=["grant/0"]),
    ])  # fmt: skip
    book.close()
    again, book = opened(tmp_path)
    assert again.last == Position(3, 3)
    assert again.records() == {"boot": b"6"}
    assert rows(book) == [(0, 1, b"root")]


@pytest.mark.parametrize(
    "sql",
    [
        "drop table heads",
        "attach database '/tmp/other.sqlite' as other",
        "pragma writable_schema = 1",
        "delete from council_position",
        "insert into council_records values ('boot', x'')",
        "create table more (name text)",
    ],
)
def test_an_entry_that_does_more_than_change_rows_is_refused_whole(tmp_path: Path, sql: str) -> None:
    journal, book = opened(tmp_path)
    journal.store([entry(1, 1, records=[("boot", b"1")])])
    with pytest.raises(PeerError):
        journal.store([entry(1, 2, statements=[HEAD, (sql, ())], records=[("boot", b"2")])])
    assert journal.last == Position(1, 1)
    assert journal.records() == {"boot": b"1"}
    assert rows(book) == []
    journal.store([entry(1, 2, statements=[HEAD])])
    assert rows(book) == [(0, 1, b"root")], "the authorizer is gone"


def test_a_snapshot_is_the_whole_state(tmp_path: Path) -> None:
    journal, book = opened(tmp_path / "one")
    journal.found({"ticket/1": b"t"})
    founded = journal.last
    assert founded.term == 0
    assert founded.index > 0
    journal.store([entry(1, founded.index + 1, statements=[HEAD])])
    last = journal.snapshot(tmp_path / "snapshot")
    assert last == journal.last
    other, other_book = opened(tmp_path / "two")
    other.save_ballot(Ballot(9, b"B" * 32))
    other.install(tmp_path / "snapshot", last)
    assert not (tmp_path / "snapshot").exists()
    assert (other.last, other.records(), rows(other_book)) == (last, {"ticket/1": b"t"}, rows(book))
    assert other.ballot() == Ballot(9, b"B" * 32), "a ballot is a machine's own"
    assert other_book.secret() == book.secret()
    other.store([entry(1, last.index + 1, records=[("boot", b"1")])])
    other_book.close()
    assert opened(tmp_path / "two")[0].last == Position(1, last.index + 1)


def test_a_snapshot_of_another_position_or_a_damaged_one_changes_nothing(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path / "one")
    journal.found({})
    last = journal.snapshot(tmp_path / "snapshot")
    other, _ = opened(tmp_path / "two")
    with pytest.raises(PeerError, match="another position"):
        other.install(tmp_path / "snapshot", Position(0, last.index + 1))
    (tmp_path / "noise").write_bytes(bytes(8192))
    with pytest.raises(PeerError):
        other.install(tmp_path / "noise", last)
    assert other.last == START


def test_two_that_found_a_council_do_not_look_alike(tmp_path: Path) -> None:
    one, two = opened(tmp_path / "one")[0], opened(tmp_path / "two")[0]
    one.found({})
    two.found({})
    assert one.last != two.last


@pytest.mark.parametrize(
    "body", [b"\x00", encode_change(statements=[HEAD])[:-1], b"\x93\x90\x90", b"\x91\x91\x92\xa1x\x91\x90"]
)
def test_a_malformed_change_is_refused(body: bytes) -> None:
    with pytest.raises(PeerError):
        decode_change(body)
