"""The statements that make the ledger's facts durable: what `node.ledger.book` executes, and a council replicates.

Executed in one order on equal books they leave equal books: nothing in them reads a clock or draws a random number.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from node.engines.base import SamplingParams
from node.ledger.binding import KEPT
from node.ledger.facts import (
    Accepted,
    AdaptersHeld,
    Advanced,
    Bound,
    Cut,
    Discarded,
    Dropped,
    EvidenceHeld,
    Fact,
    Leased,
    NumberFound,
    NumbersDropped,
    Offered,
    Quarantined,
    Released,
    Requeued,
    SampleCounted,
    Taken,
)
from node.ledger.part_history import KEPT as KEEP_VERSIONS
from node.ledger.state import LiveLease
from node.ledger.terms import PLAIN

__all__ = ["PRUNE", "Statement", "pack", "parts", "statements_of", "write_fact"]

Statement = tuple[str, tuple[Any, ...]]
"""SQL and its values: texts, bytes, numbers, None."""
PART_BYTES: Final = 16 << 20
"""Of the values in one part, about."""
KEEP_TAKEN: Final = 20_000
"""Groups kept after the trainer took them: as a record, and to be handed over again if it dies before it uses them."""
KEEP_NUMBERS: Final = 200_000
"""Numbers of checks kept: two thousand for each pair of checker and context (`node.verification.nulls`)."""
KEEP_COUNTS: Final = 65_536
"""Counts of mismatches kept, one for each node and class: those that began last."""
KEEP_RECORDS: Final = 16_384
"""Nodes whose evidence is kept, the ones checked last: as many as a swarm has slots."""
KEEP_HEADS: Final = 64
"""Seals kept, and those after the oldest version that is recorded: a lag is a few versions of one part."""


_COUNT: Final = """
insert into check_counts values (?, ?, ?, 1)
    on conflict do update set mismatches = mismatches + excluded.mismatches, numbers = numbers + 1
"""


class _Recorder:
    """Stands for a database: notes statements instead of executing them."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []

    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        """Note one statement."""
        self.statements.append((sql, tuple(values)))

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Note one statement for each row."""
        self.statements += [(sql, tuple(row)) for row in rows]


def statements_of(fact: Fact) -> list[Statement]:
    """What `write_fact` would carry out."""
    recorder = _Recorder()
    write_fact(recorder, fact)
    return recorder.statements


def parts(facts: Iterable[list[Statement]]) -> Iterator[list[Statement]]:
    """The statements of facts in lists of about `PART_BYTES`, none of which ends within a fact."""
    part: list[Statement] = []
    size = 0
    for statements in facts:
        part += statements
        size += sum(len(value) for _, values in statements for value in values if isinstance(value, bytes | str))
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def pack(value: SamplingParams | tuple[int, ...]) -> bytes:
    """A column's value."""
    return msgspec.msgpack.encode(value)


def write_fact(db: "sqlite3.Connection | _Recorder", fact: Fact) -> None:
    """Carry out the statements of a fact; the caller is in a transaction."""
    run = db.execute
    match fact:
        case Bound(session, binding):
            fields = (session, binding.n, pack(binding.sampling), binding.max_lag, binding.whole)
            columns = "session, n, sampling, max_lag, whole, prompts, count"
            values = (*fields, binding.prompts, binding.prompt_count)
            run(f"insert or replace into bindings ({columns}) values (?, ?, ?, ?, ?, ?, ?)", values)
        case Offered(group):
            fields = (group.id, group.session, group.order, group.prompt, group.n, pack(group.sampling))
            columns = "id, session, ord, prompt, n, sampling, max_lag, affinity, whole"
            values = (*fields, group.max_lag, group.affinity, group.whole)
            run(f"insert into groups ({columns}) values (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
            if group.terms != PLAIN:
                run("insert into terms values (?, ?, ?)", (group.id, msgspec.msgpack.encode(group.terms), pack(())))
        case Cut(group, dropped):
            run("delete from slots where grp = ?", (group,))
            run("update terms set dropped = ? where grp = ?", (pack(dropped), group))
        case Leased(lease):
            _write_lease(db, lease)
        case Requeued(lease, group, samples, why):
            for sample in samples:
                run("delete from slots where grp = ? and sample = ? and lease = ?", (group, sample, lease))
            fields = (lease, group, pack(samples), why)
            run("insert into requeues (lease, grp, samples, why) values (?, ?, ?, ?)", fields)
        case Accepted(group, sample, done):
            run("delete from slots where grp = ? and sample = ?", (group, sample))
            fields = (group, sample, done.lease, done.token, done.node, done.sealed)
            run("insert into rollouts values (?, ?, ?, ?, ?, ?)", fields)
            if done.own:
                run("insert or replace into own_versions values (?, ?, ?)", (group, sample, pack(done.own)))
        case Discarded(group, sample, why):
            run("delete from rollouts where grp = ? and sample = ?", (group, sample))
            run("delete from own_versions where grp = ? and sample = ?", (group, sample))
            fields = (group, pack((sample,)), why)
            run("insert into requeues (grp, samples, why) values (?, ?, ?)", fields)
        case Taken(group):
            run("update groups set taken = 1 where id = ?", (group,))
        case Dropped(group):
            for table in ("slots", "rollouts", "own_versions", "terms"):
                run(f"delete from {table} where grp = ?", (group,))
            run("delete from groups where id = ?", (group,))
        case Advanced(head, record, quiet):
            run("insert or replace into heads values (?, ?, ?)", head[:3])
            if record is not None:
                fields = (*record.version, record.base, msgspec.msgpack.encode(record.adapters))
                run("insert or replace into part_changes values (?, ?, ?, ?)", fields)
            if quiet is not None:
                run("insert or replace into numbers values ('quiet', ?)", (quiet,))
        case AdaptersHeld(adapters):
            run("delete from adapters")
            for name, own in adapters.items():
                run("insert into adapters values (?, ?)", (name, own))
        case Quarantined(node, why, seconds, times):
            _write_reputation(db, node, "quarantined", why, seconds, times)
        case Released(node, why):
            _write_reputation(db, node, "released", why, None, None)
        case NumberFound():
            run("insert into check_numbers (context, checker, node, value) values (?, ?, ?, ?)", fact)
        case SampleCounted():
            run(_COUNT, fact)
        case NumbersDropped(None):
            run("delete from check_numbers")
            run("delete from check_counts")
        case NumbersDropped(node):
            run("delete from check_numbers where node = ? or checker = ?", (node, node))
            run("delete from check_counts where node = ?", (node,))
        case EvidenceHeld(node, record):
            run("insert or replace into evidence values (?, ?)", (node, record))


def _write_reputation(
    db: "sqlite3.Connection | _Recorder", node: bytes, what: str, why: str, seconds: float | None, times: int | None
) -> None:
    fields = (node, int(time.time()), what, why, seconds, times)
    db.execute("insert into conduct (node, at, what, why, seconds, times) values (?, ?, ?, ?, ?, ?)", fields)


def _write_lease(db: "sqlite3.Connection | _Recorder", lease: LiveLease) -> None:
    epoch, version = lease.minimum
    samples = pack(lease.samples)
    fields = (lease.id, lease.token, lease.node, lease.group, samples, lease.duration_s, epoch, version)
    db.execute("insert into leases values (?, ?, ?, ?, ?, ?, ?, ?)", fields)
    slots = [(lease.group, sample, lease.id) for sample in lease.samples]
    db.executemany("insert into slots values (?, ?, ?)", slots)
    db.execute("insert or replace into numbers values ('next_id', ?)", (lease.id + 1,))


def _newest(table: str) -> str:
    return f"select epoch, version from {table} order by epoch desc, version desc limit ?"


def _last_of(table: str) -> str:
    return f"(select rowid from {table} order by rowid desc limit 1 offset ?)"


_OLD: Final = "(select id from groups where taken = 1 order by ord desc limit -1 offset ?)"
_FIRST: Final = "(select {} from part_changes where base = 0 order by epoch, version limit 1)"
PRUNE: Final[Sequence[Statement]] = (
    *((f"delete from {table} where grp in {_OLD}", (KEEP_TAKEN,)) for table in ("rollouts", "own_versions", "terms")),
    (f"delete from groups where id in {_OLD}", (KEEP_TAKEN,)),
    ("delete from bindings where id not in (select id from bindings order by id desc limit ?)", (KEPT,)),
    ("delete from leases where grp not in (select id from groups)", ()),
    ("delete from requeues where grp not in (select id from groups)", ()),
    *(
        (f"delete from {table} where rowid <= {_last_of(table)}", (keep,))
        for table, keep in (("evidence", KEEP_RECORDS), ("check_counts", KEEP_COUNTS), ("check_numbers", KEEP_NUMBERS))
    ),
    (f"delete from part_changes where (epoch, version) not in ({_newest('part_changes')})", (2 * KEEP_VERSIONS,)),
    (
        f"delete from heads where (epoch, version) not in ({_newest('heads')}) and (epoch, version) < "
        f"(coalesce({_FIRST.format('epoch')}, {1 << 32}), coalesce({_FIRST.format('version')}, 0))",
        (KEEP_HEADS,),
    ),
)
"""Deletes the oldest of the groups that were taken, and everything that only they needed."""
