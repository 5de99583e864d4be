"""What the parts of this package need of the transport that owns the connections; `Libp2pTransport` implements both.

The protocols keep imports pointing one way: the transport imports relayed links, reservations and hole punching, and
these import none of it.
"""

from collections.abc import Sequence
from typing import Protocol

from swarm.transport.base import PeerKey, Stream
from swarm.transport.connection.migrating_connection import MigratingConnection
from swarm.transport.connection.muxer import MuxedConnection
from swarm.transport.connection.tcp import TcpTransport

__all__ = ["PathUpgrader", "PeerConnections"]


class PeerConnections(Protocol):
    """Connections to peers, by key, and streams on them."""

    key: PeerKey
    """Our own identity."""

    tcp: TcpTransport | None
    """Sockets and listeners; None while the transport does not serve."""

    async def connect(self, peer: PeerKey, addrs: Sequence[str]) -> None:
        """As `Transport.connect`. Raises `Unreachable`."""
        ...

    async def open_protocol_stream(self, peer: PeerKey, protocol: str) -> Stream:
        """Open a stream for `protocol` on the peer's control connection. Raises `Unreachable`."""
        ...

    async def open_on(self, connection: MuxedConnection, protocol: str) -> Stream:
        """Open a stream for `protocol` on this connection. Raises `Unreachable`."""
        ...

    async def wait_disconnected(self, peer: PeerKey) -> None:
        """Return when there is no connection to the peer."""
        ...

    def allow_streams(self, peer: PeerKey, streams: int) -> None:
        """Let the peer have at least this many streams open with us."""
        ...


class PathUpgrader(Protocol):
    """Turns a path through a relay into a secured, multiplexed connection."""

    async def upgrade_outbound(self, path: MigratingConnection, peer: PeerKey) -> MuxedConnection:
        """Secure a path that we dialed, as `peer` or not at all. Raises `Unreachable` while the transport does not
        serve, and what py-libp2p raises for a handshake that fails; the caller closes the path."""
        ...

    async def serve_inbound(self, path: MigratingConnection, source: str) -> None:
        """Serve a path that a relay brought until it ends. `source`: what admission counts it as."""
        ...
