"""One writer of a replica's bits at a time, and none while a reader needs them unchanged.

Readers of a single block take no lock. They compare `sequence` before and after reading: when it is odd, or has
changed, what they read may be a mix of two versions (a sequence lock).
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Final

__all__ = ["WriteGate", "WriterWaits"]

CHECKPOINT_S: Final = 30.0
"""A version waits at most this long for a checkpoint of the one before: 30 GB on an ordinary disk."""


class WriterWaits(Exception):
    """A version has waited for `CHECKPOINT_S`: the checkpoint is abandoned."""


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

    def give_way(self) -> None:
        """Called now and then by a reader that holds the gate for long. Raises `WriterWaits`."""
        if time.monotonic() - self._wanted_at > CHECKPOINT_S:
            raise WriterWaits
