"""Events waiting for the core, one queue for each peer, served by what each peer has cost so far.

One queue for all would let whoever says most decide how long everybody else waits. Here the next event is that of the
peer which has used the least of the loop's time (start-time fair queueing): a peer that floods us, or whose messages
are dear, waits for itself alone. What is our own (timers, finished jobs, the trainer's words) always goes first. A peer
has so many events and bytes waiting, and then whoever reads from it waits, and through that reader the peer.
"""

import heapq
from collections import deque
from typing import Final

import trio

from swarm.protocol.core.events import Event

__all__ = ["OURS", "EventQueue", "Waiting"]

OURS: Final = b""
"""The owner of events that no peer caused."""


class Waiting:
    """One event. `done` is set when its effects have been begun; `owner`: whose turn it takes."""

    __slots__ = ("done", "event", "owner", "size")

    def __init__(self, event: Event, owner: bytes, size: int, done: trio.Event | None) -> None:
        self.event, self.owner, self.size, self.done = event, owner, size, done


class _Line:
    """What waits of one owner."""

    __slots__ = ("cost", "listed", "room", "size", "waiting")

    def __init__(self, cost: float) -> None:
        self.waiting: deque[Waiting] = deque()
        self.size = 0
        self.cost = cost
        """Seconds of the loop that it has used, or was given for coming back."""
        self.listed = False
        """It stands among those whose turn may come."""
        self.room: trio.Event | None = None
        """Somebody waits for room."""


class EventQueue:
    """Put from many tasks, taken by one."""

    def __init__(self, events: int, size_bytes: int) -> None:
        """`events`, `size_bytes`: how much of one owner may wait."""
        self._most, self._most_bytes = events, size_bytes
        self._lines: dict[bytes, _Line] = {OURS: _Line(0.0)}
        self._turns: list[tuple[float, int, bytes]] = []
        """A heap of (cost, order of arrival, owner) of the owners that have something waiting."""
        self._arrivals = 0
        self._level = 0.0
        """The cost of whoever had its turn last: who comes back after a pause has saved up nothing."""
        self._news = trio.Event()
        self._closed = False

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    async def put(self, event: Event, owner: bytes, size: int = 0, done: trio.Event | None = None) -> None:
        """Queue it; waits while too much of its owner's waits. After `close` nothing is queued, and nobody waits."""
        while not self._closed and (line := self._lines.get(owner)) is not None and self._is_full(line):
            if line.room is None:
                line.room = trio.Event()
            await line.room.wait()
        self.put_nowait(event, owner, size, done)

    def put_nowait(self, event: Event, owner: bytes, size: int = 0, done: trio.Event | None = None) -> bool:
        """Queue it if there is room: whether there was."""
        if self._closed:
            if done is not None:
                done.set()
            return True
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = _Line(self._level)
        if self._is_full(line):
            return False
        line.waiting.append(Waiting(event, owner, size, done))
        line.size += size
        if not line.listed and owner != OURS:
            self._list(owner, line)
        self._news.set()
        return True

    def _is_full(self, line: _Line) -> bool:
        return len(line.waiting) >= self._most or (line.size >= self._most_bytes and bool(line.waiting))

    def _list(self, owner: bytes, line: _Line) -> None:
        line.listed = True
        line.cost = max(line.cost, self._level)
        self._arrivals += 1
        heapq.heappush(self._turns, (line.cost, self._arrivals, owner))

    async def wait(self) -> None:
        """Return when something waits."""
        while not self._lines[OURS].waiting and not self._turns:
            self._news = trio.Event()
            await self._news.wait()

    def take(self) -> Waiting | None:
        """The next event, whose cost `served` must be told before the next one is taken; None when nothing waits."""
        ours = self._lines[OURS]
        if ours.waiting:
            return self._pop(ours)
        if not self._turns:
            return None
        self._level, _, owner = heapq.heappop(self._turns)
        line = self._lines[owner]
        line.listed = False
        return self._pop(line)

    def served(self, waiting: Waiting, seconds: float) -> None:
        """That event has used so much of the loop's time: its owner's next turn comes after that of the cheaper."""
        self.charge(waiting.owner, seconds)
        line = self._lines.get(waiting.owner)
        if line is not None and line.waiting and not line.listed and waiting.owner != OURS:
            self._list(waiting.owner, line)

    def _pop(self, line: _Line) -> Waiting:
        found = line.waiting.popleft()
        line.size -= found.size
        if line.room is not None:
            line.room.set()
            line.room = None
        return found

    def charge(self, owner: bytes, seconds: float) -> None:
        """`owner` has used so much of the loop's time, apart from its events."""
        line = self._lines.get(owner)
        if line is not None and owner != OURS:
            line.cost = max(line.cost, self._level) + seconds

    def prune(self) -> None:
        """Forget owners of which nothing waits, and that have had no more than whoever had its turn last."""
        for name in [name for name, line in self._lines.items() if name != OURS
                     and not line.waiting and line.room is None and line.cost <= self._level]:  # fmt: skip
            del self._lines[name]

    def close(self) -> None:
        """The loop has ended: whoever waits is let go."""
        self._closed = True
        for line in self._lines.values():
            if line.room is not None:
                line.room.set()
            for waiting in line.waiting:
                if waiting.done is not None:
                    waiting.done.set()
