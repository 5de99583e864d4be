"""The live work leases by deadline; and, for a while, how the ended ones ended. Pure."""

import heapq
from collections import OrderedDict
from typing import Any, Final

from node.ledger.messages import Reason
from node.ledger.recent import Recent
from node.ledger.state import LiveLease

__all__ = ["REASONS", "REASON_CODES", "LeaseTable", "remember"]

REASONS: Final = (None, *Reason)
"""By code, a byte, in which the ledger remembers them. None: a rollout was accepted."""
REASON_CODES: Final = {reason: bytes([code]) for code, reason in enumerate(REASONS)}


class LeaseTable:
    """`leases` holds the live leases by id; the last `remembered` ended ones keep their reason."""

    def __init__(self, remembered: int) -> None:
        self.leases: dict[int, LiveLease] = {}
        self.next_id = 1
        """The id and fencing token of the next lease. It only rises, over restarts too."""
        self._deadlines: list[tuple[float, int]] = []
        """A heap of (deadline, lease); the entries of leases that ended or were renewed are skipped."""
        self._ended = Recent(remembered, key_bytes=8, value_bytes=1)

    def add(self, lease: LiveLease) -> None:
        """Take in a new lease, or one that the book kept."""
        self.leases[lease.id] = lease
        self.next_id = max(self.next_id, lease.id + 1, lease.token + 1)
        heapq.heappush(self._deadlines, (lease.deadline, lease.id))

    def renew(self, lease: LiveLease, deadline: float) -> None:
        """Let `lease` live at least until `deadline`."""
        lease.deadline = max(lease.deadline, deadline)
        heapq.heappush(self._deadlines, (lease.deadline, lease.id))

    def end(self, lease: LiveLease, why: Reason) -> None:
        """Remove `lease`, and remember why."""
        del self.leases[lease.id]
        self._ended.set(lease.id.to_bytes(8), REASON_CODES[why])

    def ended(self, lease: int) -> Reason:
        """Why a lease that is not live ended; `UNKNOWN_LEASE` when that is not remembered."""
        code = self._ended.get(lease.to_bytes(8))
        return (None if code is None else REASONS[code[0]]) or Reason.UNKNOWN_LEASE

    def expired(self, now: float) -> LiveLease | None:
        """A lease whose deadline has passed."""
        deadline = self.next_deadline()
        return self.leases[self._deadlines[0][1]] if deadline is not None and deadline <= now else None

    def next_deadline(self) -> float | None:
        """The earliest deadline."""
        while self._deadlines:
            deadline, lease = self._deadlines[0]
            if lease in self.leases and self.leases[lease].deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return None


def remember(memory: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Set `memory[key]`, and remove the oldest entries beyond `most`."""
    memory[key] = value
    while len(memory) > most:
        memory.popitem(last=False)
