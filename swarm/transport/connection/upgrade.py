"""Upgrades a TCP connection to an authenticated, multiplexed one: security, then the muxer, each with a deadline.

It replaces py-libp2p's upgrader, which waits for each answer before it sends its next message, reads messages of any
length from strangers, and always uses the library's own yamux for /yamux/1.0.0.
"""

from collections.abc import Callable, Mapping
from typing import Final
from weakref import WeakKeyDictionary

import trio
from libp2p.abc import IMuxedConn, IRawConnection, ISecureConn, ISecureTransport
from libp2p.io.exceptions import IOException
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure
from libp2p.transport.exceptions import MuxerUpgradeFailure, SecurityUpgradeFailure
from libp2p.transport.upgrader import TransportUpgrader

from codec.errors import PeerError
from swarm.transport.base import PeerKey
from swarm.transport.connection.migrating_connection import MigratingConnection
from swarm.transport.connection.multistream import answer, propose
from swarm.transport.connection.muxer import YAMUX_ID, Authenticated
from swarm.transport.connection.tcp import CountedSocket
from swarm.transport.connection.tls import PROTOCOL_ID, TlsSession, TlsTransport
from swarm.transport.identity import peer_key

__all__ = ["Upgrader"]

ANSWER_S: Final = 5.0
"""How long an inbound connection may take for security, from its turn on, and again for the muxer: two round trips of
300 ms, and two lost packets. The dialer's own limit is longer, since its connection also waits for its turn."""


class Upgrader(TransportUpgrader):
    """One for a host."""

    def __init__(
        self,
        security: Mapping[str, ISecureTransport],
        make_muxed: Callable[[Authenticated], IMuxedConn],
        handshake_s: float,
    ) -> None:
        """`security`: by protocol id, in order of preference. `make_muxed`: builds the multiplexed connection.
        `handshake_s`: how long each of the two steps may take; for an inbound connection, at most `ANSWER_S`."""
        super().__init__({}, {})
        self._security = dict(security)
        self._make_muxed = make_muxed
        self._handshake_s = handshake_s
        self._answer_s = min(handshake_s, ANSWER_S)
        self._pipes: WeakKeyDictionary[ISecureConn, CountedSocket | MigratingConnection] = WeakKeyDictionary()
        """The pipe under each secured connection; the library passes only the connection on to the second step."""

    async def identify(self, raw_conn: IRawConnection) -> PeerKey:
        """The key that answers on a connection that we made, by its TLS certificate. Raises
        `SecurityUpgradeFailure`."""
        tls = self._security.get(PROTOCOL_ID)
        if not isinstance(tls, TlsTransport):
            raise SecurityUpgradeFailure("without TLS, write the peer's address with its /p2p/ID")
        try:
            with trio.fail_after(self._handshake_s):
                await propose(raw_conn, [PROTOCOL_ID])
                conn = await tls.secure_unknown(raw_conn)
            return peer_key(str(conn.get_remote_peer()))
        except trio.TooSlowError as error:
            raise SecurityUpgradeFailure(f"the handshake took over {self._handshake_s:g} s") from error
        except (PeerError, IOException, HandshakeFailure) as error:
            raise SecurityUpgradeFailure(str(error)) from error

    async def upgrade_security(
        self, raw_conn: IRawConnection, is_initiator: bool, peer_id: ID | None = None
    ) -> ISecureConn:
        limit_s = self._handshake_s if is_initiator else self._answer_s
        try:
            with trio.fail_after(limit_s):
                protocol = await (propose if is_initiator else answer)(raw_conn, list(self._security))
                conn = await self._secured(protocol, raw_conn, peer_id if is_initiator else None)
            peer_key(str(conn.get_remote_peer()))  # raises `PeerError` for a key that is not Ed25519
        except trio.TooSlowError as error:
            raise SecurityUpgradeFailure(f"the handshake took over {limit_s:g} s") from error
        except (PeerError, IOException, HandshakeFailure) as error:
            raise SecurityUpgradeFailure(str(error)) from error
        if is_initiator and conn.get_remote_peer() != peer_id:
            raise SecurityUpgradeFailure(f"expected {peer_id}, but {conn.get_remote_peer()} answered")
        conn.negotiated_security_protocol = protocol  # type: ignore[attr-defined]  # where the library looks for it
        pipe = raw_conn.stream if isinstance(raw_conn, RawConnection) else None
        if isinstance(pipe, CountedSocket | MigratingConnection):
            self._pipes[conn] = pipe
        return conn

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        if not (isinstance(conn, TlsSession) and conn.muxer == YAMUX_ID):
            limit_s = self._handshake_s if conn.is_initiator else self._answer_s
            try:
                with trio.fail_after(limit_s):
                    await (propose if conn.is_initiator else answer)(conn, [YAMUX_ID])
            except trio.TooSlowError as error:
                raise MuxerUpgradeFailure(f"agreeing on a muxer took over {limit_s:g} s") from error
            except (PeerError, IOException) as error:
                raise MuxerUpgradeFailure(str(error)) from error
        pipe = self._pipes.pop(conn, None)
        muxed = self._make_muxed(Authenticated(conn, peer_key(str(peer_id)), pipe))
        if isinstance(pipe, CountedSocket):
            pipe.on_upgraded()
        return muxed

    async def _secured(self, protocol: str, raw_conn: IRawConnection, expected: ID | None) -> ISecureConn:
        """`expected`: the peer that we dialed; None if it dialed us. Raises `HandshakeFailure` or `IOException`."""
        security = self._security[protocol]
        try:
            if expected is not None:
                return await security.secure_outbound(raw_conn, expected)
            return await security.secure_inbound(raw_conn)
        except (IOException, HandshakeFailure):
            raise
        except Exception as error:
            if isinstance(security, TlsTransport):
                raise  # our own class: a bug
            # The library's noise: protobuf and cryptography raise undocumented errors for bytes that are not valid.
            raise HandshakeFailure(f"{type(error).__name__}: {error}") from error
