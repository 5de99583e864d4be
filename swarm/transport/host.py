"""py-libp2p's host with our sockets, security, muxer and negotiation in it, and without its own dialing."""

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import trio
from libp2p.abc import INetStream, ISecureTransport
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import StreamHandlerFn, TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.host.exceptions import StreamFailure
from libp2p.identity.identify import identify
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from multiaddr import Multiaddr

from codec.errors import PeerError
from swarm.guard import Source
from swarm.transport.connection import tls
from swarm.transport.connection.multistream import Channel, propose
from swarm.transport.connection.muxer import YAMUX_ID, MuxedConnection
from swarm.transport.connection.tcp import TcpTransport
from swarm.transport.connection.upgrade import Upgrader
from swarm.transport.tasks import GuardedService

__all__ = ["Host", "build_host", "security"]

MAX_CONNECTIONS: Final = 4096
MAX_CONNECTIONS_A_PEER: Final = 12
"""Eight for bulk at most (`parallel.CONNECTION_COUNTS`), one for control, and three to spare while old ones end. Each
costs memory."""
NEGOTIATION_S: Final = 10.0
"""For the two ends of a stream to agree on its protocol."""

_log = logging.getLogger(__name__)
# The library logs every mistake of a peer as a warning or an error, which would fill the user's terminal.
logging.getLogger("libp2p").setLevel(logging.CRITICAL)


class _NoDialing(AutoConnector):
    """Dials nobody. The library's own would dial every peer it hears of until it has thousands of connections."""

    async def start(self) -> None:
        pass

    def record_disconnect(self, peer_id: ID) -> None:
        """Keeps nothing. The library would remember every peer that ever left."""


class _Network(GuardedService, Swarm):
    """The library's network, whose tasks start in the same time however many there are."""

    task_source = Source.CONNECTION


class Host(BasicHost):
    """Opens the library's own streams (identify, GossipSub) on the connection that the transport picks."""

    def __init__(
        self,
        swarm: Swarm,
        tcp: TcpTransport,
        upgrader: Upgrader,
        pick: Callable[[ID], MuxedConnection | None],
        announce: Sequence[str],
    ) -> None:
        """`pick`: the peer's connection for the library's streams; None if it gets none. `announce`: our addresses as
        identify tells them to peers."""
        super().__init__(
            swarm,
            announce_addrs=[Multiaddr(address) for address in announce],
            disable_identify_address_discovery=True,
        )
        self.tcp = tcp
        self.upgrader = upgrader
        self._pick = pick

    async def new_stream(self, peer_id: ID, protocol_ids: Sequence[TProtocol]) -> INetStream:
        wanted = self._pick(peer_id)
        for conn in self.get_network().get_connections(peer_id):
            if isinstance(conn, SwarmConn) and conn.muxed_conn is wanted:
                stream = await conn.new_stream()
                try:
                    with trio.fail_after(NEGOTIATION_S):
                        stream.set_protocol(TProtocol(await propose(_NetChannel(stream), protocol_ids)))
                except (PeerError, trio.TooSlowError) as error:
                    await stream.reset()
                    raise StreamFailure(f"no stream to {peer_id}: {error}") from error
                except BaseException:
                    with trio.CancelScope(shield=True):
                        await stream.reset()
                    raise
                return stream
        raise SwarmException(f"not connected to {peer_id}")

    def forget_dead(self) -> None:
        """Remove connections from the library's list that ended while it added them; it would count them for ever."""
        connections = self.get_network().connections
        for peer, listed in list(connections.items()):
            alive = [each for each in listed if not each.muxed_conn.is_closed]
            if not alive:
                del connections[peer]
            elif len(alive) < len(listed):
                connections[peer] = alive

    @property
    def handlers(self) -> Mapping[str, StreamHandlerFn]:
        """The library's stream handlers by protocol id."""
        return {str(name): handler for name, handler in self.multiselect.handlers.items() if name and handler}


class _NetChannel(Channel):
    """A stream of the library's, to negotiate on."""

    def __init__(self, stream: INetStream) -> None:
        self._stream = stream

    async def read(self, n: int | None = None, /) -> bytes:
        return await self._stream.read(n)

    async def write(self, data: bytes, /) -> None:
        await self._stream.write(data)


def agent() -> str:
    """How this program calls itself to peers that ask (identify)."""
    try:
        return f"swarm-node/{version('swarm-node')}"
    except PackageNotFoundError:  # run from a clone that is not installed
        return "swarm-node/unknown"


def build_host(
    key_pair: KeyPair,
    tcp: TcpTransport,
    upgrader: Upgrader,
    pick: Callable[[ID], MuxedConnection | None],
    announce: Sequence[str],
    handshake_s: float,
) -> Host:
    """A host that opens no connection by itself and listens on the sockets of `tcp`. `handshake_s`: the limit for each
    step of a handshake; for the other parameters see `Host`."""
    identify.AGENT_VERSION = agent()
    own_id = ID.from_pubkey(key_pair.public_key)
    peerstore = PeerStore()
    peerstore.add_key_pair(own_id, key_pair)
    config = ConnectionConfig(
        max_connections=MAX_CONNECTIONS,
        high_watermark=MAX_CONNECTIONS,
        low_watermark=0,
        min_connections=0,
        max_connections_per_peer=MAX_CONNECTIONS_A_PEER,
        inbound_upgrade_timeout=2 * handshake_s,
        outbound_upgrade_timeout=handshake_s,
    )
    swarm = _Network(
        own_id,
        peerstore,
        upgrader,
        transports=[tcp],
        retry_config=RetryConfig(max_retries=0),
        connection_config=config,
    )
    swarm.auto_connector = _NoDialing(swarm)
    host = Host(swarm, tcp, upgrader, pick, announce)
    # The library would ask every peer that connects for its protocols and remember the answer. That is a stream, a task
    # and entries in three tables for each stranger, and we never read them. Peers may still ask us.
    swarm.notifees.clear()
    host.remove_stream_handler(ID_PUSH)
    return host


def security(key_pair: KeyPair) -> dict[str, ISecureTransport]:
    """The security protocols that we offer, by protocol id, in order of preference."""
    offered: dict[str, ISecureTransport] = {}
    try:
        offered[tls.PROTOCOL_ID] = tls.TlsTransport(key_pair, [YAMUX_ID])
    except tls.TlsUnavailable as error:
        _log.warning("TLS is not offered, connections use noise, which is slower: %s", error)
    offered[NOISE_ID] = NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
    return offered
