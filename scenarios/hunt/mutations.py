"""Planted bugs: each is put into the product in memory, and the hunt must find it.

A hunt that finds nothing says little by itself. These bugs are of the kinds that such programs have had: a sync that
was left out, a check that was left out, an order that was turned round, a number that is off by one. One that is not
found within ten minutes shows a fault or an invariant that the hunt lacks.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

from scenarios.hunt.hashes import with_fixed_hashes

if __name__ == "__main__":
    with_fixed_hashes("scenarios.hunt.mutations")

import argparse
import json

from node.coordinator import coordinator
from node.engines.base import Version
from node.ledger import rules, service
from node.ledger.assignment import leases
from node.ledger.book import Book
from node.ledger.messages import Reason, VersionSpan, encode
from node.ledger.state import Head
from node.ledger.transitions import Transitions
from node.ledger.trust.acceptance import Acceptance
from node.member import engine_runtime
from node.member.held_version import HeldVersion
from node.member.lease_inventory import LeaseInventory
from scenarios.hunt.schedule import draw
from scenarios.hunt.virtual_os import REAL_CLOCK
from scenarios.hunt.world import run
from swarm.protocol.membership import lease as membership_leases
from swarm.protocol.membership import membership
from swarm.protocol.state import State
from swarm.protocol.transfer.egress import Egress
from swarm.runtime import publishing
from swarm.runtime.replica import jobs
from swarm.runtime.replica import model as models
from swarm.store import clean as cleans
from swarm.store import disk, pack, records

__all__ = ["MUTATIONS", "planted"]

Change = tuple[Any, str, Any]
"""An object of the product, the name of one of its attributes, and what takes its place."""
MUTATIONS: Final[dict[str, Callable[[], list[Change]]]] = {}


def _bug(name: str) -> Callable[[Callable[[], list[Change]]], Callable[[], list[Change]]]:
    def note(changes: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
        MUTATIONS[name] = changes
        return changes

    return note


def _nothing(*args: Any, **options: Any) -> None:
    return None


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Within it the product has this bug."""
    with ExitStack() as stack:
        for target, attribute, new in MUTATIONS[name]():
            stack.enter_context(patch.object(target, attribute, new))
        yield


# ---------------------------------------------------------------- durability


@_bug("chunks are not synced before their seal")
def _chunks_not_synced() -> list[Change]:
    return [(pack.Pack, "sync", _nothing)]


@_bug("no folder is synced")
def _folders_not_synced() -> list[Change]:
    return [(disk.Disk, "sync_folder", _nothing)]


@_bug("the store's records are not synced")
def _records_not_synced() -> list[Change]:
    return [(records.Records, "__init__", _without_sync(records.Records.__init__))]


@_bug("the ledger's book is not synced")
def _book_not_synced() -> list[Change]:
    return [(Book, "__init__", _without_sync(Book.__init__))]


def _without_sync(usual: Callable[..., None]) -> Callable[..., None]:
    def opened(self: Any, *args: Any, **options: Any) -> None:
        usual(self, *args, **options)
        self._db.execute("pragma synchronous=off")

    return opened


@_bug("a version is announced before its seal is durable")
def _announced_early() -> list[Change]:
    async def publish(self: Any, manifest: Any, sealed: bytes, announce: Callable[[], Any]) -> None:
        async with self._writer:
            await announce()
            await self._run_sync(self.model.prepare, manifest, sealed)
            await self._run_sync(self.model.apply, manifest)
            self._changes[manifest.epoch, manifest.version] = ()

    return [(jobs.Jobs, "publish", publish)]


@_bug("the number of an attempt does not rise")
def _attempts_alike() -> list[Change]:
    usual = publishing.SeedPublisher._next_attempt

    def next_attempt(self: Any, back_to: Any) -> publishing.Attempt:
        return usual(self, back_to)._replace(attempt=0)

    return [(publishing.SeedPublisher, "_next_attempt", next_attempt)]


@_bug("a verdict is sent before it is durable")
def _told_early() -> list[Change]:
    usual = service.LedgerService.begin_turn

    def begin_turn(self: Any) -> service.Turn:
        turn = usual(self)
        for node, message in turn.outbox:
            send = self._send(node, encode(message))
            try:
                send.send(None)  # as far as its first checkpoint
            except StopIteration:
                continue
            finally:
                send.close()
        return service.Turn(turn.facts, [], turn.ready)

    return [(service.LedgerService, "begin_turn", begin_turn)]


@_bug("a start does not look for the newest seal")
def _older_head() -> list[Change]:
    usual = models.restore

    def restored(store: Any, *args: Any) -> Any:
        with patch.object(store.chunks, "open", _nothing):
            return usual(store, *args)

    return [(models, "restore", restored), (coordinator, "open_newest_version", _oldest_version)]


def _oldest_version(store: Any, model: Any, checkpoint: Any, layout: Any, key: Any, draft: Any = None) -> bytes:
    from node.coordinator.recovery import open_newest_version

    seals = store.records.seals()
    if len(seals) > 1:
        store.records.drop_seals([seals[-1].id])
    return open_newest_version(store, model, checkpoint, layout, key, draft)


@_bug("the record of a clean end is believed for ever")
def _always_clean() -> list[Change]:
    return [(cleans.Left, "vouches_for", lambda self, checkpoint: True)]


# ---------------------------------------------------------------- versions


@_bug("a replica whose changes are not known does not reload the engine")
def _no_reload() -> list[Change]:
    async def reload(self: Any, version: Version) -> None:
        return None

    return [(engine_runtime.EngineRuntime, "_reload", reload)]


@_bug("a sample is named by its last version only")
def _last_version_only() -> list[Change]:
    usual = HeldVersion.spans

    def spans(self: HeldVersion, *args: Any) -> tuple[VersionSpan, ...] | None:
        found = usual(self, *args)
        return None if found is None else found[-1:]

    return [(HeldVersion, "spans", spans)]


@_bug("the boot's number stays as it is")
def _boots_alike() -> list[Change]:
    return [(coordinator, "next_boot", lambda last, unix_s: max(last, 1))]


@_bug("old versions are never dropped")
def _hoards() -> list[Change]:
    usual = State.set_held

    def set_held(self: State, *args: Any) -> None:
        tuning, self.tuning = self.tuning, replace(self.tuning, retain_versions=1 << 20)
        usual(self, *args)
        self.tuning = tuning

    return [(State, "set_held", set_held)]


@_bug("further copies are not charged to the seed's egress")
def _egress_unchecked() -> list[Change]:
    return [(Egress, "pay_for_part", lambda self, *args: True)]


# ---------------------------------------------------------------- leases and rollouts


@_bug("a membership lease does not end")
def _endless_membership() -> list[Change]:
    return [(membership_leases.LeaseBook, "expire", lambda self, now: [])]


@_bug("a member whose grant is void goes on sending content")
def _gives_without_lease() -> list[Change]:
    return [(membership, "is_own_lease_over", lambda state, now: False)]


@_bug("a work lease does not end")
def _endless_lease() -> list[Change]:
    return [(leases.LeaseTable, "expired", lambda self, now: None)]


@_bug("the lag is off by one")
def _lag_off_by_one() -> list[Change]:
    usual = Head.lag_reason

    def lag_reason(self: Head, version: Version, max_lag: int, *args: Any, **options: Any) -> Reason | None:
        return usual(self, version, max_lag + 1, *args, **options)

    return [(Head, "lag_reason", lag_reason)]


@_bug("the fencing token of a lease is not checked")
def _unfenced() -> list[Change]:
    usual = Acceptance.lease_reason

    def lease_reason(self: Acceptance, *args: Any, **options: Any) -> Reason | None:
        found = usual(self, *args, **options)
        return None if found is Reason.FENCED else found

    return [(Acceptance, "lease_reason", lease_reason)]


@_bug("a sample whose lease ended is not free again")
def _sample_lost() -> list[Change]:
    usual = Transitions.requeue

    def requeue(self: Any, lease: Any, *args: Any) -> Any:
        done = usual(self, lease, *args)
        group = self.pool.groups.get(lease.group)
        if group is not None and lease.id % 4 == 0:
            group.free.clear()
        return done

    return [(Transitions, "requeue", requeue)]


@_bug("numbers of leases are used again after a restart")
def _leases_again() -> list[Change]:
    usual = Book.restore

    def restore(self: Any, *args: Any, **options: Any) -> rules.Ledger:
        ledger = usual(self, *args, **options)
        ledger.table.next_id = 1
        return ledger

    return [(Book, "restore", restore)]


@_bug("accepted rollouts are forgotten at a restart")
def _forgotten() -> list[Change]:
    usual = Book._group

    def group(self: Any, id_: bytes) -> Any:
        found = usual(self, id_)
        found.free |= set(found.done)
        found.done.clear()
        return found

    return [(Book, "_group", group)]


@_bug("a node forgets a result when it has sent it")
def _forgetful_node() -> list[Change]:
    usual = LeaseInventory.settle

    def renewals(self: Any, now: float, every_s: float) -> list[Any]:
        for key in [key for key, result in self.results.items() if result.next_send > now]:
            usual(self, *key)
        return []

    return [(LeaseInventory, "renewals", renewals)]


def find(name: str, seconds: float, clean: set[int], first_seed: int) -> dict[str, Any]:
    """Hunt for one bug for so long: what was violated, by which seed, after how many seconds. `clean`: seeds that are
    known not to fail without a bug; those that are learnt are added."""
    began, seed = REAL_CLOCK(), first_seed
    while REAL_CLOCK() - began < seconds:
        with planted(name):
            result = run(draw(seed, 3, 60.0, 2.0))
        took = round(REAL_CLOCK() - began, 1)
        if result.failed and (seed in clean or not run(draw(seed, 3, 60.0, 2.0)).failed):  # it is this bug
            clean.add(seed)
            first = result.violations[0]
            return {"bug": name, "found": first.name, "text": first.text, "seed": seed, "seconds": took}
        seed += 1
    return {"bug": name, "found": None, "seeds": seed - first_seed, "seconds": round(REAL_CLOCK() - began, 1)}


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 1 when a bug was not found."""
    parser = argparse.ArgumentParser(prog="python -m scenarios.hunt.mutations", description=__doc__)
    parser.add_argument("bugs", nargs="*", help="parts of the names of bugs; none: all")
    parser.add_argument("--time", type=float, default=600.0, help="seconds for each")
    parser.add_argument("--seed", type=int, default=1, help="of the first run for each")
    options = parser.parse_args(arguments)
    missed, clean = 0, set[int]()
    for name in MUTATIONS:
        if not options.bugs or any(part in name for part in options.bugs):
            report = find(name, options.time, clean, options.seed)
            print(json.dumps(report), flush=True)
            missed += report["found"] is None
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
