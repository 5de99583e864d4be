"""The request groups that are wanted: which have free samples, which are complete, in the order of their offers. Pure.

    offered ---> free --lease--> leased --accepted--> done --all n--> ready --taken--> forgotten

A sample is in exactly one of these states, or dropped from a group that may be partial. The pool knows no clock, leases
or nodes: `node.ledger.transitions` moves samples.
"""

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any, Final

from node.engines.base import SamplingParams
from node.ledger.messages import MAX_CAPACITY, MAX_TOKENS
from node.ledger.state import AcceptedRollout, Group

__all__ = ["Pool", "check_offer"]

MOST_SKIPPED: Final = 256
"""Groups of one session that one request may inspect without taking any, at some four microseconds each. A group most
often does not fit because of the session's lag or sampling, so that the next groups would not fit either."""

Queue = tuple[str, str]
"""A session, and a part of the model (`node.ledger.part_history`)."""


class Pool:
    """All request groups, and counts over them.

    The counts are kept while samples move, because every request for work reads them and there may be 65,536 groups.
    """

    def __init__(self) -> None:
        self.groups: dict[bytes, Group] = {}
        """By id."""
        self.next_order = 0
        """The order of the next group."""
        self.freed = 0
        """Rises whenever samples become free, or more of them may begin."""
        self.to_come: dict[str, int] = {}
        """By session, the samples that will still be offered, for the sessions that know."""
        self.lags: Counter[int] = Counter()
        """Groups by the lag that they allow."""
        self._open: dict[Queue, list[tuple[int, bytes]]] = {}
        """By session and part, a heap of (order, group) with the groups that may have free samples; others are
        skipped."""
        self._ready: dict[str, list[tuple[int, bytes]]] = {}
        """By session, (order, group) of the complete groups that are not handed over, sorted."""
        self._lagging: Counter[str] = Counter()
        """Groups that allow a lag, by session."""
        self._not_done = 0
        """Samples that are free or leased."""
        self._incomplete = 0
        """All samples of groups that are not complete, done ones included."""
        self._evaluating = 0
        """Of these, those of evaluations."""
        self._complete: Counter[str] = Counter()
        """Samples of complete groups, by session."""
        self._held: Counter[str] = Counter()
        """Samples of all groups, by session."""
        self._free: Counter[str] = Counter()
        """Free samples, by session."""
        self._of_part: Counter[str] = Counter()
        """Samples of incomplete groups, by part."""
        self._leased: Counter[str] = Counter()
        """Leased samples, by part."""
        self._priorities: dict[str, int] = {}
        """By session, of those with a priority other than 0: that of its groups."""

    def add(self, group: Group) -> None:
        """Take in a group in its present state: a new group, or one that the book kept."""
        if group.terms.priority:
            self._priorities[group.session] = group.terms.priority
        self.groups[group.id] = group
        self.next_order = max(self.next_order, group.order + 1)
        if group.free:
            self.freed += 1
            self._add_open(group)
        self._count(group, 1)
        if group.complete:
            self._add_ready(group)

    def remove(self, group: bytes) -> Group | None:
        """Forget a group. Returns it, if it was known."""
        found = self.groups.pop(group, None)
        if found is not None:
            self._remove_ready(found)
            self._count(found, -1)
        return found

    def finish(self, group: Group, sample: int, done: AcceptedRollout) -> None:
        """`sample` of `group` is done, which may complete the group."""
        group.done[sample] = done
        self._not_done -= 1
        if group.complete:
            self._count_incomplete(group, -1)
            _add(self._complete, group.session, group.n)
            self._add_ready(group)

    def cut(self, group: Group) -> None:
        """The samples of `group` that are free or leased are no longer wanted, so that it is complete."""
        self._count(group, -1)
        group.dropped.update(group.free, group.leased)
        group.free.clear()
        group.leased.clear()
        self._count(group, 1)
        self._add_ready(group)

    def _count(self, group: Group, sign: int) -> None:
        """`group` is added (1) or removed (-1)."""
        self._not_done += sign * (group.size - len(group.done))
        _add(self._held, group.session, sign * group.n)
        if not self._held[group.session]:
            self._priorities.pop(group.session, None)
        _add(self._free, group.session, sign * len(group.free))
        _add(self._leased, group.adapter, sign * len(group.leased))
        _add(self.lags, group.max_lag, sign)
        if group.max_lag:
            _add(self._lagging, group.session, sign)
        if group.complete:
            _add(self._complete, group.session, sign * group.n)
        else:
            self._count_incomplete(group, sign)

    def _count_incomplete(self, group: Group, sign: int) -> None:
        """`group` is incomplete from now on (1), or no more (-1)."""
        self._incomplete += sign * group.n
        self._evaluating += sign * group.n * group.terms.evaluates
        _add(self._of_part, group.adapter, sign * group.n)

    def more_may_begin(self) -> None:
        """A trainer's limit allows more samples than before."""
        self.freed += 1

    def free(self, group: Group, samples: Iterable[int]) -> None:
        """`samples` of `group`, which are neither leased nor done any more, may be leased again."""
        if not group.free:
            self._add_open(group)
        before = len(group.free)
        group.free.update(samples)
        _add(self._free, group.session, len(group.free) - before)
        self.freed += 1

    def lease(self, group: Group, samples: Iterable[int], lease: int) -> None:
        """The free `samples` of `group` belong to `lease` now."""
        before = len(group.free)
        group.free.difference_update(samples)
        leased = len(group.leased)
        group.leased.update(dict.fromkeys(samples, lease))
        _add(self._leased, group.adapter, len(group.leased) - leased)
        _add(self._free, group.session, len(group.free) - before)

    def undo(self, group: Group, sample: int) -> None:
        """The accepted rollout of `sample` no longer counts: the sample is free again."""
        if group.complete:
            self._remove_ready(group)
            self._count_incomplete(group, 1)
            _add(self._complete, group.session, -group.n)
        del group.done[sample]
        self._not_done += 1
        self.free(group, (sample,))

    def reopen(self, session: str) -> None:
        """Make the groups of `session` that were handed over and not taken ready again."""
        for group in self.groups.values():
            if group.session == session and group.handed_over:
                self.return_group(group)

    def return_group(self, group: Group) -> None:
        """Make a complete group that was handed over and not taken ready again."""
        group.handed_over = False
        self._add_ready(group)

    def hand_over(self, session: str, wanted: Container[bytes] | None = None) -> Group | None:
        """The first ready group of `session`, of those in `wanted` if that is given. It stays known until it is
        taken."""
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

    def end_leased(self, group: Group, samples: Iterable[int]) -> None:
        """The leased `samples` of `group` belong to no lease any more."""
        before = len(group.leased)
        for sample in samples:
            del group.leased[sample]
        _add(self._leased, group.adapter, len(group.leased) - before)

    def open_groups(
        self, fits: Callable[[Group], bool], has_part: Callable[[str], bool] = lambda part: True
    ) -> Iterable[Group]:
        """Groups with free samples for which `fits` is true, of the parts for which `has_part` is.

        Sessions of a higher priority come first. Then in the order of the offers within a part. Of several parts, the
        one with the fewest leased samples comes first,
        so that one with much work does not keep the others from the nodes. The caller takes samples of a group before
        it continues the iteration, or stops. Groups that do not fit stay in the pool; `MOST_SKIPPED` of them end the
        search in their session.
        """
        skipped: dict[Queue, list[tuple[int, bytes]]] = {}
        searched = {queue for queue in self._open if has_part(queue[1])}
        try:
            while searched:
                queue = min(searched, key=self._turn)
                heap = self._open[queue]
                group = self.groups.get(heap[0][1])
                if group is None or not group.free:
                    heapq.heappop(heap)
                elif fits(group):
                    yield group
                    if group.free:
                        skipped.setdefault(queue, []).append(heapq.heappop(heap))
                else:
                    skipped.setdefault(queue, []).append(heapq.heappop(heap))
                if not heap or len(skipped.get(queue, ())) >= MOST_SKIPPED:
                    searched.discard(queue)
        finally:
            for queue, entries in skipped.items():
                for entry in entries:
                    heapq.heappush(self._open[queue], entry)
            for queue in [queue for queue, heap in self._open.items() if not heap]:
                del self._open[queue]

    def _turn(self, queue: Queue) -> tuple[int, int, tuple[int, bytes]]:
        """The place of a queue with open groups; the smallest comes first."""
        return -self._priorities.get(queue[0], 0), self._leased[queue[1]], self._open[queue][0]

    def samples(self, session: str | None = None) -> int:
        """Samples of all incomplete groups but evaluations', plus those of complete groups that `session` has not
        taken."""
        return self._incomplete - self._evaluating + (0 if session is None else self._complete[session])

    @property
    def parts(self) -> set[str]:
        """The parts that there is work of, which is not complete."""
        return set(self._of_part)

    def samples_of(self, part: str) -> int:
        """Samples of all incomplete groups of `part`."""
        return self._of_part[part]

    def held(self, session: str) -> int:
        """Samples that `session` has offered and not taken."""
        return self._held[session]

    def begun(self, session: str) -> int:
        """Samples among `held` that are leased or done."""
        return self._held[session] - self._free[session]

    def complete(self, session: str) -> int:
        """Samples among `held` whose groups are complete."""
        return self._complete[session]

    @property
    def wanted(self) -> int:
        """Samples that are free or leased, or will be offered."""
        return self._not_done + sum(self.to_come.values())

    @property
    def endless(self) -> bool:
        """Some session may offer more than it announced, and does not wait for its groups to finish (it allows a
        lag)."""
        return any(session not in self.to_come for session in self._lagging)

    def _add_open(self, group: Group) -> None:
        heapq.heappush(self._open.setdefault((group.session, group.adapter), []), (group.order, group.id))

    def _add_ready(self, group: Group) -> None:
        insort(self._ready.setdefault(group.session, []), (group.order, group.id))

    def _remove_ready(self, group: Group) -> None:
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
