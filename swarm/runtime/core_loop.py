"""The one task that applies events to the core, each peer's in its turn, and timers when they are due."""

import math
import time
from collections.abc import Callable
from typing import Final, Protocol

import trio

from swarm.guard import Source, guarded
from swarm.protocol.core.events import Effect, Event, PieceBad, Timer
from swarm.runtime.event_queue import OURS, EventQueue, Waiting
from swarm.runtime.limits import Limits

__all__ = ["Core", "CoreLoop"]

_TURN_S: Final = 0.005
"""Events are applied for so long before other tasks get their turn."""
_TIMER_AGAIN_S: Final = 1.0
"""A timer that met a bug of ours goes off again after this: without it the core would stand still."""
_SENT_BYTES_S: Final = 100e6
"""What is sent in answer to a peer's event counts as if the loop sent so many bytes a second: encryption and sockets
take about that long for it."""


class Core(Protocol):
    """A `Peer` or an `Authority`."""

    def start(self, now: float, addrs: tuple[str, ...] = ()) -> list[Effect]: ...

    def apply(self, event: Event, now: float) -> list[Effect]: ...

    def admits(self, peer: bytes) -> bool:
        """Whether it has shown a grant that holds (or is the authority): it may then send content, and gossip."""
        ...

    def knows(self, peer: bytes) -> bool:
        """Whether it holds a lease as far as we know, shown or not: it is no stranger."""
        ...


class CoreLoop:
    """Runs one core. What a peer's event does to the core may end that peer's session, and nothing else."""

    def __init__(
        self,
        core: Core,
        perform: Callable[[list[Effect]], None],
        note: Callable[[Event], None],
        close: Callable[[bytes, str], None],
        applied: Callable[[bytes], None],
        limits: Limits,
    ) -> None:
        """`perform` begins effects. `note` sees each event of a peer just before the core does, and may raise
        `PeerError`. `close` ends a peer's session. `applied` is called after each event and timer, with the peer that
        caused the event, or `OURS`."""
        self._core, self._perform, self._note, self._close = core, perform, note, close
        self._applied = applied
        self._queue = EventQueue(limits.events, limits.events_bytes)
        self._timers: dict[str, float] = {}
        self._turn: Waiting | None = None
        """The event that is being applied."""

    # ------------------------------------------------------------ events in

    async def post(self, event: Event, size: int = 0, *, until_applied: bool = False) -> None:
        """Give the core an event of `size` bytes; waits while its peer has too many waiting. `until_applied`: also wait
        until its effects have been begun, or the loop has ended."""
        owner, done = _owner(event), trio.Event() if until_applied else None
        if not self._queue.put_nowait(event, owner, size, done):  # a turn of the loop for each would cost more
            await self._queue.put(event, owner, size, done)
        if done is not None:
            await done.wait()

    async def apply(self, event: Event) -> None:
        """Give the core an event of our own, and wait until its effects have been begun, or the loop has ended."""
        done = trio.Event()
        await self._queue.put(event, OURS, 0, done)
        await done.wait()

    def charge(self, peer: bytes, seconds: float) -> None:
        """`peer` has had so much of the loop's time beside its events: to be decoded, say."""
        self._queue.charge(peer, seconds)

    def sent(self, size: int) -> None:
        """So many bytes were sent because of the event that is being applied."""
        if self._turn is not None:
            self._queue.charge(self._turn.owner, size / _SENT_BYTES_S)

    def set_timer(self, name: str, at: float) -> None:
        """Give the core `Timer(name)` at this local time; it replaces an earlier wish of that name."""
        self._timers[name] = at

    def close(self) -> None:
        """The loop has ended: nobody is to wait for it."""
        self._queue.close()

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """For ever."""
        while True:
            if self._due_s <= trio.current_time():
                self._go_off(min(self._timers, key=lambda name: (self._timers[name], name)))
                self._queue.prune()
                self._apply_waiting()  # where a turn of all tasks takes longer than a tick, a timer is always due
                await trio.lowlevel.checkpoint()
            else:
                with trio.CancelScope(deadline=self._due_s) as until_due:
                    await self._apply_until(until_due)

    @property
    def _due_s(self) -> float:
        """When the next timer is due."""
        return min(self._timers.values(), default=math.inf)

    def _go_off(self, name: str) -> None:
        del self._timers[name]
        with guarded(Source.CORE, f"timer {name}") as outcome:
            self._perform(self._core.apply(Timer(name), trio.current_time()))
        if outcome.error is not None:
            self._timers.setdefault(name, trio.current_time() + _TIMER_AGAIN_S)
        self._applied(OURS)

    async def _apply_until(self, until_due: trio.CancelScope) -> None:
        """Apply events until a timer is due. One scope for all of them: to make one costs as much as an event does."""
        while until_due.deadline > trio.current_time():
            await self._queue.wait()
            self._apply_waiting()
            await trio.lowlevel.checkpoint()
            due_s = self._due_s
            if due_s != until_due.deadline:
                until_due.deadline = due_s

    def _apply_waiting(self) -> None:
        """Apply events that wait, for at most `_TURN_S`."""
        began = now = time.perf_counter()
        while now - began < _TURN_S and (waiting := self._queue.take()) is not None:
            self._turn = waiting
            self._apply(waiting)
            self._turn = None
            before, now = now, time.perf_counter()
            self._queue.served(waiting, now - before)

    def _apply(self, waiting: Waiting) -> None:
        if waiting.owner == OURS:
            self._perform(self._core.apply(waiting.event, trio.current_time()))
        else:
            with guarded(Source.CORE, waiting.owner) as outcome:
                self._note(waiting.event)
                self._perform(self._core.apply(waiting.event, trio.current_time()))
            if outcome.is_rule_broken:
                self._expel(waiting.owner, outcome.why)
        self._applied(waiting.owner)
        if waiting.done is not None:
            waiting.done.set()

    def _expel(self, peer: bytes, why: str) -> None:
        with guarded(Source.CORE, peer):
            self._perform(self._core.apply(PieceBad(peer, why), trio.current_time()))
        self._close(peer, why)


def _owner(event: Event) -> bytes:
    """Whose turn an event takes: the peer's that caused it."""
    return getattr(event, "peer", None) or OURS
