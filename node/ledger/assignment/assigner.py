"""Assigns free samples to nodes: how many, which, until when. Pure."""

from collections import OrderedDict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from node.engines.base import Version
from node.ledger.assignment.consumption import Consumption
from node.ledger.assignment.fair_share import duration_s, finishable, sample_s, share
from node.ledger.assignment.leases import remember
from node.ledger.assignment.version_timing import Average, VersionTiming
from node.ledger.messages import Reason
from node.ledger.part_history import BASE
from node.ledger.state import Group, Head, LiveLease, Node
from node.ledger.transitions import Transitions

__all__ = ["MOST_LEASES", "WorkAssigner"]

MOST_LEASES: Final = 256
"""Leases granted to one request at once, at 15 microseconds each. A node with room for more gets them in the next
turn."""
MOST_PROMPT_BYTES: Final = 4 << 20
"""The prompts of these leases together: a request of a hundred bytes must not cause a hundred megabytes of answers."""


@dataclass(slots=True)
class _Quota:
    """What one node may still get in one assignment: it has room for `capacity` sequences, and its share is `count`."""

    node: Node
    capacity: int
    count: int
    limits: dict[tuple[str, int], int] = field(default_factory=dict)
    """By the part and the lag that a group allows: how many samples the node can finish while its version is young
    enough."""
    why: Reason = Reason.NO_WORK
    """Why there is no more for the node."""
    held: int | None = None
    """Sequences that all members hold at once; None: not counted yet."""
    whole: int = field(init=False)
    """The node has, or soon has, room for groups of at most this many samples."""
    trial: bool = field(init=False)
    """The node stalled: it gets one group at a time, of which no other node has a sample that could become too old."""

    def __post_init__(self) -> None:
        self.whole = min(self.node.capacity, self.count + self.node.outstanding)
        self.trial = self.node.liveness.stalled

    @property
    def spent(self) -> bool:
        return self.count <= 0 or (self.trial and self.node.outstanding > 0)

    def avoids(self, group: Group) -> bool:
        return self.trial and bool(group.done or group.leased)

    def part(self, group: Group) -> int:
        """How many of the group's free samples to lease now."""
        free, room = len(group.free), min(self.capacity, self.limits[group.adapter, group.max_lag])
        if group.urgent:
            return min(free, self.capacity)
        if free <= room and (free <= self.count or 2 * self.count >= group.n or group.whole or self.trial):
            return free
        if self.node.outstanding and (free <= self.whole or group.whole):
            return 0
        return free if group.whole else min(self.count, room)

    def spend(self, samples: int) -> None:
        self.count -= samples
        self.capacity -= samples
        for kind in self.limits:
            self.limits[kind] -= samples


class WorkAssigner:
    """Leases free samples to nodes. `members` and `consumption` belong to the ledger."""

    def __init__(self, transitions: Transitions, members: Set[bytes], consumption: Mapping[str, Consumption]) -> None:
        self.version_timing = VersionTiming()
        self.length = Average()
        """Recent tokens per sample."""
        self._transitions = transitions
        self._settings = transitions.settings
        self._pool, self._nodes = transitions.pool, transitions.nodes
        self._parts = transitions.parts
        self._members = members
        self._consumption = consumption
        self._affinity_nodes: OrderedDict[bytes, bytes] = OrderedDict()
        """affinity -> the node that has its prefix in its cache"""

    def assign(self, node: Node, head: Head, lag: int, capacity: int, now: float) -> tuple[list[LiveLease], Reason]:
        """Leases for `node`, which has room for `capacity` sequences, and the reason if there are none.

        `lag` is the largest lag that any work allows. A node that holds the head gets its share. A node whose version
        is older, or which is known to get the next version only when the head is too old, gets only work that its
        version may still do, and only as much as it should finish before that version is too old. If that is nothing,
        it waits for the next version. Groups are not divided where that can be avoided: when a node that has a part of
        a group is lost, the accepted rest may be too old before the lost samples are generated again.
        """
        quota = _Quota(node, capacity, min(capacity, self._share(node, head, lag, now)))
        leases: list[LiveLease] = []
        prompts = 0
        if quota.spent:
            return leases, quota.why
        loaded = {BASE, *node.adapters}
        for group in self._pool.open_groups(lambda group: self._fits(quota, group, head, now), loaded.__contains__):
            samples = tuple(sorted(group.free)[: quota.part(group)])
            quota.spend(len(samples))
            leases.append(self._transitions.lease(node, head, group, samples, now))
            self._remember_affinity(group, node)
            prompts += len(group.prompt)
            if quota.spent or len(leases) >= MOST_LEASES or prompts >= MOST_PROMPT_BYTES:
                break
        for lease in leases:  # they are generated side by side, so each takes as long as all
            lease.duration_s = duration_s(node, self._pool.groups[lease.group].sampling.max_tokens, self._settings)
            self._transitions.table.renew(lease, now + lease.duration_s)
        return leases, quota.why

    def _fits(self, quota: _Quota, group: Group, head: Head, now: float) -> bool:
        """Whether the node may get samples of `group`. Sets `quota.why` where its version is the reason against."""
        node = quota.node
        assert node.version is not None
        if not group.fits(node):
            return False
        if node.key in group.refusers or self._kept_for_another(group, node.key, now) or quota.avoids(group):
            return False
        reason = group.lag_reason(node.version, head, self._parts)
        if reason is None:
            kind = group.adapter, group.max_lag
            if kind not in quota.limits:
                quota.limits[kind] = self._limit(node, head, group, quota.capacity, now)
            late = self._too_late(node, head, group, now) if group.urgent else quota.limits[kind] <= 0
            reason = Reason.LATE if late else None
        if reason is None and not group.leased and not group.done:
            reason = self._not_consumed(quota, group, head)
        if reason is not None:
            quota.why = reason
            return False
        return quota.part(group) > 0

    def _not_consumed(self, quota: _Quota, group: Group, head: Head) -> Reason | None:
        """Why `group` may not be begun now: its trainer has as much as it will take before that is too old."""
        consumption, version = self._consumption.get(group.session), quota.node.version
        assert version is not None
        if consumption is None:
            return None
        if quota.held is None:
            quota.held = sum(self._nodes[key].capacity for key in self._members if key in self._nodes)
        spare = max(0, self._spare(version, head, group))
        most = consumption.most_begun(spare, quota.held)
        if most is None or self._pool.begun(group.session) - consumption.hand < most:
            return None
        return Reason.LATE if most < 1 and self._is_behind(version, head, group) else Reason.NO_WORK

    def _spare(self, version: Version, head: Head, group: Group) -> int:
        """How many more versions leave tokens of `version` young enough for `group`; -1: they are too old."""
        if version[0] != head.epoch:
            return -1
        return group.max_lag - self._parts.since(group.adapter, version, group.counted_from(head))

    def _is_behind(self, version: Version, head: Head, group: Group) -> bool:
        """Whether a newer version would draw otherwise for `group`."""
        return version[0] != head.epoch or self._parts.since(group.adapter, version, head.name) > 0

    def _too_late(self, node: Node, head: Head, group: Group, now: float) -> bool:
        """Whether one more sample, begun at once, would finish only after the node's version is too old."""
        assert node.version is not None
        if not self._is_behind(node.version, head, group):
            return False
        usable_s = self.version_timing.usable_s(self._spare(node.version, head, group), now, group.adapter)
        return usable_s < sample_s(node, self._tokens(group))

    def _limit(self, node: Node, head: Head, group: Group, capacity: int, now: float) -> int:
        """How many samples like those of `group` the node can finish before its version is too old."""
        version = node.version
        assert version is not None
        newest = not self._is_behind(version, head, group)
        if newest and not self.version_timing.late_for_next(node.key, group.max_lag, group.adapter):
            return capacity
        usable_s = self.version_timing.usable_s(self._spare(version, head, group), now, group.adapter)
        found = finishable(node, usable_s, self._tokens(group))
        idle = newest and not node.outstanding  # there is no newer version that it could wait for
        return max(found, 1) if idle else found

    def _tokens(self, group: Group) -> float:
        """The expected length of a sample of `group`."""
        return group.sampling.max_tokens if self.length.mean is None else self.length.mean

    def _share(self, node: Node, head: Head, lag: int, now: float) -> int:
        asking = [
            other
            for key, other in self._nodes.items()
            if key in self._members and (other.outstanding or now - other.asked <= self._settings.asking_ttl_s)
        ]
        waits_s = [0.0 if other is node else self._wait_s(other, head, lag, now) for other in asking]
        most = self._settings.open_samples(sum(other.capacity for other in asking))
        # When as much is open as back-pressure allows, the trainer has more.
        endless = self._pool.samples() >= most and self._pool.endless
        return share(node, asking, self._pool.wanted, waits_s, self.length.mean, endless=endless)

    def _wait_s(self, node: Node, head: Head, lag: int, now: float) -> float:
        """Seconds until the node may begin: until its engine should hold the head, if its present version is too
        old."""
        if node.version is None or head.lag_reason(node.version, lag, self._parts) is not Reason.TOO_OLD:
            return 0.0
        return self.version_timing.arrival_s(node.key, head.name, now) or 0.0

    def _kept_for_another(self, group: Group, node: bytes, now: float) -> bool:
        """Whether another node has the group's prefix in its cache, has room for it, and should ask soon."""
        kept_for = self._affinity_nodes.get(group.affinity) if group.affinity else None
        if kept_for is None or kept_for == node or kept_for not in self._members:
            return False
        found = self._nodes[kept_for]
        return found.outstanding < found.capacity and now - group.since < self._settings.sticky_wait_s

    def _remember_affinity(self, group: Group, node: Node) -> None:
        if group.affinity:
            remember(self._affinity_nodes, group.affinity, node.key, self._settings.sticky_sessions)
            self._affinity_nodes.move_to_end(group.affinity)
