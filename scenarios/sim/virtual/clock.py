"""Virtual time: what is due, in the order in which it is due. One seed gives one order, and one log."""

import gc
import heapq
from collections import deque
from collections.abc import Callable
from struct import pack
from typing import Any, BinaryIO

from blake3 import blake3

__all__ = ["Clock"]

_BATCH = 4096
"""Records gathered before they are hashed: hashing each by itself cost a tenth of a run."""


class Clock:
    """A queue of calls by time; among equals, in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Events that cores have been given."""
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._soon: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._count = 0
        self._records: list[bytes] = []
        self._digest = blake3()
        self.log: BinaryIO | None = None
        """Where the event log goes, besides into the digest."""
        self._halted = False

    def at(self, when: float, action: Callable[..., object], *args: Any) -> None:
        """Call `action` at this time, or now if that is past."""
        self._count += 1
        heapq.heappush(self._queue, (when if when > self.now else self.now, self._count, action, args))

    def soon(self, action: Callable[..., object], *args: Any) -> None:
        """Call `action` when what is being done now is done, before time passes."""
        self._soon.append((action, args))

    def halt(self) -> None:
        """Let no more time pass in the `run` that is under way: somebody outside has something to do first."""
        self._halted = True

    def run(self, until_s: float) -> None:
        """Let virtual time pass, up to `until_s` or until somebody says `halt`."""
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
        """Let time pass until the condition holds, for at most `limit_s`; whether it does. Looked at `every_s`."""
        end = self.now + limit_s
        while not condition():
            if self.now >= end:
                return False
            self.run(min(end, self.now + every_s))
        return True

    def note(self, number: int, what: bytes, effects: int) -> None:
        """Write one event into the log: when, to which node, of which kind, with how many effects."""
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
        """Hash over the whole event log so far."""
        self._flush()
        return self._digest.hexdigest()
