"""Who may write a replica's bits: one at a time, and never while somebody needs them to stand still.

Readers of a block take no lock. They look at `turn` before and after: odd, or another one, and what they read may be
a mix (a sequence lock).
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator

__all__ = ["Gate"]


class Gate:
    """For worker threads. `turn` is odd while bits or what is said of them are being written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted_at = math.inf
        self.turn = 0

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """The bits are ours to write."""
        self._wanted_at = time.monotonic()
        with self._lock:
            self._wanted_at = math.inf
            self.turn += 1
            try:
                yield
            finally:
                self.turn += 1

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Nobody writes bits meanwhile."""
        with self._lock:
            yield

    @property
    def kept_waiting_s(self) -> float:
        """For how long somebody has been waiting to write."""
        return max(0.0, time.monotonic() - self._wanted_at)
