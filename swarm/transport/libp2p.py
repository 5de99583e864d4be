"""The network: peers over TCP, TLS 1.3 (or noise) and yamux, by way of py-libp2p.

The library runs the host: identify, ping, GossipSub, noise. Ours are the sockets, TLS, the muxer, the negotiation, and
who is dialed when: its defaults block a peer for a minute after a failure, try one address, and wait a quarter of a
second in any case. Two connections to a peer as a rule: one for the control lane, one for bulk.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import trio
from libp2p.abc import INetStream, ISecureConn
from libp2p.crypto.keys import KeyPair
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from codec.errors import PeerError
from codec.sign import Key
from swarm.transport.base import Accept, Lane, PeerKey, Traffic, Transport, Unreachable, attend
from swarm.transport.host import NEGOTIATION_S, Host, build_host, security
from swarm.transport.identity import peer_id, peer_key
from swarm.transport.lanes import LANE_OF, Edge, LaneStream, StreamChannel
from swarm.transport.multistream import answer
from swarm.transport.muxer import MuxedConnection, MuxedStream
from swarm.transport.tcp import TcpTransport, bind, multiaddr_text
from swarm.transport.upgrade import Upgrader
from swarm.transport.yamux import Limits

__all__ = ["DialRules", "Libp2pTransport"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DialRules:
    """When and how long we try."""

    handshake_s: float = 10.0
    """For security and for the muxer each; also for inbound connections."""

    address_s: float = 12.0
    """For one address, all in all."""

    stagger_s: float = 0.5
    """The next address is tried after this, beside those that have not answered yet."""

    backoff_first_s: float = 0.5
    backoff_most_s: float = 30.0
    """After the n-th failure in a row a peer is not dialed for first x 2^(n-1), at most this long, less up to half."""


class _Backoff:
    """Failures in a row, and until when the peer is left alone."""

    def __init__(self) -> None:
        self.failures = 0
        self.until_s = 0.0


class Libp2pTransport(Transport):
    """A peer on the network. `connect`, `open_stream` and the like work while `serve` runs."""

    def __init__(
        self,
        key: Key,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        *,
        limits: Limits | None = None,
        dial_rules: DialRules | None = None,
    ) -> None:
        """`listen`: multiaddrs such as /ip4/0.0.0.0/tcp/4701 (port 0: any). `announce`: where the world reaches us."""
        self.key = key.public
        self.traffic = Traffic()
        self.announce = list(announce)
        self.host: Host | None = None
        """py-libp2p's host while `serve` runs: for GossipSub and for protocols that are not ours."""
        self._key = key
        self._listen = list(listen)
        self._limits = limits or Limits()
        self._rules = dial_rules or DialRules()
        self._edges: dict[PeerKey, Edge] = {}
        self._addresses: dict[PeerKey, list[str]] = {}  # where connect() last found or sought them
        self._backoff: dict[PeerKey, _Backoff] = {}
        self._dialing: dict[PeerKey, trio.Lock] = {}
        self._dialing_for: dict[PeerKey, Lane] = {}
        self._accept: Accept | None = None
        self._nursery: trio.Nursery | None = None

    async def serve(
        self, accept: Accept, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        listeners = await bind(self._listen)
        tcp = TcpTransport(self.traffic, listeners)
        try:
            async with trio.open_nursery() as nursery:
                self._accept, self._nursery = accept, nursery
                self.host = self._build_host(tcp, list(listeners))
                async with self.host.run(listen_addrs=[Multiaddr(address) for address in listeners]):
                    task_status.started(list(listeners))
                    await trio.sleep_forever()
        finally:
            self._accept = self._nursery = self.host = None
            tcp.close_all()
            self._edges.clear()

    def _build_host(self, tcp: TcpTransport, listening: Sequence[str]) -> Host:
        def upgrader(key_pair: KeyPair) -> Upgrader:
            return Upgrader(security(key_pair), self._make_connection, self._rules.handshake_s)

        host = build_host(self._key, tcp, upgrader, self.announce or listening, self._rules.handshake_s)
        host.pick = self._pick_for_library
        host.get_network().set_stream_handler(self._on_stream)
        return host

    def _pick_for_library(self, id_: ID) -> MuxedConnection | None:
        edge = self._edges.get(peer_key(str(id_)))
        return edge.pick(Lane.CONTROL) if edge else None

    @property
    def host_id(self) -> ID:
        """Our own identity as the library writes it."""
        return self.id_of(self.key)

    @staticmethod
    def id_of(peer: PeerKey) -> ID:
        return ID.from_base58(peer_id(peer))

    # Connections.

    def _make_connection(self, conn: ISecureConn, id_: ID, peer: PeerKey) -> MuxedConnection:
        return MuxedConnection(conn, id_, peer, self._limits, self._on_started, self._on_ended)

    def _on_started(self, connection: MuxedConnection) -> None:
        lane = self._dialing_for.get(connection.peer) if connection.is_initiator else None
        self._edges.setdefault(connection.peer, Edge()).add(connection, lane)
        self._backoff.pop(connection.peer, None)

    def _on_ended(self, connection: MuxedConnection) -> None:
        _log.info("connection ended peer=%s reason=%r", peer_id(connection.peer), connection.yamux.reason)
        edge = self._edges.get(connection.peer)
        if edge:
            edge.remove(connection)
            if not edge.connections:
                self._edges.pop(connection.peer, None)

    async def connect(self, peer: PeerKey, addrs: Sequence[str]) -> None:
        await trio.lowlevel.checkpoint()
        if self._connections(peer):
            return
        async with self._dialing.setdefault(peer, trio.Lock()):
            if not self._connections(peer):
                await self._dial(peer, addrs, Lane.CONTROL)
        self._addresses[peer] = list(addrs)

    def _connections(self, peer: PeerKey) -> list[MuxedConnection]:
        edge = self._edges.get(peer)
        return edge.connections if edge else []

    async def _dial(self, peer: PeerKey, addrs: Sequence[str], lane: Lane) -> None:
        """Try every address, a little apart, until one answers. Raises `Unreachable`. Needs the peer's lock."""
        name = peer_id(peer)
        if self.host is None:
            raise Unreachable(f"cannot dial {name}: not serving")
        if peer == self.key:
            raise Unreachable(f"{name} is this node itself")
        backoff = self._backoff.setdefault(peer, _Backoff())
        wait_s = backoff.until_s - trio.current_time()
        if wait_s > 0:
            raise Unreachable(f"{name} did not answer {backoff.failures} times; next try in {wait_s:.1f} s")
        failures: list[str] = []
        self._dialing_for[peer] = lane
        try:
            async with trio.open_nursery() as nursery:
                for address in addrs:
                    failed = trio.Event()
                    nursery.start_soon(
                        partial(self._try_address, peer, address, failures, failed, nursery.cancel_scope)
                    )
                    with trio.move_on_after(self._rules.stagger_s):
                        await failed.wait()
        finally:
            del self._dialing_for[peer]
        if not self._connections(peer) or (lane is Lane.BULK and not self._edges[peer].pick(lane)):
            backoff.failures += 1
            longest_s = self._rules.backoff_first_s * 2.0 ** min(backoff.failures - 1, 20)
            pause_s = min(self._rules.backoff_most_s, longest_s) * random.uniform(0.5, 1.0)
            backoff.until_s = trio.current_time() + pause_s
            self._backoff[peer] = backoff
            raise Unreachable(f"{name} does not answer: {'; '.join(failures) or 'no address'}")

    async def _try_address(
        self, peer: PeerKey, address: str, failures: list[str], failed: trio.Event, enough: trio.CancelScope
    ) -> None:
        assert self.host is not None
        try:
            with trio.fail_after(self._rules.address_s):
                await self.host.get_network().dial_addr(Multiaddr(address), self.id_of(peer))
        except Exception as error:  # whatever the library raises, here it means: not at this address
            failures.append(f"{address} ({_innermost(error)})")
            failed.set()
        else:
            enough.cancel()

    async def disconnect(self, peer: PeerKey) -> None:
        async with trio.open_nursery() as nursery:
            for connection in self._connections(peer):
                nursery.start_soon(connection.close)

    def remote_address(self, peer: PeerKey) -> str | None:
        for connection in self._connections(peer):
            address = connection.get_remote_address()
            if address:
                return multiaddr_text(address)
        return None

    def peers(self) -> list[PeerKey]:
        return [peer for peer, edge in self._edges.items() if edge.connections]

    # Streams.

    async def open_stream(self, peer: PeerKey, lane: Lane) -> LaneStream:
        await trio.lowlevel.checkpoint()
        connection = await self._connection_for(peer, lane)
        try:
            return await LaneStream.open(connection.yamux, lane)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise Unreachable(f"{peer_id(peer)}: {error}") from error

    async def _connection_for(self, peer: PeerKey, lane: Lane) -> MuxedConnection:
        if not self._connections(peer):
            raise Unreachable(f"not connected to {peer_id(peer)}")
        found = self._edges[peer].pick(lane)
        if found is None and self._addresses.get(peer):
            async with self._dialing.setdefault(peer, trio.Lock()):
                if peer in self._edges and self._edges[peer].pick(lane) is None:
                    try:
                        await self._dial(peer, self._addresses[peer], lane)
                    except Unreachable as error:
                        _log.info("no %s connection peer=%s reason=%r", lane.value, peer_id(peer), str(error))
        # A peer that dialed us and cannot be dialed has what connections it made; they serve either lane.
        connections = self._connections(peer)
        if not connections:
            raise Unreachable(f"not connected to {peer_id(peer)}")
        return self._edges[peer].pick(lane) or connections[0]

    async def _on_stream(self, net_stream: INetStream) -> None:
        """A stream that a peer opened: agree on a protocol, then hand it to `accept` or to the library."""
        muxed = getattr(net_stream, "muxed_stream", None)
        host = self.host
        if host is None or not isinstance(muxed, MuxedStream):
            return
        try:
            with trio.fail_after(NEGOTIATION_S):
                handlers = host.handlers
                protocol = await answer(StreamChannel(muxed.stream), [*LANE_OF, *handlers])
            if protocol not in LANE_OF:
                net_stream.set_protocol(TProtocol(protocol))
                await handlers[protocol](net_stream)
                return
        except PeerError as error:
            _log.info("refused a stream reason=%r", str(error))
            muxed.stream.reset()
            return
        except Exception as error:  # a handler of the library failed on what the peer sent; the stream ends, not we
            _log.info("a stream of the library's ended reason=%r", repr(error))
            muxed.stream.reset()
            return
        self._give(muxed, LANE_OF[protocol])

    def _give(self, muxed: MuxedStream, lane: Lane) -> None:
        connection = muxed.muxed_conn
        assert isinstance(connection, MuxedConnection)
        if self._nursery is None or self._accept is None:
            return
        edge = self._edges.get(connection.peer)
        if edge:
            edge.used_for(connection, lane)
        self._nursery.start_soon(partial(attend, self, self._accept, connection.peer, lane, muxed.stream))


def _innermost(error: BaseException) -> str:
    """The text of the first cause: the library wraps it several times over, and trio groups what it tried."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__cause__ is not None:
            error = error.__cause__
        else:
            return str(error) or type(error).__name__
