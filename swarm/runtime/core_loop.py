"""The one task that applies events to the core, each peer's in its turn, and timers when they are due."""

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import trio

from swarm.guard import Source, guarded
from swarm.protocol.core.events import Effect, Event, PieceBad, Timer
from swarm.runtime.event_queue import OURS, EventQueue, QueuedEvent
from swarm.runtime.limits import RuntimeLimits

__all__ = ["Core", "CoreLoop", "EventHandlers", "PostEvent"]

_SLICE_S: Final = 0.005
"""Events are applied for at most this long before other tasks run."""
_TIMER_RETRY_S: Final = 1.0
"""A timer whose event met a bug of ours is due again after this; without it the core would never act again."""
_SENT_BYTES_S: Final = 100e6
"""Bytes sent in answer to a peer's event are charged to the peer at this rate, in bytes a second of loop time.
Encryption and the socket take about that long for them."""

PostEvent = Callable[..., Awaitable[None]]
"""`await post(event, size=0, *, until_applied=False)`, see `CoreLoop.post`."""


class Core(Protocol):
    """A `Peer` or an `Authority`: the state machine that events are applied to."""

    def start(self, now: float, addrs: tuple[str, ...] = ()) -> list[Effect]: ...

    def apply(self, event: Event, now: float) -> list[Effect]: ...

    def admits(self, peer: bytes) -> bool:
        """Whether `peer` has shown a valid grant or is the authority. It may then send content and gossip."""
        ...

    def knows(self, peer: bytes) -> bool:
        """Whether `peer` holds a lease as far as this member knows, even if it has not shown its grant."""
        ...


class EventHandlers(Protocol):
    """What the loop calls for each event; the runtime provides it."""

    def perform(self, effects: list[Effect]) -> None:
        """Begin these effects."""
        ...

    def check_event(self, event: Event) -> None:
        """See a peer's event just before the core does. Raises `PeerError` to reject it."""
        ...

    def close_session(self, peer: bytes, why: str) -> None:
        """End the session with `peer`, if there is one."""
        ...

    def event_applied(self, owner: bytes) -> None:
        """An event of the peer `owner`, or one of `OURS`, or a timer was applied."""
        ...


class CoreLoop:
    """Applies events to one core. An error that a peer's event causes ends that peer's session, and nothing else."""

    def __init__(self, core: Core, limits: RuntimeLimits) -> None:
        self._core = core
        self._queue = EventQueue(limits.events, limits.events_bytes)
        self._timers: dict[str, float] = {}
        self._current: QueuedEvent | None = None
        """The event that is being applied."""
        self._handlers: EventHandlers | None = None
        """None while the loop does not run."""
        self._direct_s = 0.0
        """Time that events have taken which `post` applied itself, since the loop's last turn."""
        self._following: deque[Event] = deque()
        """Events to be applied right after the present one; see `follow`."""
        self._turn_began_s: float | None = None
        """When the present turn of applying events began; None: no peer's or queued event is being applied."""
        self._until_due: trio.CancelScope | None = None
        """The scope that ends the loop's wait when the next timer is due."""

    # ------------------------------------------------------------ events in

    async def post(self, event: Event, size: int = 0, *, until_applied: bool = False) -> None:
        """Queue an event of `size` bytes for the core; waits while too many of the same peer are queued.

        `until_applied`: also wait until its effects have begun, or the loop has ended.

        A peer's event is applied at once if nothing is queued before it: waking the loop's task would cost as much as
        the event. After `_SLICE_S` of such events the loop gets a turn, so that a peer that posts without pause cannot
        hold up the other tasks.
        """
        owner = _owner(event)
        if (
            owner != OURS
            and self._handlers is not None
            and self._current is None
            and self._direct_s < _SLICE_S
            and self._queue.is_empty
        ):
            self._apply_directly(QueuedEvent(event, owner, size, None), self._handlers)
            return
        done = trio.Event() if until_applied else None
        if not self._queue.put_nowait(event, owner, size, done):  # saves one turn of the scheduler for most events
            await self._queue.put(event, owner, size, done)
        if done is not None:
            await done.wait()

    def follow(self, event: Event) -> bool:
        """Have `event`, which an effect of the present event caused, applied right after that one. False: nothing is
        being applied, or the turn has lasted long enough; then post it."""
        if self._turn_began_s is None or time.perf_counter() - self._turn_began_s >= _SLICE_S:
            return False
        self._following.append(event)
        return True

    async def apply(self, event: Event) -> None:
        """Queue an event of our own, and wait until its effects have begun, or the loop has ended."""
        done = trio.Event()
        await self._queue.put(event, OURS, 0, done)
        await done.wait()

    def charge(self, peer: bytes, seconds: float) -> None:
        """Charge `peer` for loop time that its input took before it was queued (decoding, for example)."""
        self._queue.charge(peer, seconds)

    def charge_sent(self, size: int) -> None:
        """Charge the peer whose event is being applied for `size` bytes sent because of it."""
        if self._current is not None:
            self._queue.charge(self._current.owner, size / _SENT_BYTES_S)

    def set_timer(self, name: str, at: float) -> None:
        """Apply `Timer(name)` at this local time. It replaces an earlier timer of that name."""
        self._timers[name] = at
        if self._until_due is not None and at < self._until_due.deadline:
            self._until_due.deadline = at

    def release_waiters(self) -> None:
        """The loop has ended: wake every task that waits for an event to be queued or applied."""
        self._handlers = None
        self._queue.close()

    # ------------------------------------------------------------ the loop

    async def apply_events(self, handlers: EventHandlers) -> None:
        """Apply events and timers until cancelled."""
        self._handlers = handlers
        while True:
            if self._next_due_s <= trio.current_time():
                self._apply_timer(min(self._timers, key=lambda name: (self._timers[name], name)), handlers)
                self._queue.prune()
                # On a busy machine a timer may be due at every turn: events must be applied all the same.
                self._apply_queued(handlers)
                await trio.lowlevel.checkpoint()
            else:
                with trio.CancelScope(deadline=self._next_due_s) as self._until_due:
                    await self._apply_until(self._until_due, handlers)
                self._until_due = None

    @property
    def _next_due_s(self) -> float:
        """When the next timer is due."""
        return min(self._timers.values(), default=math.inf)

    def _apply_timer(self, name: str, handlers: EventHandlers) -> None:
        del self._timers[name]
        with guarded(Source.CORE, f"timer {name}") as outcome:
            handlers.perform(self._core.apply(Timer(name), trio.current_time()))
        if outcome.error is not None:
            self._timers.setdefault(name, trio.current_time() + _TIMER_RETRY_S)
        handlers.event_applied(OURS)

    async def _apply_until(self, until_due: trio.CancelScope, handlers: EventHandlers) -> None:
        """Apply events until a timer is due. One scope serves all of them: a new one costs as much as an event."""
        while until_due.deadline > trio.current_time():
            await self._queue.wait()
            self._apply_queued(handlers)
            await trio.lowlevel.checkpoint()
            due_s = self._next_due_s
            if due_s != until_due.deadline:
                until_due.deadline = due_s

    def _apply_queued(self, handlers: EventHandlers) -> None:
        """Apply queued events for at most `_SLICE_S`."""
        self._direct_s = 0.0
        began = now = time.perf_counter()
        while now - began < _SLICE_S and (queued := self._queue.take_next()) is not None:
            taken_s = self._apply_with_following(queued, handlers, began)
            self._queue.charge_event(queued, taken_s)
            now = time.perf_counter()

    def _apply_directly(self, posted: QueuedEvent, handlers: EventHandlers) -> None:
        """Apply an event that was not queued."""
        began_s = time.perf_counter()
        taken_s = self._apply_with_following(posted, handlers, began_s)
        self._queue.charge_new(posted.owner, taken_s)
        self._direct_s += time.perf_counter() - began_s

    def _apply_with_following(self, queued: QueuedEvent, handlers: EventHandlers, turn_began_s: float) -> float:
        """Apply an event, and those that follow it, which are charged to their own owners. Returns the seconds of the
        first."""
        before_s = time.perf_counter()
        self._turn_began_s = turn_began_s
        try:
            self._current = queued
            self._apply(queued, handlers)
            now_s = time.perf_counter()
            taken_s = now_s - before_s
            while self._following:
                event = self._following.popleft()
                self._current = QueuedEvent(event, _owner(event), 0, None)
                self._apply(self._current, handlers)
                before_s, now_s = now_s, time.perf_counter()
                self._queue.charge_new(self._current.owner, now_s - before_s)
        finally:
            self._current = self._turn_began_s = None
        return taken_s

    def _apply(self, queued: QueuedEvent, handlers: EventHandlers) -> None:
        if queued.owner == OURS:
            handlers.perform(self._core.apply(queued.event, trio.current_time()))
        else:
            try:
                handlers.check_event(queued.event)
                handlers.perform(self._core.apply(queued.event, trio.current_time()))
            except Exception as error:  # a guard around each event would cost a tenth of it
                with guarded(Source.CORE, queued.owner) as outcome:
                    raise error
                if outcome.is_rule_broken:
                    self._expel(queued.owner, outcome.why, handlers)
        handlers.event_applied(queued.owner)
        if queued.done is not None:
            queued.done.set()

    def _expel(self, peer: bytes, why: str, handlers: EventHandlers) -> None:
        with guarded(Source.CORE, peer):
            handlers.perform(self._core.apply(PieceBad(peer, why), trio.current_time()))
        handlers.close_session(peer, why)


def _owner(event: Event) -> bytes:
    """The peer that caused an event and is charged for it, or `OURS`."""
    return getattr(event, "peer", None) or OURS
