"""A virtual clock: a queue of calls in order of their time. The same seed gives the same order and the same log."""

import gc
import heapq
from collections import deque
from collections.abc import Callable
from struct import pack
from typing import Any, BinaryIO

from blake3 import blake3

__all__ = ["Clock"]

_BATCH = 4096
"""Records that are hashed together: hashing each by itself took a tenth of a run."""


class Clock:
    """A queue of calls by time. Calls for the same time run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Number of events that cores have got."""
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._soon: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._count = 0
        self._records: list[bytes] = []
        self._digest = blake3()
        self.log: BinaryIO | None = None
        """If set, the event log is also written here."""
        self._halted = False

    def at(self, when: float, action: Callable[..., object], *args: Any) -> None:
        """Call `action` at this time, or now if it has passed."""
        self._count += 1
        heapq.heappush(self._queue, (when if when > self.now else self.now, self._count, action, args))

    def soon(self, action: Callable[..., object], *args: Any) -> None:
        """Call `action` after the current call, before time advances."""
        self._soon.append((action, args))

    def halt(self) -> None:
        """Stop the running `run` before time advances, so that its caller can act first."""
        self._halted = True

    def run(self, until_s: float) -> None:
        """Advance virtual time to `until_s`, or until `halt` is called."""
        collecting = gc.isenabled()
        gc.disable()  # a million short-lived objects and no cycles: looking for some took half of all time
        queue, soon, pop = self._queue, self._soon, heapq.heappop
        self._halted = False
        try:
            while soon or (queue and queue[0][0] <= until_s and not self._halted):
                if soon:
                    action, args = soon.popleft()
                else:
                    self.now, _, action, args = pop(queue)
                action(*args)
        finally:
            if collecting:
                gc.enable()
        if not self._halted:
            self.now = until_s

    def run_until(self, condition: Callable[[], bool], limit_s: float, every_s: float = 0.005) -> bool:
        """Advance time until the condition holds, checked every `every_s` seconds, for at most `limit_s`. Return
        whether it holds."""
        end = self.now + limit_s
        while not condition():
            if self.now >= end:
                return False
            self.run(min(end, self.now + every_s))
        return True

    def note(self, number: int, what: bytes, effects: int) -> None:
        """Log one event: its time, node and kind, and the number of its effects."""
        self.events += 1
        self._records.append(pack("<dIH", self.now, number, effects & 0xFFFF) + what)
        if len(self._records) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        data = b"".join(self._records)
        self._records.clear()
        self._digest.update(data)
        if self.log is not None:
            self.log.write(data)

    @property
    def digest(self) -> str:
        """Hash of the event log so far."""
        self._flush()
        return self._digest.hexdigest()
