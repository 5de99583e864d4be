"""What each node may say to the ledger: budgets of work messages, before they are decoded. Pure; times are arguments.

What an honest node sends follows from what it was given: a result for each sample, a request and a timesheet when a
place becomes free, a renewal of each lease every three seconds, a repetition of each result without a verdict after
three seconds. So its budget grows with its leases, and a node that was given little may say little.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from node.ledger.assignment.leases import remember
from swarm.protocol.core.bucket import Bucket

__all__ = ["Caller", "Callers"]

RATE: Final = 256.0
"""Messages a second of a node without leases. The fastest measured node (20,000 tokens a second in samples of 200) ends
100 samples a second, at three messages each; so few are the leases then that these are what counts."""
RATE_A_LEASE: Final = 0.5
"""A lease is renewed every three seconds, and its result may be repeated as often."""
BURST: Final = 1024.0
BURST_A_LEASE: Final = 2.0
"""All leases may end, or be renewed, at one moment."""
BYTES_A_MESSAGE: Final = 16 << 10
"""A body of more counts as several: the largest (1 MiB) as 65. A sample of 2,000 tokens has 16 KB."""
REQUESTS: Final = 128.0
REQUESTS_AT_ONCE: Final = 512.0
"""Times a second that a node's request for work is served: when it comes, and again with each result. One more waits
for its turn, and a newer one takes its place: nothing is lost by that."""
RETURNS: Final = 4.0
RETURNS_AT_ONCE: Final = 4096.0
"""Leases a second that a node may return. It returns all that it holds when its engine breaks or it leaves, and loads
for seconds at least then. One that takes and returns work without end keeps it from others, and fills the book."""
MALFORMED: Final = 0.1
MALFORMED_AT_ONCE: Final = 8.0
"""Bodies that make no sense: no honest node sends any. A few are let pass for what a proxy or a memory error may do."""
REMEMBERED: Final = 16_384
"""Nodes, the last ones heard: as many as a swarm has slots."""


@dataclass(slots=True)
class Caller:
    """One node's budgets."""

    messages: Bucket = field(default_factory=lambda: Bucket(RATE, BURST))
    requests: Bucket = field(default_factory=lambda: Bucket(REQUESTS, REQUESTS_AT_ONCE))
    returns: Bucket = field(default_factory=lambda: Bucket(RETURNS, RETURNS_AT_ONCE))
    malformed: Bucket = field(default_factory=lambda: Bucket(MALFORMED, MALFORMED_AT_ONCE))

    def may_say(self, length: int, leases: int, now: float) -> bool:
        """Whether a body of `length` bytes is worth decoding, of a node that holds `leases` leases."""
        self.messages.rate, self.messages.burst = RATE + RATE_A_LEASE * leases, BURST + BURST_A_LEASE * leases
        return self.messages.take(1.0 + length / BYTES_A_MESSAGE, now)

    def returned(self, leases: int, now: float) -> None:
        """It gave so many leases back."""
        self.returns.spend(leases, now)

    def may_have(self, now: float) -> bool:
        """Whether its request for work is served now."""
        return self.returns.spend(0.0, now) == 0.0 and self.requests.take(1.0, now)


class Callers:
    """All nodes', by key. `leases(node)`: how many it holds."""

    def __init__(self, leases: Callable[[bytes], int]) -> None:
        self._leases = leases
        self._known: OrderedDict[bytes, Caller] = OrderedDict()
        self.left_out = 0
        """Bodies dropped unread, because their node had said too much."""

    def of(self, node: bytes) -> Caller:
        caller = self._known.pop(node, None) or Caller()
        remember(self._known, node, caller, REMEMBERED)
        return caller

    def may_say(self, node: bytes, length: int, now: float) -> bool:
        """See `Caller.may_say`. One that says too much is counted."""
        if self.of(node).may_say(length, self._leases(node), now):
            return True
        self.left_out += 1
        return False
