"""What the book stores, what a crash at any statement leaves, and how a restart continues from there."""

import sqlite3
from pathlib import Path

import msgspec
import pytest
from ledger_kit import (
    ALICE,
    BOB,
    CAROL,
    DAVE,
    PROMPT,
    SAMPLING,
    ask,
    check_places,
    draw,
    group_id,
    head,
    ledger_at,
    submit,
)

from codec.errors import UsageError
from node.ledger.binding import Binding, KeyTaken
from node.ledger.book import Book
from node.ledger.facts import Bound, Dropped
from node.ledger.messages import Reason
from node.ledger.rules import Ledger
from node.ledger.settings import Settings


def assert_same(a: Ledger, b: Ledger) -> None:
    """Check that all durable state is equal."""
    assert {
        g.id: (g.session, g.order, g.prompt, g.n, g.sampling, g.free, g.leased, g.done) for g in a.groups.values()
    } == {g.id: (g.session, g.order, g.prompt, g.n, g.sampling, g.free, g.leased, g.done) for g in b.groups.values()}
    assert {x.id: (x.token, x.node, x.group, x.samples, x.minimum, x.open) for x in a.leases.values()} == {
        x.id: (x.token, x.node, x.group, x.samples, x.minimum, x.open) for x in b.leases.values()
    }
    assert a.table.next_id == b.table.next_id
    assert a.roots == b.roots
    aside = [
        {key: node.reputation.penalty.why for key, node in x.nodes.items() if node.reputation.penalty} for x in (a, b)
    ]
    assert aside[0] == aside[1]


def busy_ledger(book: Book) -> Ledger:
    """A ledger with a sample in each state: free, leased, done, ready, taken, dropped, requeued and discarded; one node
    is in quarantine, and one was released."""
    ledger = ledger_at(groups=6, n=2)
    ledger.drop(group_id(5))
    leases = ledger.request_work(ALICE, ask(6), 0.0)
    for lease in leases[:2]:
        for sample in lease.samples:
            submit(ledger, lease, draw(lease, sample), 1.0)
    ledger.taken(ledger.hand_over("s").id, 0.0)
    other = ledger.request_work(BOB, ask(2), 1.0)
    submit(ledger, other[0], draw(other[0], other[0].samples[0], 2), 2.0)
    ledger.give_back(ALICE, [leases[2].id], 2.0)
    book.write(ledger.take_facts())
    ledger.quarantine.quarantine(CAROL, "it lied", None, 2.0)
    ledger.quarantine.quarantine(DAVE, "it was slow", 9.0, 2.0)
    ledger.quarantine.release(DAVE, "by hand")
    book.write(ledger.take_facts())
    ledger.advance(head(4))
    book.write(ledger.take_facts())
    return ledger


def test_a_restart_restores_everything(tmp_path: Path):
    book = Book(tmp_path / "ledger.sqlite")
    ledger = busy_ledger(book)
    book.close()
    book = Book(tmp_path / "ledger.sqlite")
    again = book.restore(ledger.settings, ledger.head, now=1000.0)
    assert_same(again, ledger)
    check_places(again)
    assert all(lease.deadline == 1000.0 + lease.duration_s for lease in again.leases.values())
    assert book.counts() == {"groups": 5, "leases": 4, "rollouts": 4, "requeues": 2}


def test_a_node_that_worked_during_the_restart_delivers(tmp_path: Path):
    book = Book(tmp_path / "ledger.sqlite")
    ledger = ledger_at(n=2)
    (lease,) = ledger.request_work(ALICE, ask(2), 0.0)
    submit(ledger, lease, draw(lease, 0), 1.0)
    book.write(ledger.take_facts())
    again = book.restore(ledger.settings, ledger.head, now=5.0)
    assert submit(again, lease, draw(lease, 1), 6.0) is Reason.NOT_A_MEMBER
    again.member_up(ALICE)
    assert submit(again, lease, draw(lease, 1), 6.0) is None
    book.write(again.take_facts())
    assert again.hand_over("s").complete
    (row,) = sqlite3.connect(tmp_path / "ledger.sqlite").execute("select count(*) from rollouts").fetchall()
    assert row == (2,)


def test_fencing_tokens_are_never_granted_twice(tmp_path: Path):
    book = Book(tmp_path / "ledger.sqlite")
    ledger = ledger_at(n=2)
    (lease,) = ledger.request_work(ALICE, ask(2), 0.0)
    ledger.drop(group_id(0))
    book.write(ledger.take_facts())
    book.prune()
    assert book.counts()["leases"] == 0
    assert book.restore(ledger.settings, ledger.head, 0.0).table.next_id > lease.token


def test_the_swarms_head_may_be_newer_than_the_book(tmp_path: Path):
    book = Book(tmp_path / "ledger.sqlite")
    ledger = ledger_at(n=1)
    (lease,) = ledger.request_work(ALICE, ask(1), 0.0)
    submit(ledger, lease, draw(lease, 0, 3), 1.0)
    book.write(ledger.take_facts())
    again = book.restore(ledger.settings, head(5), 0.0)
    assert again.hand_over("s") is None
    assert again.groups[group_id(0)].free == {0}
    book.write(again.take_facts())
    assert book.counts()["rollouts"] == 0
    assert_same(book.restore(ledger.settings, head(5), 0.0), again)


def test_a_taken_group_can_be_recalled(tmp_path: Path):
    book = Book(tmp_path / "ledger.sqlite")
    ledger = ledger_at(n=1)
    (lease,) = ledger.request_work(ALICE, ask(1), 0.0)
    submit(ledger, lease, draw(lease, 0), 1.0)
    assert book.recall(group_id(0)) is None
    group = ledger.hand_over("s")
    ledger.taken(group.id, 0.0)
    assert not book.was_taken(group.id), "only after it is written"
    book.write(ledger.take_facts())
    assert book.was_taken(group.id)
    found = book.recall(group_id(0))
    assert found.done == group.done
    assert book.recall(group_id(0)) is None, "it is no longer taken"
    ledger.adopt(found)
    assert ledger.hand_over("s") is found


class DyingConnection:
    """A connection that fails from its `after`-th statement on, as in a killed process: nothing later reaches the
    file."""

    def __init__(self, db: sqlite3.Connection, after: int) -> None:
        self._db, self.left = db, after

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def execute(self, *args):
        self._count()
        return self._db.execute(*args)

    def executemany(self, *args):
        self._count()
        return self._db.executemany(*args)


def test_a_crash_between_any_two_statements_leaves_all_or_nothing(tmp_path: Path):
    """Kills the process before each statement of a busy run: the file then equals a state after complete writes."""
    writes = []
    recorder = Book(tmp_path / "recorder.sqlite")
    plain = recorder.write
    recorder.write = lambda facts: (writes.append(list(facts)), plain(writes[-1]))
    ledger = busy_ledger(recorder)
    references = []
    for sent in range(len(writes) + 1):
        book = Book(tmp_path / f"reference-{sent}.sqlite")
        for facts in writes[:sent]:
            book.write(facts)
        references.append(book.restore(Settings(), head(4), 0.0))
    step, finished = 0, False
    while not finished:
        path = tmp_path / f"{step}.sqlite"
        book = Book(path)
        db = book._db
        db.execute("pragma synchronous = off")  # only the process dies, not the machine
        book._db = DyingConnection(db, step)
        written = 0
        try:
            for facts in writes:
                book.write(facts)
                written += 1
            finished = True
        except KeyboardInterrupt:
            pass
        db.close()
        left = Book(path)
        assert_same(left.restore(Settings(), head(4), 0.0), references[written])
        left.close()
        step += 1
    assert step > 30
    assert written == len(writes) == 3
    assert_same(Book(tmp_path / f"{step - 1}.sqlite").restore(ledger.settings, ledger.head, 0.0), ledger)


def test_a_book_of_the_first_format_is_upgraded(tmp_path: Path):
    old = sqlite3.connect(tmp_path / "old.sqlite")
    old.executescript(
        "create table groups (id blob primary key, session text not null, ord integer not null, prompt blob not null, "
        "n integer not null, sampling blob not null, taken integer not null default 0); pragma user_version = 1;"
    )
    fields = (group_id(7), "s", 3, PROMPT, 2, msgspec.msgpack.encode(SAMPLING))
    old.execute("insert into groups (id, session, ord, prompt, n, sampling) values (?, ?, ?, ?, ?, ?)", fields)
    old.commit()
    old.close()
    book = Book(tmp_path / "old.sqlite")
    again = book.restore(Settings(), head(1), 0.0)
    group = again.groups[group_id(7)]
    assert (group.free, group.max_lag, group.affinity, group.sampling) == ({0, 1}, 1, b"", SAMPLING)
    again.bind("s", Binding(2, SAMPLING, 1, False, b"h" * 32, 1))
    with pytest.raises(KeyTaken, match=r"'s' is bound to n=2; now it is asked with n=3\."):
        again.bind("s", Binding(3, SAMPLING, 1, False))
    book.close()
    assert Book(tmp_path / "old.sqlite").counts()["groups"] == 1


def test_the_binding_of_a_key_is_durable(tmp_path: Path):
    """The binding stays when all groups of the session were dropped because no trainer returned for them."""
    book, ledger = Book(tmp_path / "ledger.sqlite"), ledger_at(groups=0)
    first = Binding(2, SAMPLING, 1, False, b"h" * 32, 64)
    ledger.bind("train", first)
    ledger.bind("other", Binding(2, SAMPLING, 1, False))
    ledger.bind("train", first._replace(prompts=b"", prompt_count=0))  # an iterator, whose prompts are not known yet
    ledger.bind("other", first)
    facts = ledger.take_facts()
    assert [fact.session for fact in facts if isinstance(fact, Bound)] == ["train", "other", "other"]
    book.write(facts)
    book.prune()
    book.close()
    again = Book(tmp_path / "ledger.sqlite").restore(Settings(), head(3), 0.0)
    assert again.bindings == ledger.bindings == {"train": first, "other": first}
    with pytest.raises(KeyTaken, match=r"64 prompts with hash 68686868; .*64 prompts with hash 69696969"):
        again.bind("train", first._replace(prompts=b"i" * 32))


def test_an_impossible_fact_is_a_bug_and_changes_nothing(tmp_path: Path):
    book = Book(tmp_path / "ledger.sqlite")
    ledger = ledger_at(n=1)
    (lease,) = ledger.request_work(ALICE, ask(1), 0.0)
    submit(ledger, lease, draw(lease, 0), 1.0)
    facts = ledger.take_facts()
    book.write(facts)
    with pytest.raises(sqlite3.IntegrityError):  # accepts the same sample twice
        book.write([Dropped(group_id(9)), facts[-1]])
    assert book.counts()["rollouts"] == 1


def test_a_full_disk_is_a_usage_error(tmp_path: Path):
    book = Book(tmp_path / "ledger.sqlite")
    (pages,) = book._db.execute("pragma page_count").fetchone()
    book._db.execute(f"pragma max_page_count = {pages}")
    ledger = ledger_at(groups=0)
    ledger.offer(group_id(0), "s", PROMPT * 5000, 1, SAMPLING)
    with pytest.raises(UsageError, match="full"):
        book.write(ledger.take_facts())
    assert book.counts()["groups"] == 0


def test_a_file_that_is_no_ledger_is_refused_in_a_sentence(tmp_path: Path):
    (tmp_path / "junk").write_bytes(b"not a database at all" * 100)
    with pytest.raises(UsageError, match="Cannot open the ledger"):
        Book(tmp_path / "junk")
    later = sqlite3.connect(tmp_path / "later")
    later.execute("pragma user_version = 99")
    later.close()
    with pytest.raises(UsageError, match="later version"):
        Book(tmp_path / "later")
    with pytest.raises(UsageError, match="Cannot open the ledger"):
        Book(tmp_path / "no" / "folder")
