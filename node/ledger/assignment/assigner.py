"""Deals free samples to nodes: how many, which, until when. Pure: rules that choose, none that judge."""

from collections import OrderedDict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from node.ledger.assignment.fair_share import duration_s, finishable, sample_s, share
from node.ledger.assignment.leases import LeaseTable, remember
from node.ledger.assignment.pool import Pool
from node.ledger.assignment.use import Use
from node.ledger.assignment.version_timing import Average, VersionTiming
from node.ledger.messages import Reason
from node.ledger.settings import Settings
from node.ledger.state import Group, Head, Lease, Node
from node.ledger.trust.judge import lag_reason

__all__ = ["MOST_LEASES", "Assigner"]

MOST_LEASES: Final = 256
"""Of one request at once, at 15 microseconds each; a node that has room for more gets the next in the next turn."""
MOST_PROMPT_BYTES: Final = 4 << 20
"""Of their prompts together: a request of a hundred bytes must not make a hundred megabytes leave."""


@dataclass(slots=True)
class _Hand:
    """What is being dealt to a node: it has room for `capacity` sequences, and its share is `count` of them."""

    node: Node
    capacity: int
    count: int
    limits: dict[int, int] = field(default_factory=dict)
    """By the lag that a group allows: what the node's version lets it finish."""
    why: Reason = Reason.NO_WORK
    """There is no more for it."""
    held: int | None = None
    """Sequences that all members hold at once; None: not counted yet."""
    whole: int = field(init=False)
    """Groups of so many will fit in, now or soon."""
    trial: bool = field(init=False)
    """The node hangs, as far as is known: one group at a time, of which nobody else has drawn a part that could age."""

    def __post_init__(self) -> None:
        self.whole = min(self.node.capacity, self.count + self.node.outstanding)
        self.trial = self.node.liveness.stalled

    @property
    def empty(self) -> bool:
        return self.count <= 0 or (self.trial and self.node.outstanding > 0)

    def shuns(self, group: Group) -> bool:
        return self.trial and bool(group.done or group.leased)

    def part(self, group: Group) -> int:
        """How many of its free samples to take now."""
        free, room = len(group.free), min(self.capacity, self.limits[group.max_lag])
        if group.urgent:
            return min(free, self.capacity)
        if free <= room and (free <= self.count or 2 * self.count >= group.n or group.whole or self.trial):
            return free
        if self.node.outstanding and (free <= self.whole or group.whole):
            return 0
        return free if group.whole else min(self.count, room)

    def take(self, samples: int) -> None:
        self.count -= samples
        self.capacity -= samples
        for lag in self.limits:
            self.limits[lag] -= samples


class Assigner:
    """Moves samples of `pool` from free to leased, and leases into `table`. `nodes`, `members`: the ledger's own."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        table: LeaseTable,
        nodes: Mapping[bytes, Node],
        members: Set[bytes],
        uses: Mapping[str, Use],
    ) -> None:
        self.settings = settings
        self.version_timing = VersionTiming()
        self.length = Average()
        """Tokens of a sample, lately."""
        self._pool = pool
        self._table = table
        self._nodes = nodes
        self._members = members
        self._uses = uses
        self._homes: OrderedDict[bytes, bytes] = OrderedDict()
        """affinity -> the node that has its prefix"""

    def assign(self, node: Node, head: Head, lag: int, capacity: int, now: float) -> tuple[list[Lease], Reason]:
        """Leases for `node`, which has room for `capacity` sequences; and, where there are none, why. `lag`: the most
        that any work allows.

        A node that holds the head gets its share. One that is late for it, or is known to get the next one so late that
        the head will be too old then, gets, of work that its version may still do, what it should finish before that
        version is too old, and waits for the next if that is nothing. Groups are not divided where that can be helped:
        what is left of one whose other samples died with their node may be too old before these are drawn again.
        """
        hand = _Hand(node, capacity, min(capacity, self._share(node, head, lag, now)))
        leases: list[Lease] = []
        prompts = 0
        if hand.empty:
            return leases, hand.why
        for group in self._pool.open_groups(lambda group: self._fits(hand, group, head, now)):
            samples = tuple(sorted(group.free)[: hand.part(group)])
            hand.take(len(samples))
            leases.append(self._lease(node, head, group, samples, now))
            prompts += len(group.prompt)
            if hand.empty or len(leases) >= MOST_LEASES or prompts >= MOST_PROMPT_BYTES:
                break
        for lease in leases:  # they are drawn side by side, so each takes as long as all
            lease.duration_s = duration_s(node, self._pool.groups[lease.group].sampling.max_tokens, self.settings)
            self._table.renew(lease, now + lease.duration_s)
        return leases, hand.why

    def _fits(self, hand: "_Hand", group: Group, head: Head, now: float) -> bool:
        """May some of `group` go into this hand? Notes why not, where it is for the node's version."""
        node = hand.node
        assert node.version is not None
        if not group.fits(node.abilities):
            return False
        if node.key in group.refusers or self._kept_for_another(group, node.key, now) or hand.shuns(group):
            return False
        reason = lag_reason(node.version, head, group.max_lag)
        if reason is None:
            if group.max_lag not in hand.limits:
                hand.limits[group.max_lag] = self._limit(node, head, group, hand.capacity, now)
            late = self._too_late(node, head, group, now) if group.urgent else hand.limits[group.max_lag] <= 0
            reason = Reason.LATE if late else None
        if reason is None and not group.leased and not group.done:
            reason = self._not_used(hand, group, head)
        if reason is not None:
            hand.why = reason
            return False
        return hand.part(group) > 0

    def _not_used(self, hand: "_Hand", group: Group, head: Head) -> Reason | None:
        """Why `group` may not be begun now: its trainer has as much as it will take before that is too old."""
        use, version = self._uses.get(group.session), hand.node.version
        assert version is not None
        if use is None:
            return None
        if hand.held is None:
            hand.held = sum(self._nodes[key].capacity for key in self._members if key in self._nodes)
        spare = group.max_lag - (head.version - version[1]) if version[0] == head.epoch else 0
        most = use.most_begun(spare, hand.held)
        if most is None or self._pool.begun(group.session) - use.hand < most:
            return None
        return Reason.LATE if version < head.name and most < 1 else Reason.NO_WORK

    def _too_late(self, node: Node, head: Head, group: Group, now: float) -> bool:
        """One more sample, begun at once, would not be done while its version counts."""
        assert node.version is not None
        if node.version == head.name:
            return False
        return self.version_timing.usable_s(node.version, head.name, group.max_lag, now) < sample_s(
            node, self._tokens(group)
        )

    def _limit(self, node: Node, head: Head, group: Group, capacity: int, now: float) -> int:
        """How many samples like those of `group` the node's version allows it to take."""
        version = node.version
        assert version is not None
        if version == head.name and not self.version_timing.late_for_next(node.key, group.max_lag):
            return capacity
        usable_s = self.version_timing.usable_s(version, head.name, group.max_lag, now)
        found = finishable(node, usable_s, self._tokens(group))
        idle = version == head.name and not node.outstanding  # there is none newer that it could wait for
        return max(found, 1) if idle else found

    def _tokens(self, group: Group) -> float:
        """Of a sample of `group`, as far as is known."""
        return group.sampling.max_tokens if self.length.mean is None else self.length.mean

    def _share(self, node: Node, head: Head, lag: int, now: float) -> int:
        asking = [
            other
            for key, other in self._nodes.items()
            if key in self._members and (other.outstanding or now - other.asked <= self.settings.asking_ttl_s)
        ]
        waits_s = [0.0 if other is node else self._wait_s(other, head, lag, now) for other in asking]
        most = self.settings.open_samples(sum(other.capacity for other in asking))
        endless = self._pool.samples() >= most and self._pool.endless
        """As much is open as back-pressure allows: the trainer has more."""
        return share(node, asking, self._pool.wanted, waits_s, self.length.mean, endless=endless)

    def _wait_s(self, node: Node, head: Head, lag: int, now: float) -> float:
        """How long until it may begin: until its engine should hold the head, where what it holds is too old."""
        if node.version is None or lag_reason(node.version, head, lag) is not Reason.TOO_OLD:
            return 0.0
        return self.version_timing.arrival_s(node.key, head.name, now) or 0.0

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
            node.liveness.begin(now)
        node.outstanding += len(samples)
        lease = Lease(
            id=self._table.next_id,
            token=self._table.next_id,
            node=node.key,
            group=group.id,
            samples=samples,
            granted=now,
            deadline=now,
            duration_s=0.0,
            minimum=(head.epoch, max(0, head.version - group.max_lag)),
            open=set(samples),
            begun_at=head.name,
        )
        self._table.add(lease)
        node.leases.add(lease.id)
        self._pool.lease(group, samples, lease.id)
        if group.affinity:
            remember(self._homes, group.affinity, node.key, self.settings.sticky_sessions)
            self._homes.move_to_end(group.affinity)
        return lease
