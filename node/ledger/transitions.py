"""Moves samples between their places, and notes each move as a fact. Pure: whether one is due is decided elsewhere.

offered ---> free --lease--> leased --accepted--> done --all n--> ready --taken--> forgotten
              ^                |                    |
              +----requeued----+------discarded-----+
"""

import math

from node.ledger.assignment.leases import LeaseTable
from node.ledger.assignment.pool import Pool
from node.ledger.facts import Accepted, Discarded, Dropped, Fact, Leased, Offered, Requeued, Taken
from node.ledger.messages import Reason
from node.ledger.settings import Settings
from node.ledger.state import Done, Group, Lease, Node

__all__ = ["Transitions"]


class Transitions:
    """Groups, leases and nodes agree about where every sample is, after each of these methods."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = Pool()
        self.table = LeaseTable(settings.remembered)
        self.nodes: dict[bytes, Node] = {}
        self.facts: list[Fact] = []

    def node(self, key: bytes) -> Node:
        """What is known of a node; of one that was never heard of, nothing."""
        return self.nodes.setdefault(key, Node(key))

    def offer(self, group: Group) -> None:
        self.pool.add(group)
        self.facts.append(Offered(group))

    def drop(self, group: Group) -> list[Lease]:
        """Nobody wants it. Gives the leases that are void now."""
        self.pool.remove(group.id)
        leases = [self.table.leases[lease] for lease in sorted(set(group.leased.values()))]
        for done in group.done.values():
            self.waste(done.node, len(done.rollout.token_ids) // 4, Reason.WITHDRAWN)
        for lease in leases:  # nothing goes back to a group that is gone
            self.nodes[lease.node].outstanding -= len(lease.open)
            lease.open.clear()
            self._end(lease, Reason.WITHDRAWN)
        self.facts.append(Dropped(group.id))
        return leases

    def take(self, group: Group) -> None:
        """The trainer has it."""
        self.pool.remove(group.id)
        for done in group.done.values():
            node = self.node(done.node)
            node.used += 1
            node.used_tokens += len(done.rollout.token_ids) // 4
        self.facts.append(Taken(group.id))

    def grant(self, leases: list[Lease]) -> None:
        """They were dealt, and are in their places already."""
        self.facts.extend(Leased(lease) for lease in leases)

    def accept(self, lease: Lease, sample: int, done: Done, now: float) -> None:
        group, node = self.pool.groups[lease.group], self.nodes[lease.node]
        self._close(lease, (sample,), Reason.DUPLICATE)
        self.pool.finish(group, sample, done)
        tokens = len(done.rollout.token_ids) // 4
        node.accepted += 1
        node.tokens += tokens
        node.busy_tokens += tokens
        if math.isfinite(lease.granted):
            node.token_s.observe((now - lease.granted) / tokens)
        self._measure(node, now)
        node.liveness.flow(now, counted=False)
        self.facts.append(Accepted(group.id, sample, done))

    def requeue(self, lease: Lease, why: Reason, now: float, samples: tuple[int, ...] | None = None) -> None:
        """What is open of `lease` (or these) is free again."""
        samples = tuple(sorted(lease.open)) if samples is None else samples
        group = self.pool.groups[lease.group]
        self._close(lease, samples, why)
        self._measure(self.nodes[lease.node], now)
        self.facts.append(Requeued(lease.id, group.id, samples, str(why)))
        self.pool.free(group, samples)

    def discard(self, group: Group, sample: int, why: Reason) -> None:
        """What was accepted, and not handed over, is worth nothing: it is free again."""
        done = group.done[sample]
        self.waste(done.node, len(done.rollout.token_ids) // 4, why)
        self.pool.undo(group, sample)
        self.facts.append(Discarded(group.id, sample, str(why)))

    def waste(self, node: bytes, tokens: int, why: Reason) -> None:
        """A sample was drawn and will never be used."""
        found = self.node(node)
        found.unused[why] += 1
        found.unused_tokens += tokens

    def _close(self, lease: Lease, samples: tuple[int, ...], why: Reason) -> None:
        group, node = self.pool.groups[lease.group], self.nodes[lease.node]
        lease.open.difference_update(samples)
        node.outstanding -= len(samples)
        for sample in samples:
            del group.leased[sample]
        if not lease.open:
            self._end(lease, why)

    def _end(self, lease: Lease, why: Reason) -> None:
        self.table.end(lease, why)
        self.nodes[lease.node].leases.discard(lease.id)
        if why is Reason.DUPLICATE:  # all of it was delivered
            self.nodes[lease.node].reputation.note_lease(False, self.settings)

    def _measure(self, node: Node, now: float) -> None:
        """Tokens by the time in which the node had work, at the end of each such time, or every few seconds of it."""
        busy_s = now - node.busy_since
        if not node.outstanding or busy_s >= self.settings.busy_window_s:
            node.rate.observe(node.busy_tokens, busy_s)
            node.busy_since, node.busy_tokens = now, 0
