"""TCP for py-libp2p: sockets that count their bytes, and listeners that say when a port is taken.

Counted is what crosses the socket: ciphertext, framing and handshakes, without TCP's own headers. The library's TCP
class is not used because it listens with SO_REUSEPORT (two programs would share a port unnoticed) and because the task
of an inbound connection would outlive the connection.
"""

import errno
import socket
from collections.abc import Callable, Sequence
from typing import Final

import trio
from libp2p.abc import IListener, IRawConnection, ITransport
from libp2p.custom_types import THandler
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from codec.errors import UsageError
from swarm.transport.admission import Admission
from swarm.transport.base import PeerKey, Traffic
from swarm.transport.tuning import tune

__all__ = ["CountedSocket", "TcpTransport", "bind", "checked_announcements", "host_and_port", "multiaddr_text"]

READ_BYTES: Final = 262_144
"""One read's worth: a large one costs one system call and one wake-up for sixteen TLS records."""
_BACKLOG: Final = 256


def host_and_port(address: Multiaddr) -> tuple[str, int] | None:
    """The parts of /ip4/../tcp/.., /ip6/../tcp/.. or /dns*/../tcp/.. (a trailing /p2p/.. is ignored); else None."""
    parts = {protocol.name: value for protocol, value in address.items()}
    names = [protocol.name for protocol in address.protocols()]
    if len(names) < 2 or names[0] not in ("ip4", "ip6", "dns", "dns4", "dns6") or names[1] != "tcp":
        return None
    if names[2:] not in ([], ["p2p"]):
        return None
    return str(parts[names[0]]), int(parts["tcp"])


def multiaddr_text(sockname: tuple) -> str:
    """The multiaddr of a socket's (host, port, ...)."""
    host, port = sockname[:2]
    return f"/ip6/{host.partition('%')[0]}/tcp/{port}" if ":" in host else f"/ip4/{host}/tcp/{port}"


def checked_announcements(addresses: Sequence[str]) -> list[str]:
    """`addresses` if each can be dialed; `UsageError` otherwise."""
    for text in addresses:
        try:
            target = host_and_port(Multiaddr(text))
        except (MultiaddrError, ValueError):
            target = None
        if target is None or not target[1]:
            raise UsageError(
                f"{text} is no address to announce; write it like /ip4/203.0.113.7/tcp/4701 or /dns4/HOST/tcp/4701."
            )
    return list(addresses)


async def bind(addresses: Sequence[str]) -> dict[str, trio.SocketListener]:
    """Listening sockets by the address (multiaddr text) each got; port 0 takes a free one.

    Raises `UsageError` for an address that is none or a port that is taken; then nothing stays bound.
    """
    listeners: dict[str, trio.SocketListener] = {}
    try:
        for text in addresses:
            listener = await _bind_one(text)
            listeners[multiaddr_text(listener.socket.getsockname())] = listener
    except BaseException:
        for listener in listeners.values():
            listener.socket.close()
        raise
    return listeners


async def _bind_one(text: str) -> trio.SocketListener:
    try:
        target = host_and_port(Multiaddr(text))
    except (MultiaddrError, ValueError) as error:
        raise UsageError(f"{text} is no address to listen on; write it like /ip4/0.0.0.0/tcp/4701.") from error
    if target is None:
        raise UsageError(f"Cannot listen on {text}: only /ip4/.../tcp/... and /ip6/.../tcp/... are supported.")
    host, port = target
    sock = trio.socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # A port left by a connection's last minute may be taken over; one with a live listener may not.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"Port {port} on {host} is in use by another program; stop it or listen on another port."
            ) from error
        raise UsageError(f"Cannot listen on {text}: {error.strerror}.") from error
    return trio.SocketListener(sock)


class CountedSocket(ReadWriteCloser):
    """A TCP connection whose bytes are counted, for its peer once that is known."""

    def __init__(self, stream: trio.SocketStream, traffic: Traffic, live: set["CountedSocket"]) -> None:
        self._stream = stream
        self._traffic = traffic
        self._live = live
        self._sent = 0
        self._received = 0
        self._peer: PeerKey | None = None
        self.on_known: Callable[[], None] = _nothing
        """Called when the handshake has shown who this is."""
        self.on_closed: Callable[[], None] = _nothing
        self.remote: tuple = stream.socket.getpeername()
        self.congestion_control = tune(stream.socket)
        live.add(self)

    def belongs_to(self, peer: PeerKey) -> None:
        """The handshake proved who this is: what was counted so far, and the rest, is that peer's."""
        self._peer = peer
        self.on_known()
        self._add(self._sent, self._traffic.sent_to)
        self._add(self._received, self._traffic.received_from)

    def _add(self, length: int, table: dict[PeerKey, int]) -> None:
        if self._peer is not None:
            table[self._peer] = table.get(self._peer, 0) + length

    async def read(self, n: int | None = None) -> bytes:
        try:
            data = await self._stream.receive_some(READ_BYTES if n is None else max(1, min(n, READ_BYTES)))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the TCP connection broke: {error}") from error
        self._received += len(data)
        self._traffic.received += len(data)
        self._add(len(data), self._traffic.received_from)
        return bytes(data)

    async def read_into(self, buffer: memoryview) -> int:
        """As `read`, into memory that is there already: a fresh quarter of a megabyte each time costs page faults."""
        try:
            length = await self._stream.socket.recv_into(buffer)
        except (OSError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the TCP connection broke: {error}") from error
        self._received += length
        self._traffic.received += length
        self._add(length, self._traffic.received_from)
        return length

    async def write(self, data: bytes) -> None:
        self._sent += len(data)
        self._traffic.sent += len(data)
        self._add(len(data), self._traffic.sent_to)
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the TCP connection broke: {error}") from error

    async def close(self) -> None:
        self.abort()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """Close at once. Whoever waits on the socket is woken with an error."""
        if self in self._live:
            self._live.discard(self)
            self._stream.socket.close()
            self.on_closed()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.remote[:2]


def _nothing() -> None:
    pass


class TcpTransport(ITransport):
    """Dials and accepts for one host. `close_all` closes every socket that it made."""

    def __init__(
        self, traffic: Traffic, listeners: dict[str, trio.SocketListener], admission: Admission | None = None
    ) -> None:
        self._traffic = traffic
        self._listeners = listeners
        self._admission = admission or Admission()
        self.live: set[CountedSocket] = set()

    async def dial(self, maddr: Multiaddr) -> IRawConnection:
        target = host_and_port(maddr)
        if target is None:
            raise OpenConnectionError(f"cannot dial {maddr}")
        try:
            stream = await trio.open_tcp_stream(*target)
        except OSError as error:
            raise OpenConnectionError(f"cannot reach {maddr}") from error
        return RawConnection(CountedSocket(stream, self._traffic, self.live), True)

    def create_listener(self, handler_function: THandler) -> IListener:
        return _Listener(self, handler_function)

    def can_dial(self, maddr: Multiaddr) -> bool:
        return host_and_port(maddr) is not None

    def can_listen(self, maddr: Multiaddr) -> bool:
        return str(maddr) in self._listeners

    def protocols(self) -> list[str]:
        return ["tcp"]

    def close_all(self) -> None:
        for sock in list(self.live):
            sock.abort()
        for listener in self._listeners.values():
            listener.socket.close()

    def take_listener(self, maddr: Multiaddr) -> trio.SocketListener:
        return self._listeners[str(maddr)]

    async def serve_one(self, handler: THandler, stream: trio.SocketStream) -> None:
        """Run the library's handler for one inbound connection, and end it with the connection."""
        try:
            sock = CountedSocket(stream, self._traffic, self.live)
        except OSError:  # it was gone before we looked
            await trio.aclose_forcefully(stream)
            return
        host = sock.remote[0]
        if not self._admission.begin(host, trio.current_time()):
            sock.abort()
            return
        admitted = True

        def over() -> None:
            nonlocal admitted
            if admitted:
                admitted = False
                self._admission.end(host)

        with trio.CancelScope() as scope:
            sock.on_known, sock.on_closed = over, scope.cancel
            try:
                await handler(sock)
            finally:
                over()
                sock.abort()


class _Listener(IListener):
    """A listening socket under the library's interface; the socket was bound before (`bind`)."""

    background_nursery: trio.Nursery | None = None
    """Set by the library before it calls `listen`."""

    def __init__(self, transport: TcpTransport, handler: THandler) -> None:
        self._transport = transport
        self._handler = handler
        self._addresses: list[Multiaddr] = []
        self._scope = trio.CancelScope()

    async def listen(self, maddr: Multiaddr) -> None:
        assert self.background_nursery is not None
        self._addresses.append(maddr)
        self.background_nursery.start_soon(self._serve, self._transport.take_listener(maddr))
        await trio.lowlevel.checkpoint()

    async def _serve(self, listener: trio.SocketListener) -> None:
        async def handle(stream: trio.SocketStream) -> None:
            await self._transport.serve_one(self._handler, stream)

        with self._scope:
            await trio.serve_listeners(handle, [listener])

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        return tuple(self._addresses)

    async def close(self) -> None:
        self._scope.cancel()
        await trio.lowlevel.checkpoint()
