"""Circuits that we dial or accept, and what a connection goes on over: another circuit, or a socket of its own.

Whoever dialed a circuit keeps its connection alive: before the relay's limit it opens another circuit to the same peer
and the connection goes on there. The two agree on that once, on the connection itself (`CONTINUE_ID`: 16 random bytes,
one byte back). Each new leg begins with a zero byte, which no negotiation begins with, and 16 bytes: the hash of those
of the leg before. The other end says one byte, and both go on there.
"""

import logging
import secrets
from typing import TYPE_CHECKING, Final

import trio
from blake3 import blake3
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.swarm import Swarm

from codec.errors import PeerError
from swarm.guard import Source, guarded
from swarm.protocol.core.reach import relay_of, scope
from swarm.transport.base import PeerKey, Unreachable
from swarm.transport.connection.migrating_connection import (
    ConnectionLink,
    MigratingConnection,
    RelayedLink,
    lost_is_broken,
)
from swarm.transport.connection.muxer import MuxedConnection
from swarm.transport.connection.tcp import TOKEN_BYTES, host_and_port_of
from swarm.transport.identity import peer_id, peer_key
from swarm.transport.nat.circuit import (
    HOP_ID,
    HopMessage,
    Limit,
    Status,
    StopMessage,
    key_in,
    observed_in,
    peer_in,
    read_message,
    status_name,
    write_message,
)
from swarm.transport.probe import who_answers

if TYPE_CHECKING:
    from swarm.transport.libp2p import Libp2pTransport

__all__ = ["CONTINUE_ID", "RelayedLinks"]

CONTINUE_ID: Final = "/swarm-node/continue/1"
_PREFACE: Final = b"\0"
_SETUP_S: Final = 10.0
"""To agree on a new leg, and for its first bytes to come."""
_READY: Final = b"\1"
_AGAIN_S: Final = 3.0
"""After a circuit that could not be had; also how soon we notice that one is needed no more."""
_LOST = (Unreachable, PeerError, ConnectionClosedError, trio.BrokenResourceError, trio.TooSlowError)

_log = logging.getLogger(__name__)


class RelayedLinks:
    """One for a transport."""

    def __init__(self, transport: "Libp2pTransport") -> None:
        self._transport = transport
        self._relay_at: dict[str, PeerKey] = {}
        self._promised: dict[bytes, MigratingConnection] = {}
        """What will go on, by the token that its next leg begins with. One a path."""
        self.observed: str | None = None
        """Where a relay last saw us."""
        self.rotated = 0
        """Circuits that took an earlier one's place."""

    # Dialing.

    async def dial(self, peer: PeerKey, address: str) -> MuxedConnection:
        """A connection to `peer` through the relay that `address` names. Raises `Unreachable`."""
        link = await self._circuit(peer, address)
        path = MigratingConnection(link)
        host, nursery = self._transport.host, self._transport.nursery
        if host is None or nursery is None:
            await path.close()
            raise Unreachable("not serving")
        swarm = host.get_network()
        assert isinstance(swarm, Swarm)
        try:
            conn = await swarm.upgrade_outbound_raw_conn(RawConnection(path, True), self._transport.id_of(peer))
        except BaseException:
            await path.close()
            raise
        assert isinstance(conn.muxed_conn, MuxedConnection)
        nursery.start_soon(self._keep_fresh, conn.muxed_conn, path, link, address)
        nursery.start_soon(self._transport.puncher.keep_trying, conn.muxed_conn, path)
        return conn.muxed_conn

    async def relay_key(self, relay: str, id_: str) -> PeerKey:
        """Who the relay at this address is: as the address says, or whoever answers. Raises `Unreachable`."""
        if id_:
            return peer_key(id_)
        if relay not in self._relay_at:
            self._relay_at[relay] = await who_answers(self._transport.host, relay)
        return self._relay_at[relay]

    async def connect_relay(self, relay: str, id_: str, target: PeerKey | None = None) -> PeerKey:
        """Have a connection to the relay (by which `target` is to be reached). Raises `Unreachable`."""
        transport = self._transport
        key = await self.relay_key(relay, id_)
        if key in (transport.key, target):
            raise Unreachable("that relay is one of the two ends itself")
        if transport.tcp is not None and (place := host_and_port_of(relay)) is not None:
            transport.tcp.from_listen_port.add(place)
        try:
            await transport.connect(key, [relay])
        except Unreachable:
            self._relay_at.pop(relay, None)
            raise
        return key

    def saw_us(self, relay: str, seen_at: str | None) -> None:
        """What a relay, which listens at `relay`, says of where it sees us."""
        self.observed = _believed(relay, seen_at) or self.observed

    async def _circuit(self, peer: PeerKey, address: str) -> RelayedLink:
        relay, id_ = relay_of(address)
        key = await self.connect_relay(relay, id_, peer)
        stream = await self._transport.open_library_stream(key, HOP_ID)
        try:
            with trio.fail_after(_SETUP_S + _SETUP_S):  # the relay has to ask the peer, too
                await write_message(stream, HopMessage(type=HopMessage.CONNECT, peer=peer_in(peer, None)))
                answer = await read_message(stream, HopMessage)
            if answer.type != HopMessage.STATUS or answer.status != Status.OK:
                raise Unreachable(f"the relay at {relay} says {status_name(answer.status)}")
        except BaseException as error:
            await trio.aclose_forcefully(stream)
            if isinstance(error, trio.BrokenResourceError | trio.TooSlowError | PeerError):
                raise Unreachable(f"the relay at {relay}: {error or 'no answer'}") from error
            raise
        self.saw_us(relay, observed_in(answer.peer))
        return _circuit_link(stream, address, answer.limit)

    async def _keep_fresh(
        self, connection: MuxedConnection, path: MigratingConnection, link: RelayedLink, address: str
    ) -> None:
        """Before the present circuit reaches its limit, go on over a new one; for as long as the connection lives."""
        with guarded(Source.CIRCUIT, connection.peer) as outcome, lost_is_broken():
            async with await self._transport.open_on(connection, CONTINUE_ID) as stream:
                with trio.fail_after(_SETUP_S):
                    secret = secrets.token_bytes(TOKEN_BYTES)
                    await stream.send_all(secret)
                    if await stream.receive_some(1) != _READY:
                        raise PeerError("the peer goes on over no other circuit")
                await self._rotate(connection, path, link, address, secret)
        if outcome.error is not None:
            _log.info("a circuit is not followed by another peer=%s reason=%r", peer_id(connection.peer), outcome.why)

    async def _rotate(
        self, connection: MuxedConnection, path: MigratingConnection, link: RelayedLink, address: str, secret: bytes
    ) -> None:
        while True:
            worn = False
            with trio.move_on_after(_AGAIN_S):
                await link.worn()
                worn = True
            if path.closed or path.link is not link:
                return  # it has ended, or found a better way
            if not worn:
                continue
            fresh = None
            with guarded(Source.CIRCUIT, connection.peer) as outcome, lost_is_broken():
                with trio.fail_after(3 * _SETUP_S):
                    fresh = await self._circuit(connection.peer, address)
            if fresh is None:
                _log.info("no further circuit peer=%s reason=%r", peer_id(connection.peer), outcome.why)
                await trio.sleep(_AGAIN_S)
                continue
            secret = _next(secret)
            await self._go_on(path, fresh, secret)
            link = fresh
            self.rotated += 1

    async def _go_on(self, path: MigratingConnection, link: ConnectionLink, token: bytes) -> None:
        """Nothing of this travels over the path itself, which may be at its limit. Once the other end has the new leg
        it writes to that alone, so a failure here is the connection's end."""
        path.promise()
        try:
            with trio.fail_after(_SETUP_S):
                await link.write(_PREFACE + token)
                if await link.read(1) != _READY:
                    raise ConnectionClosedError("the new circuit ended at once")
                await path.continue_on(link)
        except BaseException:
            await link.aclose()
            await path.close()
            raise

    # Accepting.

    async def on_stop(self, relay: PeerKey, stream: trio.abc.HalfCloseableStream) -> None:
        """A relay brings a circuit. Raises `PeerError`."""
        with trio.fail_after(_SETUP_S):
            request = await read_message(stream, StopMessage)
            known = self._transport.reservations.address_of(relay)
            if request.type != StopMessage.CONNECT or known is None:
                status = Status.UNEXPECTED_MESSAGE if known else Status.PERMISSION_DENIED
                await write_message(stream, StopMessage(type=StopMessage.STATUS, status=status))
                await stream.aclose()
                return
            key_in(request.peer)  # only a hint: TLS proves who it is
            await write_message(stream, StopMessage(type=StopMessage.STATUS, status=Status.OK))
        link = _circuit_link(stream, _believed(known, observed_in(request.peer)) or known, request.limit)
        try:
            with trio.fail_after(_SETUP_S):
                first = await link.read(1)
                token = await _read_token(link) if first == _PREFACE else b""
        except _LOST:
            await link.aclose()
            return
        if not token:
            await self._transport.take_inbound(MigratingConnection(link, first), f"relay {peer_id(relay)}")
        else:
            await self.arrived(token, link)

    async def arrived(self, token: bytes, link: ConnectionLink) -> None:
        """A new leg says whose it is. Nothing that happens to it leaves here."""
        path = self._promised.pop(token, None)
        with guarded(Source.CIRCUIT) as outcome, lost_is_broken():
            if path is None:
                raise ConnectionClosedError("nobody waits for it")
            self._promised[_next(token)] = path
            await link.write(_READY)
            await path.continue_on(link)
        if outcome.error is not None:
            await link.aclose()
            if path is not None:
                await path.close()

    async def on_continue(self, connection: MuxedConnection, stream: trio.abc.HalfCloseableStream) -> None:
        """The peer will go on over other legs; the stream stays open as long as it may. Raises `PeerError`."""
        path = connection.path
        if path is None or path in self._promised.values():
            raise PeerError("goes on over another circuit: this is none, or it does already")
        async with stream:
            with trio.fail_after(_SETUP_S):
                secret = await _read_exactly(stream)
            self._promised[_next(secret)] = path
            try:
                await stream.send_all(_READY)
                await stream.receive_some(1)
            finally:
                self._promised = {token: other for token, other in self._promised.items() if other is not path}


def _next(token: bytes) -> bytes:
    """What the leg after the one with this token begins with: known to both ends, and to nobody else."""
    return blake3(token).digest()[:TOKEN_BYTES]


def _believed(relay: str, seen_at: str | None) -> str | None:
    """What a relay says of somebody's address, unless that is nearer than the relay itself: then it would have us dial
    into our own network."""
    return seen_at if seen_at is not None and scope(seen_at) >= scope(relay) else None


def _circuit_link(stream: trio.abc.HalfCloseableStream, seen_at: str, limit: Limit) -> RelayedLink:
    return RelayedLink(stream, seen_at, limit_bytes=limit.data, limit_s=float(limit.duration))


async def _read_token(link: ConnectionLink) -> bytes:
    data = b""
    while len(data) < TOKEN_BYTES:
        more = await link.read(TOKEN_BYTES - len(data))
        if not more:
            raise ConnectionClosedError("it ended in its first bytes")
        data += more
    return data


async def _read_exactly(stream: trio.abc.ReceiveStream) -> bytes:
    data = b""
    while len(data) < TOKEN_BYTES:
        more = await stream.receive_some(TOKEN_BYTES - len(data))
        if not more:
            raise PeerError("a token: the stream ended in it")
        data += more
    return data
