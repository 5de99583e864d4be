"""Our yamux under py-libp2p's interfaces, so that its swarm, identify, ping and GossipSub run over it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import trio
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)
from multiaddr import Multiaddr

from swarm.guard import Source, guarded
from swarm.transport.base import Lane, PathKind, PeerKey, Unreachable
from swarm.transport.connection.migrating_connection import MigratingConnection
from swarm.transport.connection.tcp import CountedSocket
from swarm.transport.connection.tls import TlsSession
from swarm.transport.yamux import Connection, PeerBudget, YamuxLimits, YamuxStream

__all__ = ["YAMUX_ID", "Authenticated", "ConnectionOwner", "MuxedConnection", "MuxedStream"]

YAMUX_ID = "/yamux/1.0.0"


class SecureLink:
    """A secured connection of the library's (noise, for example) as a `yamux.ByteLink`."""

    offer = None

    def __init__(self, conn: ISecureConn) -> None:
        self._conn = conn

    async def receive(self) -> bytes:
        try:
            return await self._conn.read()
        except ConnectionClosedError:
            return b""
        except Exception as error:  # the library's cipher raises undocumented errors; each means a broken link
            raise trio.BrokenResourceError(f"{type(error).__name__}: {error}") from error

    async def send(self, parts: Sequence[bytes | memoryview]) -> None:
        try:
            await self._conn.write(b"".join(parts))
        except Exception as error:  # likewise
            raise trio.BrokenResourceError(f"{type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        await self._conn.close()


@dataclass(frozen=True, slots=True)
class Authenticated:
    """A secured connection whose peer has proved its key, and the pipe under it."""

    conn: ISecureConn
    peer: PeerKey
    pipe: CountedSocket | MigratingConnection | None
    """None in tests that secure another kind of pipe."""


class ConnectionOwner(Protocol):
    """What a connection tells the transport that made it."""

    def on_started(self, connection: "MuxedConnection") -> None:
        """The connection is live."""
        ...

    def on_ended(self, connection: "MuxedConnection") -> None:
        """The connection is gone. Called once for each `on_started`."""
        ...


class MuxedConnection(IMuxedConn):
    """One connection to a peer. The library calls `start` once it has registered the connection."""

    def __init__(
        self,
        authenticated: Authenticated,
        owner: ConnectionOwner,
        limits: YamuxLimits,
        budget: PeerBudget,
        dialed_for: Lane | None,
    ) -> None:
        """`budget`: of the peer, shared by all of its connections. `dialed_for`: None if the peer dialed."""
        conn, pipe = authenticated.conn, authenticated.pipe
        self.peer = authenticated.peer
        self.peer_id = conn.get_remote_peer()
        self.dialed_for = dialed_for
        self.event_started = trio.Event()
        self.on_close: Callable[[], Awaitable[None]] | None = None  # set by the library
        self.path = pipe if isinstance(pipe, MigratingConnection) else None
        """The pipe under a connection that began on a circuit; None for one that is a TCP socket."""
        self.security: str = getattr(conn, "negotiated_security_protocol", "")
        self.congestion_control = pipe.congestion_control if pipe is not None else ""
        link = conn if isinstance(conn, TlsSession) else SecureLink(conn)
        self.yamux = Connection(link, client=conn.is_initiator, limits=limits, budget=budget, who=self.peer)
        self._conn = conn
        self._owner = owner

    @property
    def is_initiator(self) -> bool:
        return self._conn.is_initiator

    @property
    def path_kind(self) -> PathKind:
        """How the peer is reached by this connection."""
        if self.path is not None:
            return self.path.path_kind
        return PathKind.DIALED if self.is_initiator else PathKind.ACCEPTED

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self.yamux.closed

    @property
    def is_closed(self) -> bool:
        return self.yamux.closed

    async def start(self) -> None:
        """Run until the connection ends. An error ends this connection only, not the library's nursery."""
        with guarded(Source.CONNECTION, self.peer):
            self._owner.on_started(self)
            self.event_started.set()
            try:
                await self.yamux.run()
            finally:
                self._owner.on_ended(self)
        with guarded(Source.CONNECTION, self.peer):
            if self.on_close is not None:
                await self.on_close()

    async def close(self) -> None:
        await self.yamux.aclose()

    async def open_stream(self) -> IMuxedStream:
        try:
            return MuxedStream(await self.yamux.open(), self)
        except Unreachable as error:
            raise MuxedStreamError(str(error)) from error

    async def accept_stream(self) -> IMuxedStream:
        try:
            return MuxedStream(await self.yamux.accept(), self)
        except Unreachable as error:
            raise MuxedConnUnavailable(str(error)) from error

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._conn.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self._conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self._conn.get_connection_type()


class MuxedStream(IMuxedStream):
    """A yamux stream with the library's methods and errors. `stream` is the stream itself.

    Only the library's own protocols read through it. Each read is charged to the peer's budget first, since the
    library's work for 32 bytes (a ping) costs more than receiving them. Locks serialize reads and writes: the library
    writes from several tasks at once and expects each write to go out whole, and a yamux stream allows one at a time.
    """

    def __init__(self, stream: YamuxStream, connection: MuxedConnection) -> None:
        self.stream = stream
        self.muxed_conn = connection
        self._budget = connection.yamux.budget
        self._remote = connection.get_remote_address()
        self._writing = trio.Lock()
        self._reading = trio.Lock()

    async def read(self, n: int | None = None) -> bytes:
        if n == 0:
            return b""
        try:
            async with self._reading:
                await trio.sleep(self._budget.charge_library_read(trio.current_time()))
                data = await self.stream.receive_some(None if n is None or n < 0 else n)
        except trio.BrokenResourceError as error:
            raise MuxedStreamReset(str(error)) from error
        except trio.ClosedResourceError as error:
            raise MuxedStreamClosed(str(error)) from error
        if not data:
            raise MuxedStreamEOF("the peer sends no more")
        return data

    async def write(self, data: bytes) -> None:
        try:
            async with self._writing:
                await self.stream.send_all(data)
        except trio.BrokenResourceError as error:
            raise MuxedStreamReset(str(error)) from error
        except trio.ClosedResourceError as error:
            raise MuxedStreamClosed(str(error)) from error

    async def close(self) -> None:
        await self.stream.aclose()

    async def reset(self) -> None:
        self.stream.reset()
        await self.stream.aclose()

    def set_deadline(self, ttl: int) -> None:
        """Does nothing: deadlines are trio's cancel scopes, and the library sets none on streams."""

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._remote

    async def __aenter__(self) -> "MuxedStream":
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()
