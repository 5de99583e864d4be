"""The leases that are out, by deadline; and for a while how those that are over ended. Pure."""

import heapq
from collections import OrderedDict
from typing import Any

from node.ledger.messages import Reason
from node.ledger.state import Lease

__all__ = ["LeaseTable", "remember"]


class LeaseTable:
    """`leases`: those that live, by id."""

    def __init__(self, remembered: int) -> None:
        self.leases: dict[int, Lease] = {}
        self.next_id = 1
        """Of leases and fencing tokens: rises for ever, over restarts too."""
        self._deadlines: list[tuple[float, int]] = []
        """Heap of (deadline, lease); entries of leases that ended or were renewed are skipped."""
        self._ended: OrderedDict[int, Reason] = OrderedDict()
        self._remembered = remembered

    def add(self, lease: Lease) -> None:
        """A lease that is new, or found in the book."""
        self.leases[lease.id] = lease
        self.next_id = max(self.next_id, lease.id + 1, lease.token + 1)
        heapq.heappush(self._deadlines, (lease.deadline, lease.id))

    def renew(self, lease: Lease, deadline: float) -> None:
        """It lives at least until `deadline`."""
        lease.deadline = max(lease.deadline, deadline)
        heapq.heappush(self._deadlines, (lease.deadline, lease.id))

    def end(self, lease: Lease, why: Reason) -> None:
        del self.leases[lease.id]
        remember(self._ended, lease.id, why, self._remembered)

    def ended(self, lease: int) -> Reason:
        """Why a lease that does not live is no lease."""
        return self._ended.get(lease, Reason.UNKNOWN_LEASE)

    def expired(self, now: float) -> Lease | None:
        """One whose deadline has passed."""
        deadline = self.next_deadline()
        return self.leases[self._deadlines[0][1]] if deadline is not None and deadline <= now else None

    def next_deadline(self) -> float | None:
        while self._deadlines:
            deadline, lease = self._deadlines[0]
            if lease in self.leases and self.leases[lease].deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return None


def remember(memory: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put it in, and let the oldest go where there are too many."""
    memory[key] = value
    while len(memory) > most:
        memory.popitem(last=False)
