"""Flow control: how much each end may send on a stream. Pure; the clock is an argument.

A receiver grants credit; a sender spends it. A window starts at the specification's 256 KiB and is enlarged at once if
the peer's budget has room. It doubles while its reader takes a whole window within a few round trips, which shows that
the window and not the reader is the limit. All connections of a peer share one budget, so the peer can make us hold at
most `streams x 256 KiB + budget`.
"""

from typing import Final

from codec.errors import PeerError
from swarm.transport.yamux.frames import INITIAL_WINDOW_BYTES

__all__ = ["ReceiveWindow", "SendWindow", "WindowBudget"]

_MAX_CREDIT: Final = 2**32 - 1
_GROW_WITHIN_ROUND_TRIPS: Final = 4
_GROW_WITHIN_S: Final = 0.04
"""Grow also if a window lasts less than this. On a short path the clock's jitter exceeds the round trip."""


class WindowBudget:
    """Bytes for all windows of a peer's streams together, beyond the 256 KiB that each stream always has."""

    def __init__(self, limit_bytes: int) -> None:
        self._left_bytes = limit_bytes

    def take(self, wanted_bytes: int) -> int:
        """Take up to `wanted_bytes`, as much as is left. Returns how much."""
        granted = max(0, min(wanted_bytes, self._left_bytes))
        self._left_bytes -= granted
        return granted

    def give_back(self, length: int) -> None:
        self._left_bytes += length


class SendWindow:
    """How much we may still send on one stream."""

    def __init__(self) -> None:
        self.credit = INITIAL_WINDOW_BYTES

    def add_credit(self, increment: int) -> None:
        """The peer grants more. Raises `PeerError` if the credit exceeds 2^32 - 1."""
        if self.credit + increment > _MAX_CREDIT:
            raise PeerError(f"yamux window increment {increment} on a credit of {self.credit}")
        self.credit += increment


class ReceiveWindow:
    """How much the peer may still send on one stream."""

    def __init__(self, budget: WindowBudget, first_bytes: int, max_bytes: int) -> None:
        """`first_bytes`: size to begin with; `max_bytes`: largest size; both only if `budget` has room."""
        self._budget = budget
        self._max_bytes = max_bytes
        self.size = INITIAL_WINDOW_BYTES
        self.credit = INITIAL_WINDOW_BYTES
        self._read_bytes = 0  # read, but not yet given back as credit
        self._since_growth = 0
        self._growth_began_s: float | None = None
        self.first_increment = self._grow(first_bytes - self.size)
        """To be sent with the stream's first frame."""
        self.credit += self.first_increment

    def spend(self, length: int) -> None:
        """A data frame of `length` bytes begins. Raises `PeerError` if the peer had no credit for it."""
        if length > self.credit:
            raise PeerError(f"yamux length {length} past a window of {self.credit}")
        self.credit -= length

    def note_read(self, length: int, now_s: float, round_trip_s: float) -> int:
        """The reader took `length` bytes. Returns the increment to announce now, or 0 to wait for more."""
        self._read_bytes += length
        self._since_growth += length
        if self._read_bytes < self.size // 2:  # each update costs a write here and a wake-up there
            return 0
        increment, self._read_bytes = self._read_bytes, 0
        if self._growth_began_s is None:
            self._growth_began_s, self._since_growth = now_s, 0
        elif self._since_growth >= self.size:
            if now_s - self._growth_began_s <= max(_GROW_WITHIN_ROUND_TRIPS * round_trip_s, _GROW_WITHIN_S):
                increment += self._grow(self.size)
            self._growth_began_s, self._since_growth = now_s, 0
        self.credit += increment
        return increment

    def release(self) -> None:
        """The stream is gone: give its share of the budget back."""
        self._budget.give_back(self.size - INITIAL_WINDOW_BYTES)
        self.size = INITIAL_WINDOW_BYTES

    def _grow(self, wanted_bytes: int) -> int:
        granted = self._budget.take(min(wanted_bytes, self._max_bytes - self.size))
        self.size += granted
        return granted
