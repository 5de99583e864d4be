"""The groups that are wanted: which have free samples, which are complete, in the order in which they were offered.

    offered ---> free --lease--> leased --accepted--> done --all n--> ready --taken--> forgotten

A sample is in exactly one place. No clock, no leases, no nodes: `node.ledger.rules` moves samples.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable

from node.engines.base import SamplingParams
from node.ledger.messages import MAX_CAPACITY, MAX_TOKENS
from node.ledger.state import Group

__all__ = ["Pool", "check_offer"]


class Pool:
    """`groups`: all that are known, by id."""

    def __init__(self) -> None:
        self.groups: dict[bytes, Group] = {}
        self.next_order = 0
        """Of the next group offered."""
        self.freed = 0
        """Rises whenever samples become free."""
        self._open: list[tuple[int, bytes]] = []
        """Heap of (order, group) that may have free samples; entries that have none are skipped."""
        self._ready: dict[str, deque[bytes]] = {}
        self.to_come: dict[str, int] = {}
        """Samples that a session will still offer, of those that have said so."""

    def add(self, group: Group) -> None:
        """Take in a group as it is: a new one, or one that the book kept."""
        self.groups[group.id] = group
        self.next_order = max(self.next_order, group.order + 1)
        if group.free:
            self.freed += 1
            heapq.heappush(self._open, (group.order, group.id))
        if group.complete:
            self._ready.setdefault(group.session, deque()).append(group.id)

    def remove(self, group: bytes) -> Group | None:
        """Forget a group; it, if it was known."""
        found = self.groups.pop(group, None)
        if found is not None:
            self._not_ready(found)
        return found

    def free(self, group: Group, samples: Iterable[int]) -> None:
        """Samples of `group` that are neither leased nor done any more may be leased again."""
        if not group.free:
            heapq.heappush(self._open, (group.order, group.id))
        group.free.update(samples)
        self.freed += 1

    def completed(self, group: Group) -> None:
        """All of `group` is done."""
        self._ready.setdefault(group.session, deque()).append(group.id)

    def undo(self, group: Group, sample: int) -> None:
        """A sample of a group not yet handed over is worth nothing: it is to be drawn anew."""
        if group.complete:
            self._not_ready(group)
        del group.done[sample]
        self.free(group, (sample,))

    def reopen(self, session: str) -> None:
        """Hand over again what was on its way and never taken."""
        ready = self._ready.setdefault(session, deque())
        for group in sorted(self.groups.values(), key=lambda g: g.order):
            if group.session == session and group.handed_over:
                group.handed_over = False
                ready.append(group.id)

    def hand_over(self, session: str) -> Group | None:
        """The next complete group of `session`, or None. It stays known until it is taken."""
        ready = self._ready.get(session)
        if not ready:
            return None
        group = self.groups[ready.popleft()]
        if not ready:
            del self._ready[session]
        group.handed_over = True
        return group

    def open_groups(self, fits: Callable[[Group], bool]) -> Iterable[Group]:
        """Groups with free samples that fit, in order. Whoever iterates takes their samples before going on, or stops;
        those that do not fit stay where they are."""
        skipped: list[tuple[int, bytes]] = []
        try:
            while self._open:
                group = self.groups.get(self._open[0][1])
                if group is None or not group.free:
                    heapq.heappop(self._open)
                elif fits(group):
                    yield group
                    if group.free:
                        skipped.append(heapq.heappop(self._open))
                else:
                    skipped.append(heapq.heappop(self._open))
        finally:
            for entry in skipped:
                heapq.heappush(self._open, entry)

    def samples(self, session: str | None = None) -> int:
        """Samples that are open; and, of `session`, those of complete groups that it has not taken."""
        return sum(g.n for g in self.groups.values() if g.session == session or not g.complete)

    @property
    def wanted(self) -> int:
        """Samples that are free or leased, or known to come."""
        open_now = sum(len(group.free) + len(group.leased) for group in self.groups.values())
        return open_now + sum(self.to_come.values())

    @property
    def endless(self) -> bool:
        """There may be more than anybody has said, and none of it is waited for by a step that cannot begin before."""
        return any(group.max_lag and group.session not in self.to_come for group in self.groups.values())

    def _not_ready(self, group: Group) -> None:
        ready = self._ready.get(group.session)
        if ready is not None and group.id in ready:
            ready.remove(group.id)


def check_offer(prompt: bytes, n: int, sampling: SamplingParams) -> None:
    """Raises `ValueError` for work that no node could do."""
    if not 1 <= n <= MAX_CAPACITY:
        raise ValueError(f"n: {n} samples of one prompt; 1 to {MAX_CAPACITY} can be asked for")
    if not 4 <= len(prompt) <= 4 * MAX_TOKENS or sampling.max_tokens > MAX_TOKENS:
        raise ValueError(f"a prompt needs at least 1 token; prompt and completion have at most {MAX_TOKENS} each")
