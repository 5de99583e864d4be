"""Our uplink, as far as the core knows it: what it carries, and how much it has yet to send.

That a socket took something does not say that it left: the sockets of all connections take some, and what is in them
goes out by turns. So what has yet to leave is reckoned: what was handed over, less what an uplink of this rate sent
meanwhile.
"""

from collections.abc import Callable
from typing import Final

__all__ = ["Uplink"]

CAREFUL_SHARE: Final = 0.75
"""An uplink that carries a fifth less than plans reckon, as many do, would pile up a fifth of what it is given."""


class Uplink:
    """Of one peer."""

    def __init__(self, bytes_s: Callable[[], float], careful: Callable[[], bool] = lambda: False) -> None:
        """`bytes_s`: what it carries, in bytes a second, 0 while nobody knows. `careful`: whether to reckon that what
        has yet to leave does so at three quarters of that."""
        self.bytes_s = bytes_s
        self._careful = careful
        self._queued = 0.0
        self._at = 0.0

    def take(self, size: int, now: float) -> None:
        """So many bytes were handed over."""
        self._queued = self.queued_bytes(now) + size
        self._at = now

    def queued_bytes(self, now: float) -> float:
        """What has yet to leave; 0 while nobody knows the rate."""
        rate = self.bytes_s() * (CAREFUL_SHARE if self._careful() else 1.0)
        return max(0.0, self._queued - rate * (now - self._at)) if rate else 0.0
