"""The seed's stores while a council replicates them: what is written there is first stored by a majority.

The stores write in worker threads. Each call into the council waits there, as a write to a slow disk would.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import trio

from codec import open_manifest
from node.council.changes import encode_change
from node.council.service import CouncilService
from node.ledger.book import Book
from node.ledger.statements import Statement
from swarm.protocol.core.events import VersionId
from swarm.store import Seal, Store

__all__ = ["add_pending_seal", "founding_records", "replicated", "take_records"]

_PREFIXES = ("grant/", "ticket/", "bar/", "kick/", "attempts/", "kept/")
"""Records of the seed's store that belong to the swarm; `boot` and `settings` do too."""
_SEAL = "seal"


@contextmanager
def replicated(council: CouncilService, store: Store, book: Book, swarm: bytes) -> Iterator[None]:
    """While the block runs, every change of `book` and of the store's records is established by `council` first. In the
    threads that make a change, `LeadLost` is raised when it was not."""

    def log_statements(statements: Sequence[Statement]) -> None:
        trio.from_thread.run(council.establish, encode_change(statements=statements))

    def log_records(records: Sequence[tuple[str, bytes]], dropped: Sequence[str]) -> None:
        if trio.lowlevel.in_trio_run():  # only what the next start of this machine alone needs is written there
            return
        if (sealed := dict(records).get(_SEAL)) is not None:
            manifest = open_manifest(sealed, swarm)
            version = str(VersionId(manifest.epoch, manifest.version))
            trio.from_thread.run(council.wait_until_held, sealed, version)
        trio.from_thread.run(council.establish, encode_change(records=records, dropped=dropped))

    book.log, store.records.log = log_statements, log_records
    try:
        yield
    finally:
        book.log, store.records.log = None, None


def founding_records(store: Store) -> dict[str, bytes]:
    """What the store has that the council begins with."""
    records = {name: value for name, value in store.records.all().items() if _is_replicated(name)}
    newest = store.newest()
    return records if newest is None else records | {_SEAL: newest.manifest}


def take_records(store: Store, records: dict[str, bytes]) -> None:
    """Make the replicated records those of the store, which nothing else writes meanwhile."""
    stale = [name for name in store.records.all() if _is_replicated(name) and name not in records]
    store.records.put([(name, value) for name, value in records.items() if name != _SEAL], drop=stale)


def add_pending_seal(store: Store, records: dict[str, bytes], swarm: bytes) -> None:
    """Record the newest seal of the log in the store, if the store has all chunks of it: a crash came between."""
    if (sealed := records.get(_SEAL)) is None:
        return
    seal = Seal.of(open_manifest(sealed, swarm), sealed)
    newest = store.newest()
    if (newest is None or newest.id < seal.id) and store.whole(seal):
        store.seal(seal)


def _is_replicated(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in ("boot", "settings")
