"""py-libp2p's host as we set it up: our security, muxer, negotiation and sockets are in it; its own dialing is out."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio
from libp2p.abc import INetStream, ISecureTransport
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import StreamHandlerFn, TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.host.exceptions import StreamFailure
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
from codec.sign import Key
from swarm.transport.connection import tls
from swarm.transport.connection.multistream import Channel, propose
from swarm.transport.connection.muxer import YAMUX_ID, MuxedConnection
from swarm.transport.connection.tcp import TcpTransport
from swarm.transport.connection.upgrade import Upgrader

__all__ = ["Host", "build_host", "security"]

MAX_CONNECTIONS: Final = 4096
MAX_CONNECTIONS_A_PEER: Final = 12
"""Eight for bulk at most (`parallel.TARGET_CONNECTIONS`), one for control, and some to spare while old ones go. Each
costs memory."""
NEGOTIATION_S: Final = 10.0
"""For the two ends of a stream to agree on what it carries."""

_log = logging.getLogger(__name__)
# What peers do wrong is no news for the terminal; the library logs each such case as a warning or an error.
logging.getLogger("libp2p").setLevel(logging.CRITICAL)


class _NoDialing(AutoConnector):
    """The library would dial whomever it has heard of until it has thousands of connections. Whom we dial is ours."""

    async def start(self) -> None:
        pass

    def record_disconnect(self, peer_id: ID) -> None:
        """The library would remember everybody who ever left, for ever."""


class Host(BasicHost):
    """Opens the library's own streams (identify, GossipSub) on the connection that `pick` names: the control lane's."""

    pick: Callable[[ID], MuxedConnection | None]
    tcp: TcpTransport
    upgrader: Upgrader

    async def new_stream(self, peer_id: ID, protocol_ids: Sequence[TProtocol]) -> INetStream:
        wanted = self.pick(peer_id)
        for conn in self.get_network().get_connections(peer_id):
            if isinstance(conn, SwarmConn) and conn.muxed_conn is wanted:
                stream = await conn.new_stream()
                try:
                    with trio.fail_after(NEGOTIATION_S):
                        stream.set_protocol(TProtocol(await propose(NetChannel(stream), protocol_ids)))
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
        """Take out of the library's list what died while it was being added: the library would count it for ever."""
        connections = self.get_network().connections
        for peer, its in list(connections.items()):
            alive = [each for each in its if not each.muxed_conn.is_closed]
            if not alive:
                del connections[peer]
            elif len(alive) < len(its):
                connections[peer] = alive

    @property
    def handlers(self) -> Mapping[str, StreamHandlerFn]:
        """Who takes which of the library's protocols."""
        return {str(name): handler for name, handler in self.multiselect.handlers.items() if name and handler}


class NetChannel(Channel):
    """One of the library's streams, to negotiate on."""

    def __init__(self, stream: INetStream) -> None:
        self._stream = stream

    async def read(self, n: int | None = None, /) -> bytes:
        return await self._stream.read(n)

    async def write(self, data: bytes, /) -> None:
        await self._stream.write(data)


def build_host(
    key: Key, tcp: TcpTransport, upgrader: Callable[[KeyPair], Upgrader], announce: Sequence[str], handshake_s: float
) -> Host:
    """A host that only does as it is told. Its swarm listens on what `tcp` has bound."""
    key_pair = create_new_key_pair(key.seed)
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
    secure = upgrader(key_pair)
    swarm = Swarm(
        own_id,
        peerstore,
        secure,
        transports=[tcp],
        retry_config=RetryConfig(max_retries=0),
        connection_config=config,
    )
    swarm.auto_connector = _NoDialing(swarm)
    host = Host(
        swarm,
        announce_addrs=[Multiaddr(address) for address in announce],
        disable_identify_address_discovery=True,
    )
    # The library would ask every peer that connects what it speaks, and remember the answer: a stream, a task and
    # entries in three tables for each stranger, which nothing of ours reads. Others may still ask us.
    swarm.notifees.clear()
    host.remove_stream_handler(ID_PUSH)
    host.tcp, host.upgrader = tcp, secure
    return host


def security(key_pair: KeyPair) -> dict[str, ISecureTransport]:
    """What we offer, the preferred first."""
    offered: dict[str, ISecureTransport] = {}
    try:
        offered[tls.PROTOCOL_ID] = tls.TlsTransport(key_pair, [YAMUX_ID])
    except tls.TlsUnavailable as error:
        _log.warning("TLS is off, noise (slower) is used: %s", error)
    offered[NOISE_ID] = NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
    return offered
