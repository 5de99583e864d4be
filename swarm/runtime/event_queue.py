"""Events that wait for the core: one queue for each peer, served by the time that each peer has used.

With one queue for all, the peer that sends most would decide how long the others wait. Here the next event is that of
the peer which has used the least of the loop's time (start-time fair queueing, Goyal et al. 1996): a peer that floods
this member, or whose messages are expensive, delays only itself. Our own events (timers, finished jobs, the trainer's
calls) always go first.

The events and bytes of one peer that may wait are bounded. Above the bound the task that reads from the peer waits, and
through it the peer.
"""

import heapq
from collections import deque
from typing import Final

import trio

from swarm.protocol.core.events import Event

__all__ = ["OURS", "EventQueue", "QueuedEvent"]

OURS: Final = b""
"""The owner of events that no peer caused."""


class QueuedEvent:
    """One event of `size` bytes, charged to `owner`. `done` is set once its effects have begun."""

    __slots__ = ("done", "event", "owner", "size")

    def __init__(self, event: Event, owner: bytes, size: int, done: trio.Event | None) -> None:
        self.event, self.owner, self.size, self.done = event, owner, size, done


class _OwnerQueue:
    """The queued events of one owner."""

    __slots__ = ("cost", "events", "listed", "room", "size")

    def __init__(self, cost: float) -> None:
        self.events: deque[QueuedEvent] = deque()
        self.size = 0
        self.cost = cost
        """Seconds of the loop that the owner has used; raised to the others' level when it returns from a pause."""
        self.listed = False
        """Whether the owner is in `EventQueue._turns`."""
        self.room: trio.Event | None = None
        """Set, and removed, when an event is taken; None when no task waits for room."""


class EventQueue:
    """Filled by many tasks, emptied by one."""

    def __init__(self, max_events: int, max_bytes: int) -> None:
        """`max_events`, `max_bytes`: how much of one owner may wait."""
        self._max_events, self._max_bytes = max_events, max_bytes
        self._ours = _OwnerQueue(0.0)
        self._owners: dict[bytes, _OwnerQueue] = {OURS: self._ours}
        self._turns: list[tuple[float, int, bytes]] = []
        """A heap of (cost, order of arrival, owner) of the owners that have something waiting."""
        self._arrivals = 0
        self._level = 0.0
        """The cost of the owner that was served last. An idle owner starts here: it has saved up nothing."""
        self._filled = trio.Event()
        self._closed = False

    def __len__(self) -> int:
        return sum(len(queue.events) for queue in self._owners.values())

    @property
    def is_empty(self) -> bool:
        """Whether no event waits."""
        return not self._turns and not self._ours.events

    async def put(self, event: Event, owner: bytes, size: int = 0, done: trio.Event | None = None) -> None:
        """Queue an event; waits while `owner` has too much waiting. After `close`, `done` is set at once."""
        while not self._closed and (queue := self._owners.get(owner)) is not None and self._is_full(queue):
            if queue.room is None:
                queue.room = trio.Event()
            await queue.room.wait()
        self.put_nowait(event, owner, size, done)

    def put_nowait(self, event: Event, owner: bytes, size: int = 0, done: trio.Event | None = None) -> bool:
        """Queue an event, unless `owner` has too much waiting: then it returns False. After `close` it sets `done`."""
        if self._closed:
            if done is not None:
                done.set()
            return True
        queue = self._owners.get(owner)
        if queue is None:
            queue = self._owners[owner] = _OwnerQueue(self._level)
        if self._is_full(queue):
            return False
        queue.events.append(QueuedEvent(event, owner, size, done))
        queue.size += size
        if not queue.listed and owner != OURS:
            self._list(owner, queue)
        self._filled.set()
        return True

    def _is_full(self, queue: _OwnerQueue) -> bool:
        return len(queue.events) >= self._max_events or (queue.size >= self._max_bytes and bool(queue.events))

    def _list(self, owner: bytes, queue: _OwnerQueue) -> None:
        queue.listed = True
        queue.cost = max(queue.cost, self._level)
        self._arrivals += 1
        heapq.heappush(self._turns, (queue.cost, self._arrivals, owner))

    async def wait(self) -> None:
        """Return when an event is queued."""
        while self.is_empty:
            self._filled = trio.Event()
            await self._filled.wait()

    def take_next(self) -> QueuedEvent | None:
        """The next event; None when nothing is queued. The caller passes its cost to `charge_event` before the next
        call."""
        if self._ours.events:
            return self._pop(self._ours)
        if not self._turns:
            return None
        self._level, _, owner = heapq.heappop(self._turns)
        queue = self._owners[owner]
        queue.listed = False
        return self._pop(queue)

    def charge_event(self, queued: QueuedEvent, seconds: float) -> None:
        """Charge the owner of the event that was taken last; owners with a lower cost are served before it."""
        self.charge(queued.owner, seconds)
        queue = self._owners.get(queued.owner)
        if queue is not None and queue.events and not queue.listed and queued.owner != OURS:
            self._list(queued.owner, queue)

    def _pop(self, queue: _OwnerQueue) -> QueuedEvent:
        found = queue.events.popleft()
        queue.size -= found.size
        if queue.room is not None:
            queue.room.set()
            queue.room = None
        return found

    def charge(self, owner: bytes, seconds: float) -> None:
        """Charge `owner` for loop time that it used apart from its events."""
        queue = self._owners.get(owner)
        if queue is not None and owner != OURS:
            queue.cost = max(queue.cost, self._level) + seconds

    def charge_new(self, owner: bytes, seconds: float) -> None:
        """Charge `owner` for an event that never waited, and serve the others from there on."""
        queue = self._owners.get(owner)
        if queue is None:
            queue = self._owners[owner] = _OwnerQueue(self._level)
        self._level = max(queue.cost, self._level)
        queue.cost = self._level + seconds

    def prune(self) -> None:
        """Forget owners without events that have used no more time than the owner that was served last."""
        for name in [name for name, queue in self._owners.items() if name != OURS
                     and not queue.events and queue.room is None and queue.cost <= self._level]:  # fmt: skip
            del self._owners[name]

    def close(self) -> None:
        """Wake every task that waits: for room, or for an event to be applied. Nothing is queued any more."""
        self._closed = True
        for queue in self._owners.values():
            if queue.room is not None:
                queue.room.set()
            for queued in queue.events:
                if queued.done is not None:
                    queued.done.set()
