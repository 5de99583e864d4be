"""The changes of a sample's state, each noted as a fact. Pure: the callers decide whether a change is due.

offered ---> free --lease--> leased --accepted--> done --all n--> ready --taken--> forgotten
              ^                |                    |
              +----requeued----+------discarded-----+
"""

import math

from node.ledger.assignment.draws import is_portable
from node.ledger.assignment.leases import LeaseTable
from node.ledger.assignment.pool import Pool
from node.ledger.facts import Accepted, Cut, Discarded, Dropped, Fact, Leased, Offered, Requeued, Taken
from node.ledger.messages import Reason
from node.ledger.part_history import PartHistory
from node.ledger.settings import Settings
from node.ledger.state import AcceptedRollout, Group, Head, LiveLease, Node
from node.ledger.trust.reward_functions import declared_ability

__all__ = ["Transitions"]


class Transitions:
    """Owns the pool of groups, the table of leases, the nodes, what each version changed, and the facts that are not
    written yet.

    After each method, groups, leases and nodes agree on the state of every sample.
    """

    def __init__(self, settings: Settings, head: Head) -> None:
        """`head`: the newest version."""
        self.settings = settings
        self.parts = PartHistory(head.name)
        self.pool = Pool()
        self.table = LeaseTable(settings.remembered)
        self.nodes: dict[bytes, Node] = {}
        self.facts: list[Fact] = []

    def take_facts(self) -> list[Fact]:
        """The facts since the last call, in order."""
        facts, self.facts = self.facts, []
        return facts

    def node(self, key: bytes) -> Node:
        """The record of a node; a new one for a node that was never heard of."""
        return self.nodes.setdefault(key, Node(key))

    def offer(self, group: Group) -> None:
        """A trainer or client wants `group`."""
        self.pool.add(group)
        self.facts.append(Offered(group))

    def drop(self, group: Group) -> list[LiveLease]:
        """Nobody wants `group` any more. Returns the leases that are void now."""
        self.pool.remove(group.id)
        leases = [self.table.leases[lease] for lease in sorted(set(group.leased.values()))]
        for done in group.done.values():
            self.count_unused(done.node, done.rollout.length, Reason.WITHDRAWN)
        self._void(leases)
        self.facts.append(Dropped(group.id))
        return leases

    def cut(self, group: Group) -> list[LiveLease]:
        """The samples of `group` that are not done are no longer wanted: it is complete. Returns the leases that are
        void now."""
        leases = [self.table.leases[lease] for lease in sorted(set(group.leased.values()))]
        self._void(leases)
        self.pool.cut(group)
        self.facts.append(Cut(group.id, tuple(sorted(group.dropped))))
        return leases

    def _void(self, leases: list[LiveLease]) -> None:
        """End leases whose samples do not become free, because nobody wants them any more."""
        for lease in leases:
            self.nodes[lease.node].outstanding -= len(lease.open)
            lease.open.clear()
            self._end(lease, Reason.WITHDRAWN)

    def take(self, group: Group) -> None:
        """The trainer has `group`."""
        self.pool.remove(group.id)
        for done in group.done.values():
            self.node(done.node).count_used(done.rollout.length)
        self.facts.append(Taken(group.id))

    def lease(self, node: Node, head: Head, group: Group, samples: tuple[int, ...], now: float) -> LiveLease:
        """Lease free `samples` of `group` to `node`. The caller sets the lease's duration and deadline."""
        node.begin_work(len(samples), now)
        lease = LiveLease(
            id=self.table.next_id,
            token=self.table.next_id,
            node=node.key,
            group=group.id,
            samples=samples,
            granted=now,
            deadline=now,
            duration_s=0.0,
            minimum=self.parts.oldest(group.adapter, group.counted_from(head), group.max_lag),
            open=set(samples),
            portable=is_portable(group, node, self.settings),
            reward=declared_ability(group, node),
            begun_at=head.name,
        )
        self.table.add(lease)
        node.leases.add(lease.id)
        self.pool.lease(group, samples, lease.id)
        self.facts.append(Leased(lease))
        return lease

    def adopt_lease(self, lease: LiveLease, now: float) -> Node:
        """Take in a lease that the book kept, whose samples are marked in its group already. Returns its node."""
        self.table.add(lease)
        node = self.node(lease.node)
        node.leases.add(lease.id)
        node.outstanding += len(lease.open)
        node.busy_since = now
        return node

    def accept(self, lease: LiveLease, sample: int, done: AcceptedRollout, now: float) -> None:
        """`done` counts for `sample`, which is open in `lease`."""
        group, node = self.pool.groups[lease.group], self.nodes[lease.node]
        self._close(lease, (sample,), Reason.DUPLICATE)
        self.pool.finish(group, sample, done)
        tokens = done.rollout.length
        node.count_accepted(tokens)
        if math.isfinite(lease.granted):
            node.token_s.observe((now - lease.granted) / tokens)
        node.measure(now, self.settings.busy_window_s)
        node.liveness.flow(now, counted=False)
        self.facts.append(Accepted(group.id, sample, done))

    def requeue(self, lease: LiveLease, why: Reason, now: float, samples: tuple[int, ...] | None = None) -> None:
        """The open samples of `lease`, or only `samples`, are free again."""
        samples = tuple(sorted(lease.open)) if samples is None else samples
        group = self.pool.groups[lease.group]
        self._close(lease, samples, why)
        self.nodes[lease.node].measure(now, self.settings.busy_window_s)
        self.facts.append(Requeued(lease.id, group.id, samples, str(why)))
        self.pool.free(group, samples)

    def discard(self, group: Group, sample: int, why: Reason) -> None:
        """The accepted rollout of `sample` no longer counts; the sample is free again."""
        done = group.done[sample]
        self.count_unused(done.node, done.rollout.length, why)
        self.pool.undo(group, sample)
        self.facts.append(Discarded(group.id, sample, str(why)))

    def count_unused(self, node: bytes, tokens: int, why: Reason) -> None:
        """A rollout of `node` was generated and will never be used."""
        self.node(node).count_unused(tokens, why)

    def _close(self, lease: LiveLease, samples: tuple[int, ...], why: Reason) -> None:
        group, node = self.pool.groups[lease.group], self.nodes[lease.node]
        lease.open.difference_update(samples)
        node.outstanding -= len(samples)
        self.pool.end_leased(group, samples)
        if not lease.open:
            self._end(lease, why)

    def _end(self, lease: LiveLease, why: Reason) -> None:
        self.table.end(lease, why)
        node = self.nodes[lease.node]
        node.leases.discard(lease.id)
        if why is Reason.DUPLICATE:  # its last open sample was accepted
            node.reputation.note_lease(False, self.settings)
