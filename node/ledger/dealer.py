"""Deals free samples to nodes: how many, which, until when. Pure: rules that choose, none that judge."""

from collections import OrderedDict
from collections.abc import Mapping, Set

from node.engines.base import Version
from node.ledger.judge import lag_reason
from node.ledger.leases import LeaseTable, remember
from node.ledger.messages import Reason
from node.ledger.pool import Pool
from node.ledger.settings import Settings
from node.ledger.shares import duration_s, finishable, share
from node.ledger.state import Group, Head, Lease, Node
from node.ledger.timetable import Average, Timetable

__all__ = ["Dealer"]


class Dealer:
    """Moves samples of `pool` from free to leased, and leases into `table`. `nodes`, `members`: the ledger's own."""

    def __init__(
        self, settings: Settings, pool: Pool, table: LeaseTable, nodes: Mapping[bytes, Node], members: Set[bytes]
    ) -> None:
        self.settings = settings
        self.timetable = Timetable()
        self.length = Average()
        """Tokens of a sample, lately."""
        self._pool = pool
        self._table = table
        self._nodes = nodes
        self._members = members
        self._homes: OrderedDict[bytes, bytes] = OrderedDict()
        """affinity -> the node that has its prefix"""

    def deal(self, node: Node, version: Version, head: Head, capacity: int, now: float) -> tuple[list[Lease], Reason]:
        """Leases for `node`, whose engine holds `version` and which has room for `capacity` sequences; and, where there
        are none, why.

        A node that holds the head gets its share. One that is late for it gets, of work that its version may still do,
        what it should finish before that version is too old, and waits for the next if that is nothing.
        """
        count = min(capacity, self._share(node, now))
        leases: list[Lease] = []
        why = Reason.NO_WORK
        limits: dict[int, int] = {}

        def limit(group: Group) -> int:
            if version == head.name:
                return count
            if group.max_lag not in limits:
                usable_s = self.timetable.usable_s(version, head.name, group.max_lag, now)
                tokens = group.sampling.max_tokens if self.length.mean is None else self.length.mean
                limits[group.max_lag] = finishable(node, usable_s, tokens)
            return limits[group.max_lag]

        def fits(group: Group) -> bool:
            nonlocal why
            if node.key in group.refusers or self._kept_for_another(group, node.key, now):
                return False
            reason = lag_reason(version, head, group.max_lag)
            if reason is None and limit(group) <= 0:
                reason = Reason.LATE
            why = reason or why
            return reason is None

        if count > 0:
            for group in self._pool.open_groups(fits):
                samples = tuple(sorted(group.free)[: min(count, limit(group))])
                count -= len(samples)
                for lag in limits:
                    limits[lag] -= len(samples)
                leases.append(self._lease(node, head, group, samples, now))
                if count <= 0:
                    break
        return leases, why

    def _share(self, node: Node, now: float) -> int:
        asking = [
            other
            for key, other in self._nodes.items()
            if key in self._members and (other.outstanding or now - other.asked <= self.settings.asking_ttl_s)
        ]
        return share(node, asking, self._pool.wanted)

    def _kept_for_another(self, group: Group, node: bytes, now: float) -> bool:
        """Another node has this session's prefix in its cache, room for it, and may ask any moment."""
        home = self._homes.get(group.affinity) if group.affinity else None
        if home is None or home == node or home not in self._members:
            return False
        found = self._nodes[home]
        return found.outstanding < found.capacity and now - group.since < self.settings.sticky_wait_s

    def _lease(self, node: Node, head: Head, group: Group, samples: tuple[int, ...], now: float) -> Lease:
        if not node.outstanding:
            node.busy_since, node.busy_tokens = now, 0
        node.outstanding += len(samples)
        duration = duration_s(node, group.sampling.max_tokens, self.settings)
        lease = Lease(
            id=self._table.next_id,
            token=self._table.next_id,
            node=node.key,
            group=group.id,
            samples=samples,
            granted=now,
            deadline=now + duration,
            duration_s=duration,
            minimum=(head.epoch, max(0, head.version - group.max_lag)),
            open=set(samples),
        )
        self._table.add(lease)
        node.leases.add(lease.id)
        group.free.difference_update(samples)
        group.leased.update(dict.fromkeys(samples, lease.id))
        if group.affinity:
            remember(self._homes, group.affinity, node.key, self.settings.sticky_sessions)
            self._homes.move_to_end(group.affinity)
        return lease
