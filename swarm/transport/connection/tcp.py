"""TCP for py-libp2p: sockets that count their bytes, dialing, and serving inbound connections.

The count has every byte that crosses the socket: ciphertext, framing and handshakes, without TCP's own headers. The
library's TCP class is not used: it listens with SO_REUSEPORT, so that two programs would share a port unnoticed, and
the task of an inbound connection would outlive the connection.
"""

import errno
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final

import trio
from libp2p.abc import IListener, IRawConnection, ITransport
from libp2p.custom_types import THandler
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from swarm.guard import Source, guarded
from swarm.transport.base import Traffic
from swarm.transport.connection.addresses import host_and_port
from swarm.transport.connection.departed import departed_bytes
from swarm.transport.connection.handshakes import Arrival, HandshakeTurns
from swarm.transport.connection.ports import connect_from
from swarm.transport.connection.reception import Reception
from swarm.transport.tuning import PAUSE_S, awaken, tune

__all__ = ["TOKEN_BYTES", "TOKEN_MARK", "CountedSocket", "TcpTransport"]

TOKEN_MARK: Final = b"\1"
"""First byte of an inbound connection that continues an existing one (`nat.punch`). No negotiation begins with it."""
TOKEN_BYTES: Final = 16
TOKEN_S: Final = 3.0
"""For the rest of the token, which its sender puts into one packet with the mark."""
_CONNECT_S: Final = 5.0
"""For TCP's handshake of an outbound connection."""
_AGAIN_S: Final = 0.25
_ATTEMPTS: Final = 8
"""While an address does not answer, further attempts begin this time apart, beside the first. The kernel repeats each
attempt's first packet after 1 and 2 s more, so that together they send one each quarter of a second until `_CONNECT_S`:
after a cut of the network, a dial gets through that soon. A machine that is up answers the first, even when its
programs are busy, unless so many connections wait to be accepted that its kernel drops the packet: then a later one of
them gets through, or the repetition of its packet."""
READ_BYTES: Final = 262_144
"""Longest read: sixteen TLS records for one system call and one wake-up."""


class CountedSocket(ReadWriteCloser):
    """A TCP connection whose bytes are counted."""

    def __init__(self, stream: trio.SocketStream, traffic: Traffic, live: set["CountedSocket"]) -> None:
        """Adds itself to `live` until it is closed. Raises `OSError` if the connection has ended already."""
        self._stream = stream
        self._traffic = traffic
        self._live = live
        self._wrote_at_s = trio.current_time()
        self.on_upgraded: Callable[[], None] = _nothing
        """Called when the peer's key is proved and both ends have agreed on the muxer; set by `TcpTransport`."""
        self.on_closed: Callable[[], None] = _nothing
        """Called when it is closed; set by `TcpTransport`."""
        self.remote: tuple = stream.socket.getpeername()
        self.congestion_control = tune(stream.socket)
        live.add(self)

    async def read(self, n: int | None = None) -> bytes:
        try:
            data = await self._stream.receive_some(READ_BYTES if n is None else max(1, min(n, READ_BYTES)))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the TCP connection broke: {error}") from error
        self._traffic.received += len(data)
        return bytes(data)

    async def begins_with(self, mark: bytes) -> bool:
        """Whether the first byte, which must have arrived, is `mark`; leaves it to be read."""
        try:
            return await self._stream.socket.recv(len(mark), socket.MSG_PEEK) == mark
        except (OSError, trio.ClosedResourceError):
            return False

    async def read_exactly(self, length: int) -> bytes:
        """Read `length` bytes. Raises `ConnectionClosedError` if the connection ends before."""
        data = b""
        while len(data) < length:
            more = await self.read(length - len(data))
            if not more:
                raise ConnectionClosedError("the TCP connection ended in its first bytes")
            data += more
        return data

    async def read_into(self, buffer: memoryview) -> int:
        """As `read`, into memory of the caller: a new 256 KiB buffer for each read would cost page faults. Unlike trio,
        it waits before its first attempt to read, which would nearly always be in vain."""
        sock = self._stream.socket
        try:
            length = -1
            while length < 0:
                if sock.fileno() < 0:  # all closed sockets have fileno -1, and trio would report the next one as busy
                    raise ConnectionClosedError("the TCP connection is closed")
                await trio.lowlevel.wait_readable(sock)
                with suppress(BlockingIOError):
                    length = os.readv(sock.fileno(), (buffer,))
        except (OSError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the TCP connection broke: {error}") from error
        self._traffic.received += length
        return length

    async def write(self, data: bytes | memoryview) -> None:
        try:
            taken = self._offer(data)
            if taken < len(data):
                self._traffic.sent += len(data) - taken
                await self._stream.send_all(memoryview(data)[taken:])
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the TCP connection broke: {error}") from error

    def offer(self, data: bytes | memoryview) -> int:
        """Write what the kernel takes at once, and return how much. 0 also when the connection is broken: `write` says
        so."""
        try:
            return self._offer(data)
        except OSError:
            return 0

    def _offer(self, data: bytes | memoryview) -> int:
        """Write what the kernel takes at once, nearly always all of it, and return how much. Waiting for the socket
        first would cost more than this call. Raises `OSError`."""
        now_s = trio.current_time()
        if now_s - self._wrote_at_s > PAUSE_S and self.congestion_control == "bbr":
            awaken(self._stream.socket)
        self._wrote_at_s = now_s
        try:
            taken = os.write(self._stream.socket.fileno(), data)
        except BlockingIOError:
            return 0
        self._traffic.sent += taken
        return taken

    async def send_eof(self) -> None:
        """Close our direction; what the other end sends can still be read."""
        try:
            await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the TCP connection broke: {error}") from error

    async def close(self) -> None:
        self.abort()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """Close at once. A task that waits on the socket is woken with an error."""
        if self in self._live:
            self._live.discard(self)
            self._traffic.departed += self.departed_bytes() or 0
            self._stream.socket.close()
            self.on_closed()

    def departed_bytes(self) -> int | None:
        """Bytes of IP packets sent so far; None if the system does not say (`departed.departed_bytes`)."""
        return departed_bytes(self._stream.socket)

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.remote[:2]


def _nothing() -> None:
    pass


class TcpTransport(ITransport):
    """Dials and accepts for one host. `close_all` closes every socket that it made."""

    def __init__(
        self,
        traffic: Traffic,
        listeners: dict[str, socket.socket],
        handshakes: HandshakeTurns,
        accept_token: Callable[[bytes, CountedSocket], Awaitable[bool]],
    ) -> None:
        """`listeners`: as `bind` returns them. `accept_token`: takes over an inbound connection that begins with
        `TOKEN_MARK` and this token, or returns False."""
        self._traffic = traffic
        self._listeners = listeners
        self._accept_token = accept_token
        self.reception = Reception(handshakes, TOKEN_MARK, self._serve_connection, trio.current_time)
        """Holds inbound connections until their handshake may begin; the caller runs it (`Reception.run`)."""
        self.live: set[CountedSocket] = set()
        """Every open connection."""
        self.handler: THandler | None = None
        """The library's handler for inbound connections; it sets it by `create_listener`."""
        self.from_listen_port: set[tuple[str, int]] = set()
        """Targets that are dialed from our listening port: the address that they see is then one that others can
        dial."""

    async def dial(self, maddr: Multiaddr) -> IRawConnection:
        target = host_and_port(maddr)
        if target is None:
            raise OpenConnectionError(f"cannot dial {maddr}")
        try:
            sock = self.own(await self._connect(target))
        except OSError as error:
            raise OpenConnectionError(f"cannot reach {maddr}") from error
        return RawConnection(sock, True)

    async def _connect(self, target: tuple[str, int]) -> trio.SocketStream:
        """The first of several attempts to connect that succeeds. Raises `OSError` when one fails, or after
        `_CONNECT_S`."""
        streams: list[trio.SocketStream] = []
        errors: list[OSError] = []
        attempts = 1 if target in self.from_listen_port else _ATTEMPTS  # a second one would come from another port
        try:
            with trio.move_on_after(_CONNECT_S):
                async with trio.open_nursery() as nursery:

                    async def attempt() -> None:
                        try:
                            streams.append(await self._connect_once(target))
                        except OSError as error:  # the address refuses, so it would refuse the others too
                            errors.append(error)
                        nursery.cancel_scope.cancel()

                    for _ in range(attempts):
                        nursery.start_soon(attempt)
                        await trio.sleep(_AGAIN_S)
            if not streams:
                raise errors[0] if errors else TimeoutError(errno.ETIMEDOUT, "no answer")
            return streams.pop()
        finally:
            for surplus in streams:
                surplus.socket.close()

    async def _connect_once(self, target: tuple[str, int]) -> trio.SocketStream:
        ports = [port for _, port in self.listening]
        if target in self.from_listen_port and ports:
            try:
                return await connect_from(ports[0], target)
            except OSError:  # the target is a name, or an earlier connection between the same ports still exists
                pass
        return await trio.open_tcp_stream(*target)

    async def dial_from_listen_port(self, target: tuple[str, int]) -> CountedSocket | None:
        """A connection to `target` from our listening port; None if it fails or no listener has that address family."""
        ports = self.ports_for(target[0])
        if not ports:
            return None
        try:
            stream = await connect_from(ports[0], target)
        except OSError:
            return None
        try:
            return self.own(stream)
        except OSError:
            await trio.aclose_forcefully(stream)
            return None

    def ports_for(self, host: str) -> list[int]:
        """The ports of the listeners whose address family is that of `host` (an IP address)."""
        return [port for own, port in self.listening if (":" in own) == (":" in host)]

    @property
    def listening(self) -> list[tuple[str, int]]:
        """(host, port) of each listener."""
        return [listener.getsockname()[:2] for listener in self._listeners.values()]

    def own(self, stream: trio.SocketStream) -> CountedSocket:
        """Take over a connection: count its bytes, and close it in `close_all`.

        Raises `OSError` and closes it if it has ended already, as when the other end accepts and resets.
        """
        try:
            return CountedSocket(stream, self._traffic, self.live)
        except OSError:
            stream.socket.close()
            raise

    def create_listener(self, handler_function: THandler) -> IListener:
        self.handler = handler_function
        return _Listener(self)

    def can_dial(self, maddr: Multiaddr) -> bool:
        return host_and_port(maddr) is not None

    def can_listen(self, maddr: Multiaddr) -> bool:
        return str(maddr) in self._listeners

    def protocols(self) -> list[str]:
        return ["tcp"]

    def departed_bytes(self) -> int | None:
        """Bytes of IP packets sent by all connections, closed ones included; None if the system does not say."""
        total = self._traffic.departed
        for sock in self.live:
            departed = sock.departed_bytes()
            if departed is None:
                return None
            total += departed
        return total

    def close_all(self) -> None:
        for sock in list(self.live):
            sock.abort()
        for listener in self._listeners.values():
            listener.close()

    def take_listener(self, maddr: Multiaddr) -> socket.socket:
        return self._listeners[str(maddr)]

    async def _read_token(self, sock: CountedSocket) -> bool:
        """Read a token and offer the connection by it; whether it was taken over."""
        with trio.move_on_after(TOKEN_S), suppress(ConnectionClosedError):
            mark = await sock.read_exactly(len(TOKEN_MARK) + TOKEN_BYTES)
            return await self._accept_token(mark[len(TOKEN_MARK) :], sock)
        return False

    async def _serve_connection(self, accepted: socket.socket, arrival: Arrival) -> None:
        """Run the library's handler for an inbound connection whose turn has come; cancel it when the connection
        ends."""
        finish = partial(self.reception.finish, arrival)
        with trio.CancelScope() as scope, guarded(Source.HANDSHAKE, arrival.host.name):
            arrival.drop = scope.cancel
            try:
                sock = self.own(trio.SocketStream(trio.socket.from_stdlib_socket(accepted)))
            except OSError:  # the dialer closed it before its turn
                accepted.close()
                finish()
                return
            sock.on_upgraded, sock.on_closed = finish, scope.cancel
            try:
                if await sock.begins_with(TOKEN_MARK):
                    if await self._read_token(sock):
                        finish()
                        await trio.sleep_forever()
                elif self.handler is not None:
                    await self.handler(sock)
            finally:
                finish()
                sock.abort()


class _Listener(IListener):
    """A listening socket with the library's interface; `bind` has bound it before."""

    background_nursery: trio.Nursery | None = None
    """Set by the library before it calls `listen`."""

    def __init__(self, transport: TcpTransport) -> None:
        self._transport = transport
        self._addresses: list[Multiaddr] = []
        self._scope = trio.CancelScope()

    async def listen(self, maddr: Multiaddr) -> None:
        assert self.background_nursery is not None
        self._addresses.append(maddr)
        self.background_nursery.start_soon(self._serve, self._transport.take_listener(maddr))
        await trio.lowlevel.checkpoint()

    async def _serve(self, listener: socket.socket) -> None:
        with self._scope:
            await self._transport.reception.accept_from(listener)

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        return tuple(self._addresses)

    async def close(self) -> None:
        self._scope.cancel()
        await trio.lowlevel.checkpoint()
