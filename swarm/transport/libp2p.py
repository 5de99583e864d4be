"""The network: peers over TCP, TLS 1.3 (or noise) and yamux, by way of py-libp2p.

The library runs the host: identify, ping, GossipSub, noise. Ours are the sockets, TLS, the muxer, the negotiation, and
who is dialed when: its defaults block a peer for a minute after a failure, try one address, and wait a quarter of a
second in any case. Two connections to a peer as a rule: one for the control lane, one for bulk.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Final

import trio
from libp2p.abc import INetStream, ISecureConn
from libp2p.crypto.keys import KeyPair
from libp2p.custom_types import StreamHandlerFn, TProtocol
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from codec.errors import PeerError
from codec.sign import Key
from swarm.guard import Source, guarded
from swarm.protocol.core.reach import is_circuit
from swarm.transport.base import Accept, Lane, PathKind, PeerKey, Traffic, Transport, Unreachable, attend
from swarm.transport.connection.admission import Admission, AdmissionRules, Arrival
from swarm.transport.connection.gate import Gate, GateRules
from swarm.transport.connection.migrating_connection import MigratingConnection
from swarm.transport.connection.multistream import answer
from swarm.transport.connection.muxer import MuxedConnection, MuxedStream
from swarm.transport.connection.tcp import TcpTransport, bind, checked_announcements, descriptors, multiaddr_text
from swarm.transport.connection.upgrade import Upgrader
from swarm.transport.dialer import Dialer, DialRules
from swarm.transport.host import MAX_CONNECTIONS_A_PEER, NEGOTIATION_S, Host, build_host, security
from swarm.transport.identity import peer_id, peer_key
from swarm.transport.lanes import LANE_OF, PROTOCOL_OF, TARGET_CONNECTIONS_ID, Edge, LaneStream, StreamChannel
from swarm.transport.nat.circuit import HOP_ID, STOP_ID
from swarm.transport.nat.punch import PUNCH_ID, Puncher
from swarm.transport.nat.relay import Relay, RelayRules
from swarm.transport.nat.relayed_links import CONTINUE_ID, RelayedLinks
from swarm.transport.nat.reservations import Reservations
from swarm.transport.parallel import CONNECTION_COUNTS, DEFAULT_MBIT, socket_window_bytes, target_connections
from swarm.transport.probe import answers_as
from swarm.transport.tuning import BBR
from swarm.transport.yamux import Limits, PeerBudgets, YamuxStream

__all__ = ["DialRules", "Libp2pTransport"]

_IDLE_S: Final = 60.0
"""A bulk connection beyond the first that carried nothing for this long is closed by who dialed it."""
_SWEEP_S: Final = 15.0
_STRANGERS_S: Final = 0.5
"""How often strangers are looked at, who have seconds (`Gate`)."""

_log = logging.getLogger(__name__)
_dialing_for: ContextVar[Lane | None] = ContextVar("_dialing_for", default=None)
"""Why the connection that this task makes is being made: the library has no place to say it."""


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
        admission_rules: AdmissionRules | None = None,
        up_mbit: float = DEFAULT_MBIT,
        via: Sequence[str] = (),
        relay_for: Callable[[PeerKey], bool] | None = None,
        relay_rules: RelayRules | None = None,
        admits: Callable[[PeerKey], bool] | None = None,
        gate_rules: GateRules | None = None,
        knows: Callable[[PeerKey], bool] | None = None,
    ) -> None:
        """`listen`: multiaddrs such as /ip4/0.0.0.0/tcp/4701 (port 0: any). `announce`: where the world reaches us.
        `up_mbit`: what our uplink carries, as far as anybody has said.
        `via`: relays at which we keep a place, so that we are reached through them; addresses, with /p2p/ID or without.
        `relay_for`: we are such a relay, for whom it says yes to.
        `admits`: who has shown a grant (None: everybody); the others get what `Gate` says.
        `knows`: who holds one, shown or not (None: as `admits`): it is never treated as a stranger.

        Raises `UsageError` for an announced address that nobody could dial.
        """
        self.key = key.public
        self.traffic = Traffic()
        self.announce = checked_announcements(announce)
        self.host: Host | None = None
        """py-libp2p's host while `serve` runs: for GossipSub and for protocols that are not ours."""
        self._key = key
        self._listen = list(listen)
        self._limits = limits or Limits()
        self._rules = dial_rules or DialRules()
        self._edges: dict[PeerKey, Edge] = {}
        self.budgets = PeerBudgets()
        self._addresses: dict[PeerKey, list[str]] = {}  # where connect() last found or sought them
        self._dialer = Dialer(self._rules, self._dial_once)
        self._connecting: dict[PeerKey, trio.Lock] = {}
        self._window_bytes = socket_window_bytes()
        self._up_mbit = up_mbit
        self._accept: Accept | None = None
        self.nursery: trio.Nursery | None = None
        """While `serve` runs: what belongs to connections."""
        self.tcp: TcpTransport | None = None
        self.relayed_links = RelayedLinks(self)
        self.reservations = Reservations(self, via)
        self.puncher = Puncher(self)
        self.relay: Relay | None = None
        if relay_for is not None:
            self.relay = Relay(relay_rules or RelayRules(), relay_for, self.open_library_stream, self.remote_address)
        carries = self.relay.carries if self.relay is not None else lambda peer: False
        self._gate = Gate(admits, self._limits, gate_rules, carries, knows)
        rules = admission_rules or AdmissionRules()
        rules = replace(rules, pending=min(rules.pending, descriptors() // 4))
        self._admission = Admission(rules, self._gate.is_home)
        self._arriving: dict[MigratingConnection, Arrival] = {}  # circuits whose peer is not known yet
        self._serves: dict[str, Callable[[MuxedConnection, YamuxStream], Awaitable[None]]] = {
            TARGET_CONNECTIONS_ID: self._on_target_connections,
            STOP_ID: lambda connection, stream: self.relayed_links.on_stop(connection.peer, stream),
            CONTINUE_ID: self.relayed_links.on_continue,
            PUNCH_ID: self.puncher.follow,
        }
        if self.relay is not None:
            self._serves[HOP_ID] = self._on_hop

    async def serve(
        self, accept: Accept, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        listeners = await bind(self._listen)
        tcp = self.tcp = TcpTransport(self.traffic, listeners, self._admission)
        tcp.on_token = self.puncher.arrived
        try:
            async with trio.open_nursery() as nursery:
                self._accept, self.nursery = accept, nursery
                await nursery.start(tcp.reception.run)
                self.host = self._build_host(tcp, list(listeners))
                async with self.host.run(listen_addrs=[Multiaddr(address) for address in listeners]):
                    task_status.started(list(listeners))
                    nursery.start_soon(self.reservations.keep)
                    nursery.start_soon(self._watch_strangers)
                    await self._sweep()
        finally:
            self._accept = self.nursery = self.host = self.tcp = None
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
        """None also for strangers: the library opens no streams to them."""
        edge = self._edges.get(peer_key(str(id_)))
        connection = edge.pick(Lane.CONTROL) if edge else None
        return None if connection is None or self._gate.is_strange(connection) else connection

    @property
    def host_id(self) -> ID:
        """Our own identity as the library writes it."""
        return self.id_of(self.key)

    @staticmethod
    def id_of(peer: PeerKey) -> ID:
        return ID.from_base58(peer_id(peer))

    # Connections.

    def _make_connection(self, conn: ISecureConn, id_: ID, peer: PeerKey) -> MuxedConnection:
        lane = _dialing_for.get() if conn.is_initiator else None
        limits = self._gate.limits(peer, dialed=conn.is_initiator)
        budget = self.budgets.of(peer, limits, trio.current_time())
        return MuxedConnection(conn, id_, peer, lane, limits, self._on_started, self._on_ended, budget)

    def _on_started(self, connection: MuxedConnection) -> None:
        if connection.path is not None and connection.path in self._arriving and self.tcp is not None:
            self.tcp.reception.over(self._arriving.pop(connection.path))
        # The library's own limit for a peer is none for connections that are younger than half a minute.
        if not connection.is_initiator and len(self._connections(connection.peer)) >= MAX_CONNECTIONS_A_PEER:
            self._part_with([connection], "the peer has too many")
            return
        self._part_with(self._gate.begin(connection, trio.current_time()), "it makes room for another stranger's")
        self._edges.setdefault(connection.peer, Edge()).add(connection)
        self._dialer.forgive(connection.peer)

    def _part_with(self, connections: Sequence[MuxedConnection], why: str) -> None:
        for each in connections:
            _log.info("connection closed peer=%s reason=%r", peer_id(each.peer), why)
            if self.nursery is not None:
                self.nursery.start_soon(each.close)

    def _on_ended(self, connection: MuxedConnection) -> None:
        _log.info("connection ended peer=%s reason=%r", peer_id(connection.peer), connection.yamux.reason)
        self._gate.end(connection)
        self.budgets.left(connection.peer, trio.current_time())
        edge = self._edges.get(connection.peer)
        if edge:
            edge.remove(connection)
            if not edge.connections:
                self._edges.pop(connection.peer, None)
                self._addresses.pop(connection.peer, None)
                edge.ended.set()

    async def connect(self, peer: PeerKey, addrs: Sequence[str]) -> None:
        await trio.lowlevel.checkpoint()
        if self._connections(peer):
            return
        lock = self._connecting.setdefault(peer, trio.Lock())
        try:
            async with lock:
                if not self._connections(peer):
                    await self._dial(peer, addrs, Lane.CONTROL)
        finally:
            if not lock.statistics().tasks_waiting:
                self._connecting.pop(peer, None)
        if self._connections(peer):
            self._addresses[peer] = list(addrs)

    def _connections(self, peer: PeerKey) -> list[MuxedConnection]:
        edge = self._edges.get(peer)
        return edge.connections if edge else []

    async def _dial(self, peer: PeerKey, addrs: Sequence[str], lane: Lane) -> MuxedConnection:
        if self.host is None:
            raise Unreachable(f"cannot dial {peer_id(peer)}: not serving")
        if peer == self.key:
            raise Unreachable(f"{peer_id(peer)} is this node itself")
        token = _dialing_for.set(lane)
        try:
            return await self._dialer.dial(peer, addrs)
        finally:
            _dialing_for.reset(token)

    async def _dial_once(self, peer: PeerKey, address: str) -> MuxedConnection:
        if self.host is None:
            raise Unreachable("not serving")
        if is_circuit(address):
            return await self.relayed_links.dial(peer, address)
        conn = await self.host.get_network().dial_addr(Multiaddr(address), self.id_of(peer))
        assert isinstance(conn, SwarmConn)
        assert isinstance(conn.muxed_conn, MuxedConnection)
        return conn.muxed_conn

    async def probe(self, peer: PeerKey, address: str) -> bool:
        await trio.lowlevel.checkpoint()
        return self.host is not None and await answers_as(self.host, self.id_of(peer), address)

    def path_kind(self, peer: PeerKey) -> PathKind | None:
        edge = self._edges.get(peer)
        return edge.path_kind if edge else None

    async def _sweep(self) -> None:
        """Close what lies idle, and whose lease is over, for ever."""
        while True:
            await trio.sleep(_SWEEP_S)
            connections = [each for edge in self._edges.values() for each in edge.connections]
            self._part_with(self._gate.review(connections, trio.current_time()), "its peer is a stranger")
            for edge in list(self._edges.values()):
                for connection in edge.idle(trio.current_time(), _IDLE_S):
                    await connection.close()
            if self.host is not None:
                self.host.forget_dead()

    async def _watch_strangers(self) -> None:
        while True:
            await trio.sleep(_STRANGERS_S)
            self._part_with(self._gate.overdue(trio.current_time()), "it said nothing valid in time")

    def let_open(self, peer: PeerKey, streams: int) -> None:
        """The peer may have so many streams open with us, if that is more than others may."""
        self.budgets.of(peer, self._limits, trio.current_time()).let_open(streams)

    async def parted(self, peer: PeerKey) -> None:
        """Return when no connection to `peer` is left."""
        edge = self._edges.get(peer)
        if edge is not None:
            await edge.ended.wait()

    async def disconnect(self, peer: PeerKey) -> None:
        async with trio.open_nursery() as nursery:
            for connection in self._connections(peer):
                nursery.start_soon(connection.close)

    def remote_address(self, peer: PeerKey) -> str | None:
        for connection in self._connections(peer):
            if connection.path is not None:
                return connection.path.link.seen_at
            address = connection.get_remote_address()
            if address:
                return multiaddr_text(address)
        return None

    def congestion_control(self, peer: PeerKey) -> str:
        """What paces our connections to `peer` ("bbr", "cubic"), or "" when that is not known."""
        return next((connection.congestion_control for connection in self._connections(peer)), "")

    def peers(self) -> list[PeerKey]:
        return [peer for peer, edge in self._edges.items() if edge.connections]

    def departed_bytes(self) -> int | None:
        return self.tcp.departed_bytes() if self.tcp is not None else None

    # Streams.

    def target_connections(self, peer: PeerKey) -> int:
        edge = self._edges.get(peer)
        if edge is None or edge.path_kind in (
            PathKind.CIRCUIT,
            PathKind.PUNCHED,
        ):  # each further one would cost its relay a circuit
            return 1
        by_bandwidth = self.congestion_control(peer) == BBR.decode()
        return target_connections(edge.round_trip_s, self._window_bytes, self._up_mbit, by_bandwidth)

    async def open_stream(self, peer: PeerKey, lane: Lane) -> LaneStream:
        await trio.lowlevel.checkpoint()
        if not self._connections(peer):
            raise Unreachable(f"not connected to {peer_id(peer)}")
        if lane is Lane.BULK:
            await self._grow(peer)
        edge = self._edges.get(peer)
        # A peer that cannot be dialed has what connections it made itself; they serve either lane.
        connection = edge and (edge.pick(lane) or next(iter(edge.connections), None))
        if not connection:
            raise Unreachable(f"not connected to {peer_id(peer)}")
        return await self.open_on(connection, PROTOCOL_OF[lane])

    async def open_library_stream(self, peer: PeerKey, protocol: str) -> LaneStream:
        """A stream for another protocol than the lanes', on the control connection. Raises `Unreachable`."""
        edge = self._edges.get(peer)
        connection = edge and edge.pick(Lane.CONTROL)
        if not connection:
            raise Unreachable(f"not connected to {peer_id(peer)}")
        return await self.open_on(connection, protocol)

    async def open_on(self, connection: MuxedConnection, protocol: str) -> LaneStream:
        try:
            return await LaneStream.open(connection.yamux, protocol)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise Unreachable(f"{peer_id(connection.peer)}: {error}") from error

    async def _grow(self, peer: PeerKey) -> None:
        """Have a bulk connection that is free, unless there are as many as the path is worth."""
        edge = self._edges[peer]
        bulk = edge.live(Lane.BULK)
        if any(not each.yamux.stream_count for each in bulk) or len(bulk) + edge.dialing >= self.target_connections(
            peer
        ):
            return
        edge.dialing += 1
        try:
            if self._addresses.get(peer):
                await self._dial(peer, self._addresses[peer], Lane.BULK)
            else:
                await self._ask_for(peer, len(bulk) + edge.dialing)
        except Unreachable as error:
            _log.info("no further bulk connection peer=%s reason=%r", peer_id(peer), str(error))
        finally:
            edge.dialing -= 1

    async def _ask_for(self, peer: PeerKey, count: int) -> None:
        """Let the peer, which dialed us, dial us again until there are `count` bulk connections."""
        connection = self._edges[peer].pick(Lane.CONTROL)
        if connection is None:
            return
        try:
            with trio.fail_after(self._rules.address_s):
                async with await self.open_on(connection, TARGET_CONNECTIONS_ID) as stream:
                    await stream.send_all(bytes([count]))
                    await stream.receive_some(1)
        except (trio.BrokenResourceError, trio.TooSlowError) as error:
            raise Unreachable(f"the peer makes no more connections: {error}") from error

    async def _on_hop(self, connection: MuxedConnection, stream: YamuxStream) -> None:
        assert self.relay is not None
        async with stream:
            await self.relay.serve(connection.peer, stream, connection.yamux.lift_allowance)

    async def take_inbound(self, path: MigratingConnection, source: str) -> None:
        """Serve a connection that came by a relay (`source`: as admission counts it) until it ends."""
        tcp = self.tcp
        if tcp is None or tcp.handler is None or (arrival := await tcp.reception.turn(source)) is None:
            await path.close()
            return
        with trio.CancelScope() as scope, guarded(Source.HANDSHAKE, source):
            path.on_closed = arrival.drop = scope.cancel
            self._arriving[path] = arrival
            try:
                await tcp.handler(path)
            finally:
                self._arriving.pop(path, None)
                tcp.reception.over(arrival)
                await path.close()

    async def _on_target_connections(self, connection: MuxedConnection, stream: YamuxStream) -> None:
        """The other end of `_ask_for`."""
        peer = connection.peer
        async with stream:
            with trio.fail_after(NEGOTIATION_S):
                asked = await stream.receive_some(1)
            wanted = min(asked[0], CONNECTION_COUNTS[-1]) if asked else 0
            for _ in range(wanted):  # so many dials at most: the peer may close each connection as soon as it stands
                edge, addresses = self._edges.get(peer), self._addresses.get(peer)
                if not edge or not addresses:  # never dialed, or its last connection closed meanwhile
                    return
                if len(edge.live(Lane.BULK)) + edge.dialing >= wanted:
                    break
                edge.dialing += 1
                try:
                    await self._dial(peer, addresses, Lane.BULK)
                finally:
                    edge.dialing -= 1
            if edge := self._edges.get(peer):
                await stream.send_all(bytes([len(edge.live(Lane.BULK))]))

    async def _on_stream(self, net_stream: INetStream) -> None:
        """A stream that a peer opened: agree on a protocol, then hand it to `accept` or to the library."""
        muxed = getattr(net_stream, "muxed_stream", None)
        host = self.host
        if host is None or not isinstance(muxed, MuxedStream):
            return
        assert isinstance(muxed.muxed_conn, MuxedConnection)
        with guarded(Source.STREAM, muxed.muxed_conn.peer) as outcome:
            await self._serve_stream(host, net_stream, muxed, muxed.muxed_conn)
        if outcome.error is not None:
            _log.info("a stream ended peer=%s reason=%r", peer_id(muxed.muxed_conn.peer), outcome.why)
            muxed.stream.reset()

    async def _serve_stream(
        self, host: Host, net_stream: INetStream, muxed: MuxedStream, connection: MuxedConnection
    ) -> None:
        with trio.fail_after(NEGOTIATION_S):
            handlers = host.handlers
            protocol = await answer(StreamChannel(muxed.stream), [*LANE_OF, *self._serves, *handlers])
        if not self._gate.may(connection, protocol):
            raise PeerError(f"{protocol} is for those who hold a grant")
        if protocol in LANE_OF:
            self._give(muxed, LANE_OF[protocol])
        elif protocol in self._serves:
            await self._serves[protocol](connection, muxed.stream)
        else:
            net_stream.set_protocol(TProtocol(protocol))
            await _serve_by_library(handlers[protocol], net_stream)

    def _give(self, muxed: MuxedStream, lane: Lane) -> None:
        connection = muxed.muxed_conn
        assert isinstance(connection, MuxedConnection)
        if self.nursery is None or self._accept is None:
            return
        edge = self._edges.get(connection.peer)
        if edge:
            edge.used_for(connection, lane)
        self.nursery.start_soon(partial(attend, self, self._accept, connection.peer, lane, muxed.stream))


async def _serve_by_library(handler: StreamHandlerFn, stream: INetStream) -> None:
    """Raises `PeerError` for whatever the library's handlers raise: they do, at what no protocol allows."""
    try:
        await handler(stream)
    except Exception as error:
        raise PeerError(f"{stream.get_protocol()}: {type(error).__name__}: {error}") from error
