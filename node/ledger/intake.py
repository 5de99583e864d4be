"""What counts: a result against its lease, and against all that came before it. Pure."""

from collections import OrderedDict
from collections.abc import Mapping

from blake3 import blake3

from node.engines.base import Version
from node.ledger.assignment.leases import LeaseTable, remember
from node.ledger.messages import Reason, Rollout
from node.ledger.settings import Settings
from node.ledger.state import Done, Group, Head, Lease
from node.ledger.trust.judge import fingerprint, judge, too_fast

__all__ = ["Intake"]

Key = tuple[int, int]
"""(lease, sample)"""


class Intake:
    """Remembers what it said of each result, and the tokens that were accepted. `table`: the ledger's own."""

    def __init__(self, settings: Settings, table: LeaseTable) -> None:
        self._settings = settings
        self._table = table
        self._judged: OrderedDict[Key, tuple[bytes, Reason | None]] = OrderedDict()
        self._prints: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        """Tokens that were accepted -> for which sample."""

    def __len__(self) -> int:
        """Results remembered."""
        return len(self._judged)

    def before(self, rollout: Rollout, sealed: bytes) -> tuple[Reason | None] | None:
        """What was said of these very bytes, or None: they are new."""
        known = self._judged.get((rollout.lease, rollout.sample))
        return (known[1],) if known is not None and known[0] == _digest(sealed) else None

    def said(self, rollout: Rollout, sealed: bytes, reason: Reason | None) -> None:
        """The verdict on a result of a lease that lives: the same will be said of it again."""
        self._remember((rollout.lease, rollout.sample), sealed, reason)

    def adopt(self, group: Group) -> None:
        """Of a group that the book kept: its nodes may not have heard, and will say it again."""
        for sample, done in group.done.items():
            self._remember((done.lease, sample), done.sealed, None)

    def _remember(self, key: Key, sealed: bytes, reason: Reason | None) -> None:
        remember(self._judged, key, (_digest(sealed), reason), self._settings.remembered)

    def lease_reason(self, node: bytes, rollout: Rollout, *, member: bool) -> Reason | None:
        """Why `rollout` is not under a lease of `node` that lives, or None."""
        lease = self._table.leases.get(rollout.lease)
        if lease is None:
            return self._table.ended(rollout.lease)
        if lease.node != node:
            return Reason.WRONG_NODE
        if lease.token != rollout.token:
            return Reason.FENCED
        if not member:
            return Reason.NOT_A_MEMBER
        if rollout.sample not in lease.samples:
            return Reason.WRONG_WORK
        return None if rollout.sample in lease.open else Reason.DUPLICATE

    def judge(
        self, lease: Lease, group: Group, rollout: Rollout, head: Head, roots: Mapping[Version, bytes], now: float
    ) -> Reason | None:
        """Why it may not count for its sample, or None."""
        if reason := judge(rollout, group, head, roots):
            return reason
        if too_fast(rollout, now - lease.granted, self._settings):
            return Reason.TOO_FAST
        this = (group.id, rollout.sample)
        found = fingerprint(rollout, group, self._settings)
        return Reason.COPIED if found is not None and self._prints.get(found, this) != this else None

    def accepted(self, group: Group, done: Done) -> None:
        """Its tokens are its own from now on."""
        if (found := fingerprint(done.rollout, group, self._settings)) is not None:
            remember(self._prints, found, (group.id, done.rollout.sample), self._settings.remembered)


def _digest(sealed: bytes) -> bytes:
    return blake3(sealed).digest(16)
