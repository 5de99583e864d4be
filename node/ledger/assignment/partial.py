"""Groups that may be partial: when their time is over, what they have is enough (`Terms.partial_s`). Pure.

offered --partial_s--> overdue --at least `least` samples are done--> cut: the other samples are no longer wanted
"""

import heapq

from node.ledger.state import Group, LiveLease
from node.ledger.transitions import Transitions

__all__ = ["PartialGroups"]


class PartialGroups:
    """Watches the groups whose terms have `partial_s`, and cuts them when they are due."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._due: list[tuple[float, bytes]] = []
        """(when its time is over, group), a heap."""
        self._overdue: set[bytes] = set()
        """Groups whose time is over, until they are taken or dropped."""

    def watch(self, group: Group) -> None:
        """`group` was offered, or the book kept it; its time runs from `Group.since`."""
        if group.terms.partial_s is not None:
            heapq.heappush(self._due, (group.since + group.terms.partial_s, group.id))

    def cut_due(self, now: float) -> list[LiveLease]:
        """Cut every group that is due. Returns the leases that are void now; their nodes should be told."""
        while self._due and self._due[0][0] <= now:
            self._overdue.add(heapq.heappop(self._due)[1])
        void: list[LiveLease] = []
        for name in sorted(self._overdue):
            group = self._transitions.pool.groups.get(name)
            if group is None:
                self._overdue.discard(name)
            elif not group.complete and len(group.done) >= group.terms.least:
                void += self._transitions.cut(group)
        return void

    def next_deadline(self) -> float | None:
        """When the next group's time is over."""
        return self._due[0][0] if self._due else None
