"""One writer of a replica's bits at a time, and none while a reader needs them unchanged.

Readers of a single block take no lock. They compare `sequence` before and after reading: when it is odd, or has
changed, what they read may be a mix of two versions (a sequence lock).
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator

__all__ = ["WriteGate"]


class WriteGate:
    """For worker threads. `sequence` is odd while bits, or the version that they are of, are being written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted_at = math.inf
        self.sequence = 0

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the gate to write bits."""
        self._wanted_at = time.monotonic()
        with self._lock:
            self._wanted_at = math.inf
            self.sequence += 1
            try:
                yield
            finally:
                self.sequence += 1

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Hold the gate to read: no thread writes bits meanwhile."""
        with self._lock:
            yield

    @property
    def writer_waits_s(self) -> float:
        """For how long a writer has been waiting; 0 when none is."""
        return max(0.0, time.monotonic() - self._wanted_at)
