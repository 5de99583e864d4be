"""From a TCP connection to an authenticated, multiplexed one: security, then the muxer, each with a deadline.

Stands in for py-libp2p's upgrader, which waits for each answer before it goes on, reads messages of any length from
strangers, and always puts its own yamux under /yamux/1.0.0.
"""

from collections.abc import Callable, Mapping
from typing import Final

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
from swarm.transport.connection.muxer import YAMUX_ID
from swarm.transport.connection.tcp import CountedSocket
from swarm.transport.connection.tls import PROTOCOL_ID, TlsSession, TlsTransport
from swarm.transport.identity import peer_key

__all__ = ["Upgrader"]

ANSWER_S: Final = 5.0
"""How long a stranger may take for security, from its turn on, and for the muxer: two round trips of 300 ms, and two
lost packets. The dialer's own limit is longer, since it also waits for its turn."""


class Upgrader(TransportUpgrader):
    """One for a host. `make` builds the muxed connection for an authenticated peer."""

    def __init__(
        self,
        security: Mapping[str, ISecureTransport],
        make: Callable[[ISecureConn, ID, PeerKey], IMuxedConn],
        handshake_s: float,
    ) -> None:
        """`security`: in order of preference. `handshake_s`: how long each of the two steps may take; of an inbound
        connection, `ANSWER_S` at most."""
        super().__init__({}, {})
        self._security = dict(security)
        self._make = make
        self._handshake_s = handshake_s
        self._answer_s = min(handshake_s, ANSWER_S)

    async def who_is(self, raw_conn: IRawConnection) -> PeerKey:
        """Whoever answers on a connection that we made, by its TLS certificate. Raises `SecurityUpgradeFailure`."""
        tls = self._security.get(PROTOCOL_ID)
        if not isinstance(tls, TlsTransport):
            raise SecurityUpgradeFailure("without TLS a peer has to be named by its /p2p/ID")
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
            peer_key(str(conn.get_remote_peer()))  # raises for a key of another kind than ours
        except trio.TooSlowError as error:
            raise SecurityUpgradeFailure(f"the handshake took over {limit_s:g} s") from error
        except (PeerError, IOException, HandshakeFailure) as error:
            raise SecurityUpgradeFailure(str(error)) from error
        if is_initiator and conn.get_remote_peer() != peer_id:
            raise SecurityUpgradeFailure(f"expected {peer_id}, but {conn.get_remote_peer()} answered")
        conn.negotiated_security_protocol = protocol  # type: ignore[attr-defined]  # where the library looks for it
        if isinstance(raw_conn, RawConnection) and isinstance(raw_conn.stream, CountedSocket):
            conn.on_up = raw_conn.stream.on_up  # type: ignore[attr-defined]  # for `upgrade_connection`
            conn.congestion_control = raw_conn.stream.congestion_control  # type: ignore[attr-defined]
        if isinstance(raw_conn, RawConnection) and isinstance(raw_conn.stream, MigratingConnection):
            conn.path = raw_conn.stream  # type: ignore[attr-defined]  # for the muxed connection, as above
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
        muxed = self._make(conn, peer_id, peer_key(str(peer_id)))
        getattr(conn, "on_up", _nothing)()
        return muxed

    async def _secured(self, protocol: str, raw_conn: IRawConnection, expected: ID | None) -> ISecureConn:
        """`expected`: who is dialed; None: it dialed us. Raises `HandshakeFailure`."""
        security = self._security[protocol]
        try:
            if expected is not None:
                return await security.secure_outbound(raw_conn, expected)
            return await security.secure_inbound(raw_conn)
        except (IOException, HandshakeFailure):
            raise
        except Exception as error:
            if isinstance(security, TlsTransport):
                raise  # ours: a bug
            # The library's noise: protobuf, cryptography and more raise what they like at bytes that are not theirs.
            raise HandshakeFailure(f"{type(error).__name__}: {error}") from error


def _nothing() -> None:
    pass
