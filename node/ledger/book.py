"""The book: the ledger's SQLite file, with one transaction for each list of facts.

`write` returns after the commit has reached the disk (WAL, synchronous=FULL), and nobody is told of anything before. So

- an offered group is durable before the trainer is told how many more it may offer;
- a lease is durable before its node hears of it: after a restart its node may still deliver, and its token is never
  used again (ids only grow, also when everything else was pruned);
- the work that a key stands for is durable before the trainer may offer its first group;
- an accepted rollout is durable before its verdict is sent: a node that received "accepted" may forget it;
- that a group was taken is durable before the group is forgotten; a crash in between hands the group over once more,
  under its old id;
- a quarantine is durable with its reason, and so is its end; after a restart, a limited one begins again;
- the evidence against a node, the numbers that honest traffic is known by, and the secret that draws the checks are
  durable before anybody hears of a check's outcome;
- not durable, on purpose: rates (they are measured again), deadlines (a lease that is open in the book gets its first
  duration again, because no clock survives a restart), the members, what was handed over and not taken, refusals, open
  checks, and which node has the prefix of which affinity.

A crash during `write` leaves none of its facts, and nobody was told of them.
"""

import contextlib
import math
import secrets
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from codec.errors import UsageError
from codec.sign import SIGNATURE_BYTES
from node.engines.base import SamplingParams
from node.ledger.binding import KEPT, Binding
from node.ledger.facts import Fact
from node.ledger.messages import Rollout
from node.ledger.part_history import Record
from node.ledger.rules import Ledger
from node.ledger.settings import Settings
from node.ledger.state import AcceptedRollout, Group, Head, LiveLease
from node.ledger.statements import KEEP_NUMBERS, PRUNE, Statement, pack, parts, statements_of, write_fact
from node.ledger.terms import Terms
from node.ledger.trust.verifier import Verifier
from node.verification.record import NodeRecord
from swarm.store.private import make_private

__all__ = ["LEDGER", "Book"]

LEDGER: Final = "ledger.sqlite"
"""The book's name in the seed's home."""
FORMAT: Final = 4
"""`pragma user_version` of the file."""
_TABLES: Final = """
create table if not exists numbers (name text primary key, value integer not null) without rowid;
create table if not exists heads (epoch integer, version integer, root blob not null, primary key (epoch, version))
    without rowid;
create table if not exists groups (id blob primary key, session text not null, ord integer not null,
    prompt blob not null, n integer not null, sampling blob not null, taken integer not null default 0,
    max_lag integer not null default 1, affinity blob not null default x'',
    whole integer not null default 0);
create index if not exists groups_taken on groups (taken, ord);
create table if not exists leases (id integer primary key, token integer not null, node blob not null,
    grp blob not null, samples blob not null, duration_s real not null, epoch integer not null,
    version integer not null);
create table if not exists slots (grp blob, sample integer, lease integer not null, primary key (grp, sample))
    without rowid;
create table if not exists rollouts (grp blob, sample integer, lease integer not null, token integer not null,
    node blob not null, sealed blob not null, primary key (grp, sample));
create table if not exists conduct (id integer primary key, node blob not null, at integer not null,
    what text not null, why text not null, seconds real, times integer);
create table if not exists bindings (id integer primary key, session text not null unique, n integer not null,
    sampling blob not null, max_lag integer not null, whole integer not null, prompts blob not null,
    count integer not null);
create table if not exists requeues (id integer primary key, lease integer, grp blob not null, samples blob not null,
    why text not null);
create table if not exists secrets (name text primary key, value blob not null) without rowid;
create table if not exists check_numbers (id integer primary key, context blob not null, checker blob not null,
    node blob not null, value real not null);
create table if not exists check_counts (context blob not null, node blob not null, mismatches integer not null,
    numbers integer not null, primary key (context, node));
create table if not exists evidence (node blob primary key, record blob not null);
create table if not exists part_changes (epoch integer, version integer, base integer not null, adapters blob not null,
    primary key (epoch, version)) without rowid;
create table if not exists adapters (name text primary key, own integer not null) without rowid;
create table if not exists own_versions (grp blob, sample integer, own blob not null, primary key (grp, sample))
    without rowid;
create table if not exists terms (grp blob primary key, terms blob not null, dropped blob not null) without rowid;
"""
"""`conduct`: quarantines and releases, with wall-clock time for people. `slots`: leased samples. A sample is free, or
in `slots`, or in `rollouts`; the primary keys allow it only once in each. `part_changes`: versions that left the base
as it was or changed adapters (`node.ledger.part_history`); without adapters it is empty, and so are `adapters` and
`own_versions` (of the spans of accepted rollouts). `terms`: of groups whose terms are not the default, with the
samples that were dropped. A release that does not know a table leaves it alone, so new tables
need no new format: versions that such a release sealed count as changes of the base."""

_LATER: Final = {
    1: """
alter table groups add column max_lag integer not null default 1;
alter table groups add column affinity blob not null default x'';
""",
    2: "alter table groups add column whole integer not null default 0;",
    3: """
insert or ignore into bindings (session, n, sampling, max_lag, whole, prompts, count)
    select session, n, sampling, max_lag, whole, x'', 0 from groups group by session;
""",
}
"""By format: the statements that turn it into the next one."""


class Book:
    """An open book. Any thread may call it."""

    def __init__(self, path: Path) -> None:
        """Open or create `path`. Raises `UsageError` when it is damaged, of a later format, or not writable."""
        self.log: Callable[[Sequence[Statement]], None] | None = None
        """Makes statements durable here and elsewhere before it returns (`node.council`); None: only here."""
        self._path = path
        self._lock = threading.Lock()
        try:
            make_private(path)
        except OSError as error:
            raise UsageError(f"Cannot open the ledger {path}: {error.strerror}. Choose a home that you own.") from error
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = full")
            (found,) = self._db.execute("pragma user_version").fetchone()
            if found > FORMAT:
                raise UsageError(f"{path} was written by a later version of swarm-node. Update, or use another folder.")
            self._db.executescript(_TABLES)
            later = "".join(_LATER[number] for number in range(found or FORMAT, FORMAT))
            self._db.executescript(f"begin; {later} pragma user_version = {FORMAT}; commit;")
        except sqlite3.Error as error:
            raise UsageError(f"Cannot open the ledger {path}: {error}. Move it away to start a new one.") from error

    def close(self) -> None:
        """Close the database. Safe to call twice."""
        self._db.close()

    def copy_to(self, path: Path) -> None:
        """Write the whole book, as it is at one moment, to a new file."""
        copy = sqlite3.connect(path, isolation_level=None)
        try:
            with self._lock:
                self._db.backup(copy)
            copy.execute("pragma journal_mode = delete")
        finally:
            copy.close()

    def replace_by(self, path: Path) -> None:
        """Replace the contents by those of the book in `path`, all or none, durable on return. Raises `UsageError`."""
        try:
            other = sqlite3.connect(path, isolation_level=None)
            try:
                with self._lock:
                    other.backup(self._db)
                    self._db.execute("pragma journal_mode = wal")
                    self._db.execute("pragma wal_checkpoint(truncate)")
            finally:
                other.close()
        except sqlite3.Error as error:
            raise UsageError(
                f"Cannot replace the ledger {self._path}: {error}. Free some space, and start again."
            ) from error

    def write(self, facts: Iterable[Fact]) -> None:
        """Make `facts` durable, all or none. Raises `UsageError` when the disk is full or gone.

        With a `log` it makes them durable, in parts of some facts each if they are very large.
        """
        if self.log is not None:
            for part in parts(map(statements_of, facts)):
                self.log(part)
            return
        with self.transaction() as db:
            for fact in facts:
                write_fact(db, fact)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The database, for `with`: what is done there is durable when the block ends, or not done at all. Raises
        `UsageError` when the disk is full or gone."""
        with self._lock:
            try:
                self._db.execute("begin immediate")
                yield self._db
                self._db.execute("commit")
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("rollback")
                if isinstance(error, sqlite3.OperationalError):
                    raise UsageError(
                        f"Cannot write the ledger {self._path}: {error}. Free some space and start again."
                    ) from error
                raise

    def restore(self, settings: Settings, head: Head, now: float, secret: bytes | None = None) -> Ledger:
        """The ledger as its last facts left it. `head` is the swarm's, which may be newer than the book's. `secret`
        draws the checks; None: the one that the book keeps, made at the first start."""
        ledger = Ledger(settings, head, secret or self.secret())
        heads = self._db.execute("select epoch, version, root from heads").fetchall()
        known = {(epoch, version): root for epoch, version, root in heads if (epoch, version) <= head.name}
        ledger.roots = OrderedDict(sorted((known | ledger.roots).items()))
        self._restore_parts(ledger, head)
        columns = "session, n, sampling, max_lag, whole, prompts, count"
        bound = self._db.execute(f"select {columns} from bindings order by id desc limit ?", (KEPT,)).fetchall()
        for session, n, sampling, lag, whole, prompts, count in reversed(bound):
            ledger.bindings[session] = Binding(n, _sampling(sampling), lag, bool(whole), prompts, count)
        for (group,) in self._db.execute("select id from groups where taken = 0 order by ord").fetchall():
            kept = self._group(group)
            kept.since = now  # its clock did not survive
            ledger.adopt(kept)
        for lease in self._open_leases(now):
            ledger.adopt_lease(lease, now)
        row = self._db.execute("select value from numbers where name = 'next_id'").fetchone()
        ledger.table.next_id = max(ledger.table.next_id, row[0] if row else 1)
        (order,) = self._db.execute("select coalesce(max(ord) + 1, 0) from groups").fetchone()
        ledger.pool.next_order = max(ledger.pool.next_order, order)
        for entry in self.reputation():  # oldest first
            if entry["what"] == "quarantined":
                ledger.quarantine.resume(entry["node"], entry["why"], entry["seconds"], entry["times"], now)
            else:
                ledger.quarantine.resume(entry["node"], None, None, None, now)
        self._restore_evidence(ledger.quarantine.verifier)
        ledger.discard_old()
        return ledger

    def _restore_parts(self, ledger: Ledger, head: Head) -> None:
        rows = self._db.execute("select * from part_changes order by epoch, version").fetchall()
        records = [Record((epoch, number), bool(base), _owns(adapters)) for epoch, number, base, adapters in rows]
        adapters = dict(self._db.execute("select name, own from adapters").fetchall())
        found = self._db.execute("select value from numbers where name = 'quiet'").fetchone()
        ledger.parts.restore(head.name, records, adapters, found[0] if found else 0)

    def secret(self) -> bytes:
        """The secret that draws the checks, made at the first call."""
        self._db.execute("insert or ignore into secrets values ('checks', ?)", (secrets.token_bytes(32),))
        return self._db.execute("select value from secrets where name = 'checks'").fetchone()[0]

    def _restore_evidence(self, verifier: Verifier) -> None:
        query = "select context, checker, node, value from check_numbers order by id desc limit ?"
        for context, checker, node, value in reversed(self._db.execute(query, (KEEP_NUMBERS,)).fetchall()):
            verifier.nulls.add(context, checker, node, value)
        query = "select context, node, mismatches, numbers from check_counts order by rowid"
        for row in self._db.execute(query).fetchall():
            verifier.counts.add(*row)
        for node, record in self._db.execute("select node, record from evidence").fetchall():
            with contextlib.suppress(ValueError):  # of another release: the node's evidence begins anew
                verifier.resume(node, NodeRecord.from_bytes(record))

    def reputation(self, node: bytes | None = None) -> list[dict[str, Any]]:
        """The quarantines and releases of all nodes, or of `node`, oldest first.

        Each has `node`, `at` (Unix time, s), `what` ("quarantined" or "released"), `why`, `seconds` and `times`.
        """
        where = "" if node is None else "where node = ? "
        query = f"select node, at, what, why, seconds, times from conduct {where}order by id"
        names = ("node", "at", "what", "why", "seconds", "times")
        with self._lock:
            rows = self._db.execute(query, () if node is None else (node,)).fetchall()
        return [dict(zip(names, row, strict=True)) for row in rows]

    def was_taken(self, group: bytes) -> bool:
        """Whether its trainer has `group`; False also when the book has forgotten it."""
        with self._lock:
            row = self._db.execute("select taken from groups where id = ?", (group,)).fetchone()
        return row is not None and bool(row[0])

    def taken_work(self, group: bytes) -> tuple[bytes, int, SamplingParams] | None:
        """Prompt, number of samples and sampling of a group that was taken, if the book has it."""
        query = "select prompt, n, sampling from groups where id = ? and taken = 1"
        with self._lock:
            row = self._db.execute(query, (group,)).fetchone()
        return None if row is None else (row[0], row[1], _sampling(row[2]))

    def recall(self, group: bytes) -> Group | None:
        """A group that was taken and is wanted again: complete, and not taken from now on. None if the book does not
        have it."""
        if not self.was_taken(group):
            return None
        with self.transaction():
            self._db.execute("update groups set taken = 0 where id = ?", (group,))
            return self._group(group)

    def prune(self) -> None:
        """Delete the oldest of the groups that were taken, and everything that only they needed."""
        if self.log is not None:
            self.log(PRUNE)
            return
        with self.transaction() as db:
            for statement in PRUNE:
                db.execute(*statement)

    def discarded(self, group: bytes, sample: int) -> int:
        """How often an accepted rollout of this sample was discarded."""
        query = "select count(*) from requeues where grp = ? and samples = ? and lease is null"
        return self._db.execute(query, (group, pack((sample,)))).fetchone()[0]

    def counts(self) -> dict[str, int]:
        """Rows by table."""
        count = {name: f"select count(*) from {name}" for name in ("groups", "leases", "rollouts", "requeues")}
        return {name: self._db.execute(query).fetchone()[0] for name, query in count.items()}

    def _group(self, group: bytes) -> Group:
        query = "select session, ord, prompt, n, sampling, max_lag, affinity, whole from groups where id = ?"
        session, order, prompt, n, sampling, max_lag, affinity, whole = self._db.execute(query, (group,)).fetchone()
        found = Group(group, session, order, prompt, n, _sampling(sampling), max_lag, affinity, bool(whole))
        for sample, lease in self._db.execute("select sample, lease from slots where grp = ?", (group,)):
            found.leased[sample] = lease
        owns = dict(self._db.execute("select sample, own from own_versions where grp = ?", (group,)).fetchall())
        rows = self._db.execute("select sample, lease, token, node, sealed from rollouts where grp = ?", (group,))
        for sample, lease, token, node, sealed in rows:
            rollout = msgspec.msgpack.decode(sealed[SIGNATURE_BYTES:], type=Rollout)  # verified when it was accepted
            own = msgspec.msgpack.decode(owns[sample], type=tuple[int, ...]) if sample in owns else ()
            found.done[sample] = AcceptedRollout(node, lease, token, rollout.oldest, rollout, sealed, own)
        row = self._db.execute("select terms, dropped from terms where grp = ?", (group,)).fetchone()
        if row is not None:
            found.terms = msgspec.msgpack.decode(row[0], type=Terms)
            found.dropped = set(msgspec.msgpack.decode(row[1], type=tuple[int, ...]))
        found.free = set(range(n)) - set(found.leased) - set(found.done) - found.dropped
        return found

    def _open_leases(self, now: float) -> list[LiveLease]:
        query = "select * from leases where id in (select distinct lease from slots) order by id"
        leases = []
        for id_, token, node, group, samples, duration_s, epoch, version in self._db.execute(query).fetchall():
            open_now = {row[0] for row in self._db.execute("select sample from slots where lease = ?", (id_,))}
            lease = LiveLease(
                id=id_,
                token=token,
                node=node,
                group=group,
                samples=msgspec.msgpack.decode(samples, type=tuple[int, ...]),
                granted=-math.inf,
                deadline=now + duration_s,
                duration_s=duration_s,
                minimum=(epoch, version),
                open=open_now,
                portable=None,
            )
            leases.append(lease)
        return leases


def _owns(packed: bytes) -> dict[str, int]:
    return msgspec.msgpack.decode(packed, type=dict[str, int])


def _sampling(packed: bytes) -> SamplingParams:
    return msgspec.msgpack.decode(packed, type=SamplingParams)
