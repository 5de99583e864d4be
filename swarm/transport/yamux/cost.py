"""What a peer makes us do, counted over all of its connections: work, windows, streams. Pure; the clock is an argument.

The unit of work is one empty frame, 1.5 to 3.5 us of processor time in Python on a core of 2.5 GHz. The other costs are
measured in it and rounded down, so that nothing that a correct peer does costs it more than it costs us.
"""

from typing import Final

from codec.errors import PeerError
from swarm.protocol.core.bucket import Bucket
from swarm.transport.yamux.limits import Limits
from swarm.transport.yamux.window import Budget

__all__ = ["Cost", "PeerBudget", "PeerBudgets"]

_MAX_WAITING_BYTES: Final = 1 << 20
"""Frames of a peer that may wait until its debt is paid: what four reads of a socket bring. Over all its connections it
is in debt with more only if it floods several of them."""
_KEEP_S: Final = 10.0
"""How long a budget outlives its peer's last connection. A new budget is full, so coming back must not pay; after 10 s
the old one is full as well (`units_at_once / units_per_s` is 8 s)."""


class Cost:
    """In units of work."""

    FRAME: Final = 1
    RECEIVE: Final = 12
    """To be woken for a read of the socket: some 100 us with TLS. That much is free with 6 KiB of bulk."""
    WAKE: Final = 4
    """A stream's reader has to run: 20 us and more."""
    ANSWER: Final = 2
    """A pong or a reset that we write."""
    OPEN: Final = 100
    """A stream: its object, three tasks in the library, and a negotiation. 210 to 260 us, and again to end it."""
    BYTES_A_UNIT: Final = 512
    """So many bytes earn a unit: a stream of 512-byte frames pays for itself."""
    TURN: Final = 128
    """After so much work the read loop lets others run: 0.2 to 0.4 ms. Two hostile connections in the same turn of the
    loop delay it by twice that; twenty by less than 10 ms."""


class PeerBudget:
    """One for a peer, whichever of its connections causes it. A connection without a peer has one of its own."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.window = Budget(limits.window_budget_bytes)
        self.max_streams = limits.max_inbound_streams
        self.streams = 0
        """That the peer has opened and that are not over."""
        self.connections = 0
        self._work = Bucket(limits.units_per_s, limits.units_at_once)
        self._reads = Bucket(limits.library_reads_per_s, limits.library_reads_at_once)
        self._waiting_bytes = 0

    def widen(self, limits: Limits) -> None:
        """From now on these, if they allow more than the present ones. What was spent before is then forgotten."""
        if _generosity(limits) > _generosity(self._limits):
            self.window.give(max(0, limits.window_budget_bytes - self._limits.window_budget_bytes))
            self.max_streams = max(self.max_streams, limits.max_inbound_streams)
            self._work = Bucket(limits.units_per_s, limits.units_at_once)
            self._reads = Bucket(limits.library_reads_per_s, limits.library_reads_at_once)
            self._limits = limits

    def let_open(self, streams: int) -> None:
        """The peer may have at least so many streams open."""
        self.max_streams = max(self.max_streams, streams)

    def worked(self, units: float, now_s: float) -> float:
        """The peer has caused `units` of work (less than 0: it brought more bytes than work): seconds until it may be
        read again."""
        return self._work.spend(units, now_s)

    def library_read(self, now_s: float) -> float:
        """A protocol of the library's reads from the peer: seconds to wait before."""
        return self._reads.spend(1.0, now_s)

    def wait_with(self, length: int) -> None:
        """A connection waits with `length` bytes of frames in hand. `PeerError` if all of them hold too much."""
        if self._waiting_bytes + length > _MAX_WAITING_BYTES:
            raise PeerError("yamux: the peer sends small frames faster than it may on too many connections")
        self._waiting_bytes += length

    def waited_with(self, length: int) -> None:
        self._waiting_bytes -= length


class PeerBudgets:
    """The budgets of all peers, by key."""

    def __init__(self) -> None:
        self._budgets: dict[bytes, PeerBudget] = {}
        self._left_at_s: dict[bytes, float] = {}  # in the order of time

    def of(self, peer: bytes, limits: Limits, now_s: float) -> PeerBudget:
        """The peer's, for a new connection with these limits."""
        self._forget(now_s)
        budget = self._budgets.get(peer)
        if budget is None:
            budget = self._budgets[peer] = PeerBudget(limits)
        budget.widen(limits)
        self.left(peer, now_s)  # a connection that never runs must not keep it
        return budget

    def left(self, peer: bytes, now_s: float) -> None:
        """A connection of the peer has ended, or will begin."""
        self._left_at_s.pop(peer, None)
        if peer in self._budgets:
            self._left_at_s[peer] = now_s

    def _forget(self, now_s: float) -> None:
        """What nobody has used for a while. Those that are in use come back to the end of the line."""
        while self._left_at_s:
            peer, left_at_s = next(iter(self._left_at_s.items()))
            if now_s - left_at_s < _KEEP_S:
                return
            del self._left_at_s[peer]
            if not self._budgets[peer].connections:
                del self._budgets[peer]


def _generosity(limits: Limits) -> tuple[float, ...]:
    return limits.units_at_once, limits.window_budget_bytes, limits.max_inbound_streams
