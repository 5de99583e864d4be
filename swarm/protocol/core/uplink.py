"""An estimate of how many bytes wait at our own uplink.

That a socket accepted bytes does not mean that they left: the kernel buffers of all connections share the uplink. So
the queue is estimated: the bytes handed to sockets, less what an uplink of the known rate has sent since.
"""

from collections.abc import Callable
from typing import Final

__all__ = ["Uplink"]

CAREFUL_SHARE: Final = 0.75
"""Share of the known rate that a careful estimate relies on. Many uplinks carry a fifth less than plans assume; at the
full rate a fifth of what they are given would pile up unnoticed."""


class Uplink:
    """The uplink of one peer."""

    def __init__(self, bytes_s: Callable[[], float], careful: Callable[[], bool] = lambda: False) -> None:
        """`bytes_s()`: what it carries, in bytes/s; 0 while that is not known. `careful()`: whether to assume
        `CAREFUL_SHARE` of that."""
        self.bytes_s = bytes_s
        self._careful = careful
        self._queued = 0.0
        self._at = 0.0

    def take(self, size: int, now: float) -> None:
        """`size` bytes were handed to a socket."""
        self._queued = self.queued_bytes(now) + size
        self._at = now

    def queued_bytes(self, now: float) -> float:
        """Bytes that have not left yet, as an estimate; 0 while the rate is not known."""
        rate = self.bytes_s() * (CAREFUL_SHARE if self._careful() else 1.0)
        return max(0.0, self._queued - rate * (now - self._at)) if rate else 0.0
