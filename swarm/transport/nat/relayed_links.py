"""Relayed links: circuits that we dial or accept, and how a connection moves from one circuit to the next.

A relay ends each circuit at a limit of time or bytes. Before that, the end that dialed opens another circuit to the
same peer, and the connection moves there. The two ends agree on this once, on the connection itself (`CONTINUE_ID`: 16
random bytes, answered by one byte). Each later link begins with a zero byte, which no negotiation begins with, and 16
bytes: the hash of the previous link's 16. The accepting end answers one byte on the new link, and both move to it.
"""

import logging
import secrets
from collections.abc import Callable
from typing import Final

import trio
from blake3 import blake3
from libp2p.io.exceptions import ConnectionClosedError

from codec.errors import PeerError
from swarm.guard import Source, guarded
from swarm.protocol.core.reach import relay_of
from swarm.transport.base import PeerKey, Unreachable
from swarm.transport.connection.migrating_connection import (
    ConnectionLink,
    MigratingConnection,
    RelayedLink,
    lost_is_broken,
)
from swarm.transport.connection.muxer import MuxedConnection
from swarm.transport.connection.tcp import TOKEN_BYTES
from swarm.transport.identity import peer_id
from swarm.transport.nat.circuit import (
    HOP_ID,
    HopMessage,
    Limit,
    Status,
    StopMessage,
    key_in,
    observed_in,
    peer_in,
    read_exactly,
    read_message,
    status_name,
    write_message,
)
from swarm.transport.nat.connections import PathUpgrader, PeerConnections
from swarm.transport.nat.known_relays import KnownRelays, plausible_address

__all__ = ["CONTINUE_ID", "RelayedLinks"]

CONTINUE_ID: Final = "/swarm-node/continue/1"
_PREFACE: Final = b"\0"
_READY: Final = b"\1"
_SETUP_S: Final = 10.0
"""For each step of a new link: its first bytes, its messages, its answer."""
_RETRY_S: Final = 3.0
"""Pause after a circuit could not be opened; also how often we check whether another one is still needed."""
_LOST = (Unreachable, PeerError, ConnectionClosedError, trio.BrokenResourceError, trio.TooSlowError)

_log = logging.getLogger(__name__)


class RelayedLinks:
    """One for a transport."""

    def __init__(
        self,
        connections: PeerConnections,
        upgrader: PathUpgrader,
        relays: KnownRelays,
        own_address_at: Callable[[PeerKey], str | None],
    ) -> None:
        """`own_address_at`: our address through a relay; None for a relay at which we asked for no reservation."""
        self._connections = connections
        self._upgrader = upgrader
        self._relays = relays
        self._own_address_at = own_address_at
        self._waiting: dict[bytes, MigratingConnection] = {}
        """Accepted connections by the token that their next link begins with; one token for each connection."""
        self.rotated = 0
        """How many circuits replaced an earlier one, on connections that we dialed."""

    # Dialing.

    async def dial(self, peer: PeerKey, address: str, nursery: trio.Nursery) -> MuxedConnection:
        """Connect to `peer` through the relay that `address` names. `nursery`: for the task that replaces circuits
        while the connection lives. Raises `Unreachable`, and what `PathUpgrader` raises."""
        link = await self._open_circuit(peer, address)
        path = MigratingConnection(link)
        try:
            connection = await self._upgrader.upgrade_outbound(path, peer)
        except BaseException:
            await path.close()
            raise
        nursery.start_soon(self._replace_circuits, connection, path, link, address)
        return connection

    async def _open_circuit(self, peer: PeerKey, address: str) -> RelayedLink:
        relay, id_ = relay_of(address)
        key = await self._relays.connect(relay, id_, peer)
        stream = await self._connections.open_protocol_stream(key, HOP_ID)
        try:
            with trio.fail_after(_SETUP_S + _SETUP_S):  # the second is the relay's, to ask the peer
                await write_message(stream, HopMessage(type=HopMessage.CONNECT, peer=peer_in(peer, None)))
                answer = await read_message(stream, HopMessage)
            if answer.type != HopMessage.STATUS or answer.status != Status.OK:
                raise Unreachable(f"the relay at {relay} says {status_name(answer.status)}")
        except BaseException as error:
            await trio.aclose_forcefully(stream)
            if isinstance(error, trio.BrokenResourceError | trio.TooSlowError | PeerError):
                raise Unreachable(f"the relay at {relay}: {error or 'no answer'}") from error
            raise
        self._relays.note_observed(relay, observed_in(answer.peer))
        return _relayed_link(stream, address, answer.limit)

    async def _replace_circuits(
        self, connection: MuxedConnection, path: MigratingConnection, link: RelayedLink, address: str
    ) -> None:
        """Agree with the peer on the first token, then move to another circuit before each one's limit."""
        with guarded(Source.CIRCUIT, connection.peer) as outcome, lost_is_broken():
            async with await self._connections.open_on(connection, CONTINUE_ID) as stream:
                with trio.fail_after(_SETUP_S):
                    secret = secrets.token_bytes(TOKEN_BYTES)
                    await stream.send_all(secret)
                    if await stream.receive_some(1) != _READY:
                        raise PeerError("the peer moves to no other circuit")
                await self._rotate(connection, path, link, address, secret)
        if outcome.error is not None:
            _log.info("a circuit is not replaced peer=%s reason=%r", peer_id(connection.peer), outcome.why)

    async def _rotate(
        self, connection: MuxedConnection, path: MigratingConnection, link: RelayedLink, address: str, secret: bytes
    ) -> None:
        while True:
            is_worn = False
            with trio.move_on_after(_RETRY_S):
                await link.wait_worn()
                is_worn = True
            if path.closed or path.link is not link:
                return  # the connection has ended, or moved to a direct one
            if not is_worn:
                continue
            fresh = None
            with guarded(Source.CIRCUIT, connection.peer) as outcome, lost_is_broken():
                with trio.fail_after(3 * _SETUP_S):
                    fresh = await self._open_circuit(connection.peer, address)
            if fresh is None:
                _log.info("no further circuit peer=%s reason=%r", peer_id(connection.peer), outcome.why)
                await trio.sleep(_RETRY_S)
                continue
            secret = _next_token(secret)
            await self._move_to(path, fresh, secret)
            link = fresh
            self.rotated += 1

    async def _move_to(self, path: MigratingConnection, link: ConnectionLink, token: bytes) -> None:
        """Move a connection that we dialed to `link`. Raises `ConnectionClosedError`, `trio.TooSlowError`.

        None of this travels over the old link, which may be at its limit. Once the other end has the new link it
        writes to that only, so a failure here ends the connection.
        """
        path.expect_link()
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
        """A relay brings a circuit on a `stop` stream. Serves it until it ends. Raises `PeerError`."""
        with trio.fail_after(_SETUP_S):
            request = await read_message(stream, StopMessage)
            known = self._own_address_at(relay)
            if request.type != StopMessage.CONNECT or known is None:
                status = Status.UNEXPECTED_MESSAGE if known else Status.PERMISSION_DENIED
                await write_message(stream, StopMessage(type=StopMessage.STATUS, status=status))
                await stream.aclose()
                return
            key_in(request.peer)  # only checked: the TLS handshake proves the key
            await write_message(stream, StopMessage(type=StopMessage.STATUS, status=Status.OK))
        link = _relayed_link(stream, plausible_address(known, observed_in(request.peer)) or known, request.limit)
        try:
            with trio.fail_after(_SETUP_S):
                first = await link.read(1)
                token = await _read_token(link) if first == _PREFACE else b""
        except _LOST:
            await link.aclose()
            return
        if not token:
            await self._upgrader.serve_inbound(MigratingConnection(link, first), f"relay {peer_id(relay)}")
        else:
            await self.accept_link(token, link)

    async def accept_link(self, token: bytes, link: ConnectionLink) -> None:
        """Move the connection that waits for `token` to `link`. Raises nothing that the peer can cause."""
        path = self._waiting.pop(token, None)
        with guarded(Source.CIRCUIT) as outcome, lost_is_broken():
            if path is None:
                raise ConnectionClosedError("no connection waits for this token")
            self._waiting[_next_token(token)] = path
            await link.write(_READY)
            await path.continue_on(link)
        if outcome.error is not None:
            await link.aclose()
            if path is not None:
                await path.close()

    async def on_continue(self, connection: MuxedConnection, stream: trio.abc.HalfCloseableStream) -> None:
        """The peer names the first token for the connection's next link. Returns when the peer ends the stream, which
        it keeps open while it may still move the connection. Raises `PeerError`."""
        path = connection.path
        if path is None or path in self._waiting.values():
            raise PeerError("continue: this connection came over no circuit, or has a token already")
        async with stream:
            with trio.fail_after(_SETUP_S):
                secret = await read_exactly(stream, TOKEN_BYTES, "token")
            self._waiting[_next_token(secret)] = path
            try:
                await stream.send_all(_READY)
                await stream.receive_some(1)
            finally:
                self._waiting = {token: other for token, other in self._waiting.items() if other is not path}


def _next_token(token: bytes) -> bytes:
    """The token of the next link. Only the two ends know it, since only they know the first one."""
    return blake3(token).digest()[:TOKEN_BYTES]


def _relayed_link(stream: trio.abc.HalfCloseableStream, seen_at: str, limit: Limit) -> RelayedLink:
    return RelayedLink(stream, seen_at, limit_bytes=limit.data, limit_s=float(limit.duration))


async def _read_token(link: ConnectionLink) -> bytes:
    data = b""
    while len(data) < TOKEN_BYTES:
        more = await link.read(TOKEN_BYTES - len(data))
        if not more:
            raise ConnectionClosedError("the link ended in its first bytes")
        data += more
    return data
