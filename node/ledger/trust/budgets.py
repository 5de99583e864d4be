"""Budgets of the messages that a node may send to the ledger, checked before a message is decoded. Pure.

What an honest node sends follows from its work: a result for each sample, a request and a timesheet when a sequence
ends, a renewal of each lease every three seconds, and a repetition every three seconds of each result without a
verdict. So a node's budget grows with its leases.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from node.ledger.assignment.leases import remember
from swarm.protocol.core.bucket import Bucket

__all__ = ["MessageBudgets", "NodeBudgets"]

RATE: Final = 256.0
"""Messages per second of a node without leases. The fastest measured node (20,000 tokens per second in samples of 200)
finishes 100 samples per second, with three messages each; it has few leases then, so this constant is what matters."""
RATE_A_LEASE: Final = 0.5
"""More messages per second for each lease: its node renews it every three seconds, and may repeat its result as
often."""
BURST: Final = 1024.0
BURST_A_LEASE: Final = 2.0
"""All leases may end, or be renewed, at one moment."""
BYTES_A_MESSAGE: Final = 16 << 10
"""A larger body counts as several messages: the largest (1 MiB) as 65. A sample of 2,000 tokens has 16 KB."""
REQUESTS: Final = 128.0
REQUESTS_AT_ONCE: Final = 512.0
"""How often per second the ledger serves a node's request for work: when it arrives, and again with each result. A
request beyond the budget waits, and a newer one replaces it; nothing is lost."""
RETURNS: Final = 4.0
RETURNS_AT_ONCE: Final = 4096.0
"""Leases per second that a node may return. A node returns all its leases when its engine breaks or when it leaves, and
then needs seconds at least to load. A node that takes and returns work without end would keep it from others and fill
the book."""
IMAGE_BYTES: Final = float(16 << 20)
IMAGE_BYTES_AT_ONCE: Final = float(128 << 20)
"""Bytes per second of the images that are sent to a node, which asks for each part by a message of fifty bytes."""
MALFORMED: Final = 0.1
MALFORMED_AT_ONCE: Final = 8.0
"""Malformed bodies per second. No honest node sends any; a proxy or a memory error may cause a few."""
REMEMBERED: Final = 16_384
"""Nodes remembered, the most recent ones: as many as a swarm has slots."""


@dataclass(slots=True)
class NodeBudgets:
    """The budgets of one node."""

    messages: Bucket = field(default_factory=lambda: Bucket(RATE, BURST))
    requests: Bucket = field(default_factory=lambda: Bucket(REQUESTS, REQUESTS_AT_ONCE))
    returns: Bucket = field(default_factory=lambda: Bucket(RETURNS, RETURNS_AT_ONCE))
    images: Bucket = field(default_factory=lambda: Bucket(IMAGE_BYTES, IMAGE_BYTES_AT_ONCE))
    malformed: Bucket = field(default_factory=lambda: Bucket(MALFORMED, MALFORMED_AT_ONCE))

    def allows_message(self, length: int, leases: int, now: float) -> bool:
        """Whether to decode a body of `length` bytes from a node that holds `leases` leases."""
        self.messages.rate, self.messages.burst = RATE + RATE_A_LEASE * leases, BURST + BURST_A_LEASE * leases
        return self.messages.take(1.0 + length / BYTES_A_MESSAGE, now)

    def count_returned(self, leases: int, now: float) -> None:
        """The node returned `leases` leases."""
        self.returns.spend(leases, now)

    def allows_request(self, now: float) -> bool:
        """Whether to serve its request for work now."""
        return self.returns.spend(0.0, now) == 0.0 and self.requests.take(1.0, now)

    def allows_image(self, length: int, now: float) -> bool:
        """Whether to send it `length` bytes of an image."""
        return self.images.take(length, now)

    def allows_malformed(self, now: float) -> bool:
        """Whether to keep the node's session after one more malformed body."""
        return self.malformed.take(1.0, now)


class MessageBudgets:
    """The budgets of all nodes. `leases(node)` gives the number of leases that a node holds."""

    def __init__(self, leases: Callable[[bytes], int]) -> None:
        self._leases = leases
        self._known: OrderedDict[bytes, NodeBudgets] = OrderedDict()
        self.left_out = 0
        """Bodies dropped unread, because they exceeded their node's budget."""

    def of(self, node: bytes) -> NodeBudgets:
        """The budgets of `node`; full ones for a node that is not remembered."""
        budgets = self._known.pop(node, None) or NodeBudgets()
        remember(self._known, node, budgets, REMEMBERED)
        return budgets

    def allow_message(self, node: bytes, length: int, now: float) -> bool:
        """Whether to decode a body of `length` bytes from `node`; counts the bodies that are left out."""
        if self.of(node).allows_message(length, self._leases(node), now):
            return True
        self.left_out += 1
        return False
