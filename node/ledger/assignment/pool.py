"""The groups that are wanted: which have free samples, which are complete, in the order in which they were offered.

    offered ---> free --lease--> leased --accepted--> done --all n--> ready --taken--> forgotten

A sample is in exactly one place. No clock, no leases, no nodes: `node.ledger.rules` moves samples.
"""

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any, Final

from node.engines.base import SamplingParams
from node.ledger.messages import MAX_CAPACITY, MAX_TOKENS
from node.ledger.state import Done, Group

__all__ = ["Pool", "check_offer"]

MOST_SKIPPED: Final = 256
"""Groups of one session that one request may look at in vain, at some four microseconds each. What does not fit is most
often the session's version, or whom its engine refuses, and the next of its groups would not fit either."""


class Pool:
    """`groups`: all that are known, by id."""

    def __init__(self) -> None:
        self.groups: dict[bytes, Group] = {}
        self.next_order = 0
        """Of the next group offered."""
        self.freed = 0
        """Rises whenever samples become free."""
        self._open: dict[str, list[tuple[int, bytes]]] = {}
        """By session, a heap of (order, group) that may have free samples; entries that have none are skipped."""
        self._ready: dict[str, list[tuple[int, bytes]]] = {}
        """By session, (order, group) of complete groups that are not handed over: the one offered first comes first."""
        self.to_come: dict[str, int] = {}
        """Samples that a session will still offer, of those that have said so."""
        self.lags: Counter[int] = Counter()
        """Groups by the lag that they allow. This and what follows is counted as samples move: every request for work
        asks, and there may be 65,536 groups."""
        self._lagging: Counter[str] = Counter()
        """Groups that allow a lag, by session."""
        self._not_done = 0
        """Samples that are free or leased."""
        self._incomplete = 0
        """Samples, those that are done included, of groups that are not complete."""
        self._complete: Counter[str] = Counter()
        """Samples of complete groups, by session."""
        self._held: Counter[str] = Counter()
        """Samples of all groups, by session."""
        self._free: Counter[str] = Counter()
        """Samples that are free, by session."""

    def add(self, group: Group) -> None:
        """Take in a group as it is: a new one, or one that the book kept."""
        self.groups[group.id] = group
        self.next_order = max(self.next_order, group.order + 1)
        if group.free:
            self.freed += 1
            heapq.heappush(self._open.setdefault(group.session, []), (group.order, group.id))
        self._count(group, 1)
        if group.complete:
            self._is_ready(group)

    def remove(self, group: bytes) -> Group | None:
        """Forget a group; it, if it was known."""
        found = self.groups.pop(group, None)
        if found is not None:
            self._not_ready(found)
            self._count(found, -1)
        return found

    def finish(self, group: Group, sample: int, done: Done) -> None:
        """A sample of `group` is done, and with it the group perhaps."""
        group.done[sample] = done
        self._not_done -= 1
        if group.complete:
            self._incomplete -= group.n
            _add(self._complete, group.session, group.n)
            self._is_ready(group)

    def _count(self, group: Group, sign: int) -> None:
        """`group` came (1) or goes (-1)."""
        self._not_done += sign * (group.n - len(group.done))
        _add(self._held, group.session, sign * group.n)
        _add(self._free, group.session, sign * len(group.free))
        _add(self.lags, group.max_lag, sign)
        if group.max_lag:
            _add(self._lagging, group.session, sign)
        if group.complete:
            _add(self._complete, group.session, sign * group.n)
        else:
            self._incomplete += sign * group.n

    def free(self, group: Group, samples: Iterable[int]) -> None:
        """Samples of `group` that are neither leased nor done any more may be leased again."""
        if not group.free:
            heapq.heappush(self._open.setdefault(group.session, []), (group.order, group.id))
        before = len(group.free)
        group.free.update(samples)
        _add(self._free, group.session, len(group.free) - before)
        self.freed += 1

    def lease(self, group: Group, samples: Iterable[int], lease: int) -> None:
        """Free samples of `group` are leased now."""
        before = len(group.free)
        group.free.difference_update(samples)
        group.leased.update(dict.fromkeys(samples, lease))
        _add(self._free, group.session, len(group.free) - before)

    def undo(self, group: Group, sample: int) -> None:
        """A sample of a group not yet handed over is worth nothing: it is to be drawn anew."""
        if group.complete:
            self._not_ready(group)
            self._incomplete += group.n
            _add(self._complete, group.session, -group.n)
        del group.done[sample]
        self._not_done += 1
        self.free(group, (sample,))

    def reopen(self, session: str) -> None:
        """Hand over again what was on its way and never taken."""
        for group in self.groups.values():
            if group.session == session and group.handed_over:
                group.handed_over = False
                self._is_ready(group)

    def hand_over(self, session: str, wanted: Container[bytes] | None = None) -> Group | None:
        """Of the complete groups of `session` (None: all; else those `wanted`) the one offered first, or None. It stays
        known until it is taken."""
        ready = self._ready.get(session, [])
        found = next((entry for entry in ready if wanted is None or entry[1] in wanted), None)
        if found is None:
            return None
        ready.remove(found)
        group = self.groups[found[1]]
        if not ready:
            del self._ready[session]
        group.handed_over = True
        return group

    def open_groups(self, fits: Callable[[Group], bool]) -> Iterable[Group]:
        """Groups with free samples that fit, in order. Whoever iterates takes their samples before going on, or stops;
        those that do not fit stay where they are, and `MOST_SKIPPED` of them end the search in their session."""
        skipped: dict[str, list[tuple[int, bytes]]] = {}
        looked_at = set(self._open)
        try:
            while looked_at:
                session = min(looked_at, key=lambda name: self._open[name][0])
                heap = self._open[session]
                group = self.groups.get(heap[0][1])
                if group is None or not group.free:
                    heapq.heappop(heap)
                elif fits(group):
                    yield group
                    if group.free:
                        skipped.setdefault(session, []).append(heapq.heappop(heap))
                else:
                    skipped.setdefault(session, []).append(heapq.heappop(heap))
                if not heap or len(skipped.get(session, ())) >= MOST_SKIPPED:
                    looked_at.discard(session)
        finally:
            for session, entries in skipped.items():
                for entry in entries:
                    heapq.heappush(self._open[session], entry)
            for session in [session for session, heap in self._open.items() if not heap]:
                del self._open[session]

    def samples(self, session: str | None = None) -> int:
        """Samples that are open; and, of `session`, those of complete groups that it has not taken."""
        return self._incomplete + (0 if session is None else self._complete[session])

    def held(self, session: str) -> int:
        """Samples that `session` has asked for and not taken."""
        return self._held[session]

    def begun(self, session: str) -> int:
        """Of these, those that are leased or done."""
        return self._held[session] - self._free[session]

    def complete(self, session: str) -> int:
        """Of these, those of complete groups."""
        return self._complete[session]

    @property
    def wanted(self) -> int:
        """Samples that are free or leased, or known to come."""
        return self._not_done + sum(self.to_come.values())

    @property
    def endless(self) -> bool:
        """There may be more than anybody has said, and none of it is waited for by a step that cannot begin before."""
        return any(session not in self.to_come for session in self._lagging)

    def _is_ready(self, group: Group) -> None:
        insort(self._ready.setdefault(group.session, []), (group.order, group.id))

    def _not_ready(self, group: Group) -> None:
        ready = self._ready.get(group.session)
        if ready is not None and (entry := (group.order, group.id)) in ready:
            ready.remove(entry)


def _add(counts: "Counter[Any]", key: Any, count: int) -> None:
    counts[key] += count
    if not counts[key]:
        del counts[key]


def check_offer(prompt: bytes, n: int, sampling: SamplingParams) -> None:
    """Raises `ValueError` for work that no node could do."""
    if not 1 <= n <= MAX_CAPACITY:
        raise ValueError(f"n: {n} samples of one prompt; 1 to {MAX_CAPACITY} can be asked for")
    if not 4 <= len(prompt) <= 4 * MAX_TOKENS or sampling.max_tokens > MAX_TOKENS:
        raise ValueError(f"a prompt needs at least 1 token; prompt and completion have at most {MAX_TOKENS} each")
