"""Accepts inbound connections, waits for their first byte, and starts handshakes in the order of `HandshakeTurns`.

A connection that is silent or waits for its turn costs a socket and a table entry, but no task and no buffers. One
`selectors` object watches all silent sockets, and trio waits for that object as for any descriptor.
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
from swarm.transport.connection.handshakes import Arrival, HandshakeTurns

__all__ = ["Reception"]

_ACCEPTS_PER_S: Final = 4000.0
"""To accept a connection, watch it and close it again costs some 60 us, so this is at most a quarter of a core. Faster
connections wait in the kernel."""
_AT_ONCE: Final = 64
"""Sockets handled before other tasks get their turn: 4 ms."""

ServeSocket = Callable[[socket.socket, Arrival], Awaitable[None]]


class Reception:
    """One for a transport."""

    def __init__(
        self, handshakes: HandshakeTurns, mark: bytes, serve_socket: ServeSocket, clock: Callable[[], float]
    ) -> None:
        """`mark`: a connection that begins with this byte needs no handshake and costs little CPU time. `serve_socket`:
        runs in a task of its own for each socket whose turn has come. It must close the socket, and call `finish` as
        soon as the peer's key is proved."""
        self._handshakes = handshakes
        self._mark = mark
        self._serve_socket = serve_socket
        self._clock = clock
        self._watched = selectors.DefaultSelector()
        self._accepts = Bucket(_ACCEPTS_PER_S, _AT_ONCE)
        self._changed = trio.Event()
        self._held: set[Arrival] = set()  # accepted, but not yet passed to `serve_socket`
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; then close the connections that are still held."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._watch_silent)
                task_status.started()
                await self._start_handshakes()
        finally:
            self._nursery = None
            for arrival in list(self._held):
                arrival.drop()
            self._watched.close()

    async def accept_from(self, listener: socket.socket) -> None:
        """Accept connections from a listening socket until cancelled."""
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
            if error.errno in (errno.EMFILE, errno.ENFILE):  # no descriptors are left: drop a stranger to free one
                victim = self._handshakes.crowded_out(self._clock())
                if victim is not None:
                    self._drop(victim)
                else:
                    self._accepts.spend(_ACCEPTS_PER_S / 10, self._clock())
            return False  # for any other error: the dialer closed it before we accepted
        self._accepts.spend(1, self._clock())
        sock.setblocking(False)
        arrival, dropped = self._handshakes.add_arrival(address[0], self._clock())
        for each in dropped:
            each.drop()
        if arrival is None:
            sock.close()
            return True
        arrival.drop = partial(self._close_held, sock, arrival)
        arrival.begin = partial(self._start, sock, arrival)
        self._held.add(arrival)
        self._watched.register(sock, selectors.EVENT_READ, arrival)
        self._wake()
        return True

    async def wait_turn(self, source: str) -> Arrival | None:
        """Wait until a connection that came over a circuit, and has sent its first byte, may begin its handshake.

        `source`: whose handshake it counts as. None: it has to make room; otherwise the caller must call `finish`.
        """
        now = self._clock()
        arrival, dropped = self._handshakes.add_arrival(source, now)
        for each in dropped:
            each.drop()
        if arrival is None:
            return None
        decided = trio.Event()
        arrival.begin = arrival.drop = decided.set
        self._handshakes.note_first_byte(arrival, now)
        self._wake()
        try:
            await decided.wait()
        except BaseException:
            self.finish(arrival)
            raise
        return None if arrival.is_finished else arrival

    def finish(self, arrival: Arrival) -> None:
        """The arrival's peer has proved its key, or its connection is gone. Harmless when repeated."""
        self._handshakes.finish(arrival)

    def _drop(self, arrival: Arrival) -> None:
        self._handshakes.finish(arrival)
        arrival.drop()

    def _close_held(self, sock: socket.socket, arrival: Arrival) -> None:
        self._unwatch(sock)
        self._held.discard(arrival)
        self._handshakes.finish(arrival)
        sock.close()

    def _unwatch(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0 and sock in self._watched.get_map():
            self._watched.unregister(sock)

    def _start(self, sock: socket.socket, arrival: Arrival) -> None:
        if self._nursery is None:
            self._close_held(sock, arrival)
        else:
            self._held.discard(arrival)
            self._nursery.start_soon(self._serve_socket, sock, arrival)

    def _wake(self) -> None:
        self._changed.set()

    async def _watch_silent(self) -> None:
        """Wait for the first byte of each silent socket."""
        while True:
            await trio.lowlevel.wait_readable(self._watched.fileno())  # type: ignore[attr-defined]  # epoll has it
            for key, _ in self._watched.select(0)[:_AT_ONCE]:
                with guarded(Source.CONNECTION, key.data.host.name) as outcome:
                    self._look_at_first_byte(key.fileobj, key.data)  # type: ignore[arg-type]
                if outcome.error is not None:
                    self._drop(key.data)
            await trio.lowlevel.checkpoint()

    def _look_at_first_byte(self, sock: socket.socket, arrival: Arrival) -> None:
        if arrival.is_finished:
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
        cost_s = self._handshakes.rules.token_cost_s if first == self._mark else None
        self._handshakes.note_first_byte(arrival, self._clock(), cost_s)
        self._wake()

    async def _start_handshakes(self) -> None:
        while True:
            self._changed = trio.Event()
            now = self._clock()
            begun, dropped = self._handshakes.next_turns(now)
            for arrival in [*dropped, *self._handshakes.expire(now)]:
                arrival.drop()
            for arrival in begun:
                if not arrival.is_finished:  # it may have made room for a later one of `begun`
                    arrival.begin()
            with trio.move_on_after(self._handshakes.wait_s(now)):
                await self._changed.wait()
            await trio.lowlevel.checkpoint()
