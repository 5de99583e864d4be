"""Inbound connections until their handshake: accepted, heard, and begun in the order that `Admission` says.

A connection that has said nothing, or waits for its turn, costs a socket and an entry in a table: no task, no buffers.
All such sockets are watched together, by one `selectors` object which trio waits for as for any descriptor.
"""

import errno
import selectors
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import trio

from swarm.guard import Source, guarded
from swarm.protocol.core.bucket import Bucket
from swarm.transport.connection.admission import Admission, Arrival

__all__ = ["Reception"]

_ACCEPTS_PER_S: Final = 4000.0
"""A connection that is accepted, watched and closed again costs some 60 us: a quarter of a core at most goes into it.
What comes faster waits in the kernel."""
_AT_ONCE: Final = 64
"""Sockets dealt with between two turns of the loop: 4 ms."""

Begin = Callable[[socket.socket, Arrival], Awaitable[None]]


class Reception:
    """One for a transport. `begin` gets each socket whose turn has come, in a task of its own; it closes the socket,
    and calls `over` when it knows its peer."""

    def __init__(self, admission: Admission, mark: bytes, begin: Begin, clock: Callable[[], float]) -> None:
        """`mark`: a connection that begins with this byte needs no handshake, and little time."""
        self._admission = admission
        self._mark = mark
        self._begin = begin
        self._clock = clock
        self._watched = selectors.DefaultSelector()
        self._accepts = Bucket(_ACCEPTS_PER_S, _AT_ONCE)
        self._changed = trio.Event()
        self._held: set[Arrival] = set()  # accepted, and not begun
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; closes what has not begun by then."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._hear)
                task_status.started()
                await self._give_turns()
        finally:
            self._nursery = None
            for arrival in list(self._held):
                arrival.drop()
            self._watched.close()

    async def accept_from(self, listener: socket.socket) -> None:
        """Take connections from a listening socket until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(listener)
            for _ in range(_AT_ONCE):
                if not self._accept_one(listener):
                    break
            debt_s = self._accepts.spend(0, self._clock())
            await trio.sleep(debt_s)

    def _accept_one(self, listener: socket.socket) -> bool:
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # no descriptors are left: a stranger gives up its own
                victim = self._admission.crowded_out(self._clock())
                if victim is not None:
                    self._drop(victim)
                else:
                    self._accepts.spend(_ACCEPTS_PER_S / 10, self._clock())
            return False  # else: it was gone before we looked
        self._accepts.spend(1, self._clock())
        sock.setblocking(False)
        arrival, dropped = self._admission.arrive(address[0], self._clock())
        for each in dropped:
            each.drop()
        if arrival is None:
            sock.close()
            return True
        arrival.drop = partial(self._forget, sock, arrival)
        arrival.begin = partial(self._start, sock, arrival)
        self._held.add(arrival)
        self._watched.register(sock, selectors.EVENT_READ, arrival)
        self._wake()
        return True

    async def turn(self, source: str) -> Arrival | None:
        """Wait for the turn of a connection that came another way (a circuit) and has spoken already. None: it has to
        make room. Else `over` must follow."""
        now = self._clock()
        arrival, dropped = self._admission.arrive(source, now)
        for each in dropped:
            each.drop()
        if arrival is None:
            return None
        decided = trio.Event()
        arrival.begin = arrival.drop = decided.set
        self._admission.spoke(arrival, now)
        self._wake()
        try:
            await decided.wait()
        except BaseException:
            self.over(arrival)
            raise
        return None if arrival.is_over else arrival

    def over(self, arrival: Arrival) -> None:
        """Its peer is known, or it is gone."""
        self._admission.over(arrival)

    def _drop(self, arrival: Arrival) -> None:
        self._admission.over(arrival)
        arrival.drop()

    def _forget(self, sock: socket.socket, arrival: Arrival) -> None:
        """Close a socket that has not begun."""
        self._unwatch(sock)
        self._held.discard(arrival)
        self._admission.over(arrival)
        sock.close()

    def _unwatch(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0 and sock in self._watched.get_map():
            self._watched.unregister(sock)

    def _start(self, sock: socket.socket, arrival: Arrival) -> None:
        if self._nursery is None:
            self._forget(sock, arrival)
        else:
            self._held.discard(arrival)
            self._nursery.start_soon(self._begin, sock, arrival)

    def _wake(self) -> None:
        self._changed.set()

    async def _hear(self) -> None:
        """Look at what the sockets that were silent have said."""
        while True:
            await trio.lowlevel.wait_readable(self._watched.fileno())  # type: ignore[attr-defined]  # not of select()
            for key, _ in self._watched.select(0)[:_AT_ONCE]:
                with guarded(Source.CONNECTION, key.data.host.name) as outcome:
                    self._hear_one(key.fileobj, key.data)  # type: ignore[arg-type]
                if outcome.error is not None:
                    self._drop(key.data)
            await trio.lowlevel.checkpoint()

    def _hear_one(self, sock: socket.socket, arrival: Arrival) -> None:
        if arrival.is_over:
            return
        try:
            first = sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        if not first:
            self._drop(arrival)
            return
        self._unwatch(sock)
        cost_s = self._admission.rules.token_cost_s if first == self._mark else None
        self._admission.spoke(arrival, self._clock(), cost_s)
        self._wake()

    async def _give_turns(self) -> None:
        while True:
            self._changed = trio.Event()
            now = self._clock()
            begun, dropped = self._admission.turns(now)
            for arrival in [*dropped, *self._admission.expired(now)]:
                arrival.drop()
            for arrival in begun:
                if not arrival.is_over:  # it may have had to make room for one that began after it
                    arrival.begin()
            with trio.move_on_after(self._admission.wait_s(now)):
                await self._changed.wait()
            await trio.lowlevel.checkpoint()
