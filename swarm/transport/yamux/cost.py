"""Budgets of a peer over all of its connections: work, windows, streams. Pure; the clock is an argument.

The unit of work is one empty frame: 1.5 to 3.5 us of CPU time in Python on a core of 2.5 GHz. The other costs are
measured in this unit and rounded down, so that a correct peer is never charged more than it costs us.
"""

import math
from typing import Final

from codec.errors import PeerError
from swarm.protocol.core.bucket import Bucket
from swarm.transport.yamux.limits import YamuxLimits
from swarm.transport.yamux.window import WindowBudget

__all__ = ["Cost", "PeerBudget", "PeerBudgets"]

_MAX_WAITING_BYTES: Final = 2 << 20
"""Bytes of a peer's frames, over all of its connections, that may wait until its debt is paid: four reads of a socket.
It can exceed this only by flooding several connections."""
_KEEP_S: Final = 10.0
"""How long a budget outlives its peer's last connection. A new budget is full, so a peer must gain nothing by coming
back; after 10 s the old budget is full, too (`units_at_once / units_per_s` is 8 s)."""


class Cost:
    """Costs in units of work."""

    FRAME: Final = 1
    RECEIVE: Final = 12
    """One wake-up to read the socket: some 100 us with TLS. A read that brings 6 KiB of bulk earns as much."""
    WAKE: Final = 4
    """One wake-up of a stream's reader: 20 us and more."""
    ANSWER: Final = 2
    """A pong or a reset that we write."""
    OPEN: Final = 100
    """A stream: its object, three tasks in the library, and a negotiation. 210 to 260 us, and as much to end it."""
    BYTES_A_UNIT: Final = 512
    """This many bytes earn one unit, so that a stream of 512-byte frames pays for itself."""
    TURN: Final = 128
    """After this much work, 0.2 to 0.4 ms, the reader lets other tasks run. Two hostile connections in one turn of
    trio's loop delay it by twice that, twenty by less than 10 ms."""


class PeerBudget:
    """The budget of one peer, shared by its connections. A connection without a peer has its own."""

    def __init__(self, limits: YamuxLimits) -> None:
        self._limits = limits
        self.window = WindowBudget(limits.window_budget_bytes)
        self.max_streams = limits.max_inbound_streams
        self.streams = 0
        """Streams that the peer opened and that are not forgotten yet; counted by `Connection`."""
        self.connections = 0
        """Connections that run; counted by `Connection`."""
        self.heard_at_s = -math.inf
        """When bytes last came, on any of the connections; set by `watch.Watch`."""
        self._work = Bucket(limits.units_per_s, limits.units_at_once)
        self._reads = Bucket(limits.library_reads_per_s, limits.library_reads_at_once)
        self._held_bytes = 0

    def widen(self, limits: YamuxLimits) -> None:
        """Use these limits if they allow more than the present ones. Work charged so far is then forgotten."""
        if _generosity(limits) > _generosity(self._limits):
            self.window.give_back(max(0, limits.window_budget_bytes - self._limits.window_budget_bytes))
            self.max_streams = max(self.max_streams, limits.max_inbound_streams)
            self._work = Bucket(limits.units_per_s, limits.units_at_once)
            self._reads = Bucket(limits.library_reads_per_s, limits.library_reads_at_once)
            self._limits = limits

    def allow_streams(self, streams: int) -> None:
        """Let the peer have at least this many streams open."""
        self.max_streams = max(self.max_streams, streams)

    def charge_work(self, units: float, now_s: float) -> float:
        """Charge work that the peer has caused; below 0 if its bytes earned more. Returns the seconds until we may read
        the peer again."""
        return self._work.spend(units, now_s)

    def charge_library_read(self, now_s: float) -> float:
        """Charge one read by a protocol of the library's. Returns the seconds to wait before it."""
        return self._reads.spend(1.0, now_s)

    def hold_bytes(self, length: int) -> None:
        """A connection holds `length` bytes of frames while the peer is in debt. Raises `PeerError` if the peer's
        connections together hold too much."""
        if self._held_bytes + length > _MAX_WAITING_BYTES:
            raise PeerError("yamux: the peer sends small frames faster than it may on too many connections")
        self._held_bytes += length

    def release_bytes(self, length: int) -> None:
        self._held_bytes -= length


class PeerBudgets:
    """The budgets of all peers, by key."""

    def __init__(self) -> None:
        self._budgets: dict[bytes, PeerBudget] = {}
        self._left_at_s: dict[bytes, float] = {}  # the earliest first

    def for_connection(self, peer: bytes, limits: YamuxLimits, now_s: float) -> PeerBudget:
        """The peer's budget, widened to the limits of a new connection."""
        self._forget_unused(now_s)
        budget = self._budgets.get(peer)
        if budget is None:
            budget = self._budgets[peer] = PeerBudget(limits)
        budget.widen(limits)
        self.note_departure(peer, now_s)  # a connection that never runs must not keep the budget
        return budget

    def note_departure(self, peer: bytes, now_s: float) -> None:
        """A connection of the peer has ended, or has not begun: keep its budget for `_KEEP_S` at least."""
        self._left_at_s.pop(peer, None)
        if peer in self._budgets:
            self._left_at_s[peer] = now_s

    def _forget_unused(self, now_s: float) -> None:
        """Forget budgets that no connection has used for `_KEEP_S`. One in use is looked at again when its connection
        ends."""
        while self._left_at_s:
            peer, left_at_s = next(iter(self._left_at_s.items()))
            if now_s - left_at_s < _KEEP_S:
                return
            del self._left_at_s[peer]
            if not self._budgets[peer].connections:
                del self._budgets[peer]


def _generosity(limits: YamuxLimits) -> tuple[float, ...]:
    return limits.units_at_once, limits.window_budget_bytes, limits.max_inbound_streams
