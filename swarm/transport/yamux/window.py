"""Who may send how much. Pure accounting: no IO and no clock of its own.

A receiver grants credit; a sender spends it. Windows start at the specification's 256 KiB, get more at once as far as
the connection's budget goes, and double while a reader takes a whole window within a few round trips, which means that
the window and not the reader was the limit. All connections of a peer share one budget, so what the peer can make us
hold is `streams x 256 KiB + budget`, whatever it does.
"""

from typing import Final

from codec.errors import PeerError
from swarm.transport.yamux.frames import INITIAL_WINDOW_BYTES

__all__ = ["Budget", "ReceiveWindow", "SendWindow"]

_MAX_CREDIT: Final = 2**32 - 1
_GROW_WITHIN_ROUND_TRIPS: Final = 4
_GROW_WITHIN_S: Final = 0.04
"""On a short path the clock's jitter and not the round trip decides; there, a window that lasts 40 ms is enough."""


class Budget:
    """Bytes that all windows of a peer's streams may add up to, beyond the 256 KiB that each stream has by right."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes

    def take(self, wanted_bytes: int) -> int:
        """As much of `wanted_bytes` as there is."""
        granted = max(0, min(wanted_bytes, self._left))
        self._left -= granted
        return granted

    def give(self, length: int) -> None:
        self._left += length


class SendWindow:
    """What we may still send on one stream."""

    def __init__(self) -> None:
        self.credit = INITIAL_WINDOW_BYTES

    def raise_by(self, increment: int) -> None:
        """The peer grants more. `PeerError` if that is past what four bytes can say."""
        if self.credit + increment > _MAX_CREDIT:
            raise PeerError(f"yamux window increment {increment} on a credit of {self.credit}")
        self.credit += increment


class ReceiveWindow:
    """What the peer may still send on one stream, and what it has sent that nobody has read."""

    def __init__(self, budget: Budget, first_bytes: int, max_bytes: int) -> None:
        """`first_bytes`: the window to begin with; `max_bytes`: never more; both as far as `budget` goes."""
        self._budget = budget
        self._max_bytes = max_bytes
        self.size = INITIAL_WINDOW_BYTES
        self.credit = INITIAL_WINDOW_BYTES
        self._consumed = 0  # read, but not yet given back as credit
        self._since_growth = 0
        self._growth_began_s: float | None = None
        self.first_increment = self._grow(first_bytes - self.size)
        """To be sent with the stream's first frame."""
        self.credit += self.first_increment

    def received(self, length: int) -> None:
        """A data frame of `length` bytes begins. `PeerError` if the peer had no credit for it."""
        if length > self.credit:
            raise PeerError(f"yamux length {length} past a window of {self.credit}")
        self.credit -= length

    def consumed(self, length: int, now_s: float, round_trip_s: float) -> int:
        """The reader took `length` bytes: the increment to announce now, or 0 to wait for more."""
        self._consumed += length
        self._since_growth += length
        if self._consumed < self.size // 2:  # each costs a write here and a wake-up there
            return 0
        increment, self._consumed = self._consumed, 0
        if self._growth_began_s is None:
            self._growth_began_s, self._since_growth = now_s, 0
        elif self._since_growth >= self.size:
            if now_s - self._growth_began_s <= max(_GROW_WITHIN_ROUND_TRIPS * round_trip_s, _GROW_WITHIN_S):
                increment += self._grow(self.size)
            self._growth_began_s, self._since_growth = now_s, 0
        self.credit += increment
        return increment

    def release(self) -> None:
        """The stream is gone: its share of the budget goes back."""
        self._budget.give(self.size - INITIAL_WINDOW_BYTES)
        self.size = INITIAL_WINDOW_BYTES

    def _grow(self, wanted_bytes: int) -> int:
        granted = self._budget.take(min(wanted_bytes, self._max_bytes - self.size))
        self.size += granted
        return granted
