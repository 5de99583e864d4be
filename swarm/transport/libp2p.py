"""The network: peers over TCP, TLS 1.3 (or noise) and yamux, on top of py-libp2p.

The library runs the host, identify, ping, GossipSub and noise. The sockets, TLS, the muxer and the negotiation are
ours, and so is dialing: the library's defaults block a peer for a minute after a failure, try one address, and always
wait a quarter of a second. A peer usually has two connections, one for the control lane and one for bulk.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import StreamHandlerFn, TProtocol
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from codec.errors import PeerError
from codec.sign import Key
from swarm.guard import Source, guarded
from swarm.protocol.core.reach import is_circuit
from swarm.transport.base import Accept, Lane, PathKind, PeerKey, Stream, Traffic, Transport, Unreachable, attend
from swarm.transport.bulk_connections import BulkConnections
from swarm.transport.connection.addresses import checked_announcements, multiaddr_text
from swarm.transport.connection.gate import Gate
from swarm.transport.connection.handshakes import Arrival, HandshakeTurns
from swarm.transport.connection.migrating_connection import MigratingConnection
from swarm.transport.connection.multistream import NoneSpoken, answer
from swarm.transport.connection.muxer import Authenticated, MuxedConnection, MuxedStream
from swarm.transport.connection.ports import bind, descriptors
from swarm.transport.connection.tcp import TcpTransport
from swarm.transport.connection.upgrade import Upgrader
from swarm.transport.dialer import Dialer
from swarm.transport.host import MAX_CONNECTIONS_A_PEER, NEGOTIATION_S, Host, build_host, security
from swarm.transport.identity import peer_id, peer_key
from swarm.transport.lanes import LANE_OF, PROTOCOL_OF, TARGET_CONNECTIONS_ID, Edge, LaneStream, StreamChannel
from swarm.transport.nat.circuit import HOP_ID, STOP_ID
from swarm.transport.nat.known_relays import KnownRelays
from swarm.transport.nat.punch import PUNCH_ID, Puncher
from swarm.transport.nat.relay import Relay
from swarm.transport.nat.relayed_links import CONTINUE_ID, RelayedLinks
from swarm.transport.nat.reservations import Reservations
from swarm.transport.parallel import DEFAULT_MBIT
from swarm.transport.probe import answers_as, who_answers
from swarm.transport.rules import PeerPolicy, TransportRules
from swarm.transport.yamux import PeerBudgets, YamuxStream

__all__ = ["Libp2pTransport"]

_IDLE_S: Final = 60.0
"""A bulk connection that carried nothing for this long is closed by the end that dialed it, except for one."""
_SWEEP_S: Final = 15.0
"""How often idle connections and ended leases are looked for."""
_STRANGERS_S: Final = 0.5
"""How often strangers are checked; they have seconds (`GateRules`)."""

_log = logging.getLogger(__name__)
_dialing_for: ContextVar[Lane | None] = ContextVar("_dialing_for", default=None)
"""The lane that the present task dials for. The library passes no such value through its own calls."""


class Libp2pTransport(Transport):
    """A peer on the network. `connect`, `open_stream` and the like work while `serve` runs.

    For the parts in `nat` it is their `PeerConnections` and `PathUpgrader`.
    """

    def __init__(
        self,
        key: Key,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        *,
        up_mbit: float = DEFAULT_MBIT,
        via: Sequence[str] = (),
        policy: PeerPolicy | None = None,
        rules: TransportRules | None = None,
    ) -> None:
        """`listen`: multiaddrs such as /ip4/0.0.0.0/tcp/4701 (port 0: any). `announce`: the addresses at which others
        can dial us. `up_mbit`: our uplink in Mbit/s. `via`: addresses of relays, with or without /p2p/ID, at which we
        keep a reservation so that we can be reached through them.

        Raises `UsageError` for an announced address that cannot be dialed.
        """
        policy = policy or PeerPolicy()
        self.key = key.public
        self.traffic = Traffic()
        self.announce = checked_announcements(announce)
        self.host: Host | None = None
        """py-libp2p's host while `serve` runs: for GossipSub, and for protocols that are not ours."""
        self.tcp: TcpTransport | None = None
        self._key_pair = create_new_key_pair(key.seed)
        self._listen = list(listen)
        self._rules = rules or TransportRules()
        self._edges: dict[PeerKey, Edge] = {}
        self._budgets = PeerBudgets()
        self._addresses: dict[PeerKey, list[str]] = {}  # as last given to `connect`
        self._dialer = Dialer(self._rules.dial, self._dial_once)
        self._connecting: dict[PeerKey, trio.Lock] = {}
        self._accept: Accept | None = None
        self._nursery: trio.Nursery | None = None  # for connections, while `serve` runs
        self.relay: Relay | None = None
        if policy.may_reserve is not None:
            self.relay = Relay(self._rules.relay, policy.may_reserve, self.open_protocol_stream, self.remote_address)
        relays_for = self.relay.relays_for if self.relay is not None else lambda peer: False
        self._gate = Gate(policy.admits, self._rules.limits, self._rules.gate, relays_for, policy.knows)
        pending = min(self._rules.handshakes.pending, descriptors() // 4)
        turn_rules = replace(self._rules.handshakes, pending=pending)
        self._handshakes = HandshakeTurns(turn_rules, self._gate.is_member_host)
        self._stranger_came = trio.Event()
        self.connected = trio.Event()
        """Set, and replaced, when a connection has been made."""
        self._arriving: dict[MigratingConnection, Arrival] = {}  # over circuits, before the peer's key is proved
        self._bulk = BulkConnections(
            self._edges,
            self._addresses,
            lambda peer, addrs: self._dial(peer, addrs, Lane.BULK),
            self.open_on,
            up_mbit=up_mbit,
            ask_s=self._rules.dial.address_s,
        )
        # Last, since these parts get this transport: from here on it has all that they use.
        self.known_relays = KnownRelays(self, self._identify)
        self.reservations = Reservations(self, self.known_relays, via)
        self.relayed_links = RelayedLinks(self, self, self.known_relays, self.reservations.address_of)
        self.puncher = Puncher(self, self.known_relays)
        self._serves: dict[str, Callable[[MuxedConnection, YamuxStream], Awaitable[None]]] = {
            TARGET_CONNECTIONS_ID: self._bulk.serve_request,
            STOP_ID: lambda connection, stream: self.relayed_links.on_stop(connection.peer, stream),
            CONTINUE_ID: self.relayed_links.on_continue,
            PUNCH_ID: self.puncher.follow,
        }
        """Our protocols other than the lanes, by id."""
        if self.relay is not None:
            self._serves[HOP_ID] = self._on_hop

    async def serve(
        self, accept: Accept, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        listeners = await bind(self._listen)
        tcp = self.tcp = TcpTransport(self.traffic, listeners, self._handshakes, self.puncher.accept_token)
        try:
            async with trio.open_nursery() as nursery:
                self._accept, self._nursery = accept, nursery
                await nursery.start(tcp.reception.run)
                self.host = self._build_host(tcp, list(listeners))
                async with self.host.run(listen_addrs=[Multiaddr(address) for address in listeners]):
                    task_status.started(list(listeners))
                    nursery.start_soon(self.reservations.keep_all)
                    nursery.start_soon(self._watch_strangers)
                    await self._sweep()
        finally:
            self._accept = self._nursery = self.host = self.tcp = None
            tcp.close_all()
            self._edges.clear()

    def _build_host(self, tcp: TcpTransport, listening: Sequence[str]) -> Host:
        handshake_s = self._rules.dial.handshake_s
        upgrader = Upgrader(security(self._key_pair), self._make_connection, handshake_s)
        announce = self.announce or listening
        host = build_host(self._key_pair, tcp, upgrader, self._pick_for_library, announce, handshake_s)
        host.get_network().set_stream_handler(self._on_stream)
        return host

    def _pick_for_library(self, id_: ID) -> MuxedConnection | None:
        """The peer's control connection; None for strangers, so that the library opens no streams to them."""
        edge = self._edges.get(peer_key(str(id_)))
        connection = edge.pick(Lane.CONTROL) if edge else None
        return None if connection is None or self._gate.is_stranger(connection) else connection

    @property
    def host_id(self) -> ID:
        """Our own identity in the library's form."""
        return self.id_of(self.key)

    @staticmethod
    def id_of(peer: PeerKey) -> ID:
        """A peer's identity in the library's form."""
        return ID.from_base58(peer_id(peer))

    # Connections.

    def _make_connection(self, authenticated: Authenticated) -> MuxedConnection:
        dialed = authenticated.conn.is_initiator
        limits = self._gate.limits(authenticated.peer, dialed=dialed)
        budget = self._budgets.for_connection(authenticated.peer, limits, trio.current_time())
        return MuxedConnection(authenticated, self, limits, budget, _dialing_for.get() if dialed else None)

    def on_started(self, connection: MuxedConnection) -> None:
        """As `ConnectionOwner`."""
        if connection.path is not None and connection.path in self._arriving and self.tcp is not None:
            self.tcp.reception.finish(self._arriving.pop(connection.path))
        # The library has a limit of its own, but it ignores connections that are younger than half a minute.
        if not connection.is_initiator and len(self._connections(connection.peer)) >= MAX_CONNECTIONS_A_PEER:
            self._close_soon([connection], "the peer has too many")
            return
        self._close_soon(self._gate.add_connection(connection, trio.current_time()), "it makes room for a stranger's")
        if self._gate.has_strangers:
            self._stranger_came.set()
        self._edges.setdefault(connection.peer, Edge()).add_connection(connection)
        self.connected.set()
        self.connected = trio.Event()
        self._dialer.forgive(connection.peer)

    def on_ended(self, connection: MuxedConnection) -> None:
        """As `ConnectionOwner`."""
        _log.info("connection ended peer=%s reason=%r", peer_id(connection.peer), connection.yamux.reason)
        self._gate.remove_connection(connection)
        self._budgets.note_departure(connection.peer, trio.current_time())
        edge = self._edges.get(connection.peer)
        if edge:
            edge.remove_connection(connection)
            if not edge.connections:
                self._edges.pop(connection.peer, None)
                self._addresses.pop(connection.peer, None)

    def _close_soon(self, connections: Sequence[MuxedConnection], why: str) -> None:
        for each in connections:
            _log.info("connection closed peer=%s reason=%r", peer_id(each.peer), why)
            if self._nursery is not None:
                self._nursery.start_soon(each.close)

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
        host, nursery = self.host, self._nursery
        if host is None or nursery is None:
            raise Unreachable("not serving")
        if is_circuit(address):
            connection = await self.relayed_links.dial(peer, address, nursery)
            nursery.start_soon(self.puncher.keep_trying, connection)
            return connection
        return _muxed(await host.get_network().dial_addr(Multiaddr(address), self.id_of(peer)))

    async def probe(self, peer: PeerKey, address: str) -> bool:
        await trio.lowlevel.checkpoint()
        return self.host is not None and await answers_as(self.host, self.id_of(peer), address)

    async def _identify(self, address: str) -> PeerKey:
        return await who_answers(self.host, address)

    def path_kind(self, peer: PeerKey) -> PathKind | None:
        edge = self._edges.get(peer)
        return edge.path_kind if edge else None

    async def _sweep(self) -> None:
        """Close idle connections and those of peers whose lease ended long ago, until cancelled."""
        while True:
            await trio.sleep(_SWEEP_S)
            connections = [each for edge in self._edges.values() for each in edge.connections]
            self._close_soon(self._gate.review(connections, trio.current_time()), "its peer is a stranger")
            if self._gate.has_strangers:
                self._stranger_came.set()
            for edge in list(self._edges.values()):
                for connection in edge.idle(trio.current_time(), _IDLE_S):
                    await connection.close()
            if self.host is not None:
                self.host.forget_dead()

    async def _watch_strangers(self) -> None:
        while True:
            while not self._gate.has_strangers:
                self._stranger_came = trio.Event()
                await self._stranger_came.wait()
            await trio.sleep(_STRANGERS_S)
            self._close_soon(self._gate.overdue(trio.current_time()), "it showed nothing valid in time")

    def allow_streams(self, peer: PeerKey, streams: int) -> None:
        """As `PeerConnections`."""
        self._budgets.for_connection(peer, self._rules.limits, trio.current_time()).allow_streams(streams)

    async def wait_disconnected(self, peer: PeerKey) -> None:
        """As `PeerConnections`."""
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
        """The congestion control of our connections to `peer` ("bbr", "cubic"), or "" when it is not known."""
        edge = self._edges.get(peer)
        return edge.congestion_control if edge else ""

    def peers(self) -> list[PeerKey]:
        return [peer for peer, edge in self._edges.items() if edge.connections]

    def departed_bytes(self) -> int | None:
        return self.tcp.departed_bytes() if self.tcp is not None else None

    # Streams.

    def target_connections(self, peer: PeerKey) -> int:
        return self._bulk.target(peer)

    async def open_stream(self, peer: PeerKey, lane: Lane) -> LaneStream:
        await trio.lowlevel.checkpoint()
        if not self._connections(peer):
            raise Unreachable(f"not connected to {peer_id(peer)}")
        if lane is Lane.BULK:
            try:
                await self._bulk.add_if_needed(peer)
            except Unreachable as error:
                _log.info("no further bulk connection peer=%s reason=%r", peer_id(peer), str(error))
        edge = self._edges.get(peer)
        # Without a connection for the lane use any: a peer that cannot be dialed may have made only one.
        connection = edge and (edge.pick(lane) or next(iter(edge.connections), None))
        if not connection:
            raise Unreachable(f"not connected to {peer_id(peer)}")
        return await self.open_on(connection, PROTOCOL_OF[lane])

    async def open_protocol_stream(self, peer: PeerKey, protocol: str) -> LaneStream:
        """As `PeerConnections`."""
        edge = self._edges.get(peer)
        connection = edge and edge.pick(Lane.CONTROL)
        if not connection:
            raise Unreachable(f"not connected to {peer_id(peer)}")
        return await self.open_on(connection, protocol)

    async def open_bulk_stream(self, peer: PeerKey, protocol: str) -> LaneStream:
        """Open a stream for `protocol` where it delays no control message: on a bulk connection of the peer. Raises
        `Unreachable`."""
        edge = self._edges.get(peer)
        if edge and not edge.live(Lane.BULK):
            with suppress(Unreachable):
                await self._bulk.add_if_needed(peer)
        connection = edge and (edge.pick(Lane.BULK) or next(iter(edge.connections), None))
        if not connection:
            raise Unreachable(f"not connected to {peer_id(peer)}")
        return await self.open_on(connection, protocol)

    def serve_protocol(self, protocol: str, handler: Callable[[PeerKey, Stream], Awaitable[None]]) -> None:
        """Call `handler(peer, stream)` for each stream of `protocol`, of strangers too. An error of it resets the
        stream. Call it before `serve`."""
        self._serves[protocol] = lambda connection, stream: handler(connection.peer, stream)

    async def open_on(self, connection: MuxedConnection, protocol: str) -> LaneStream:
        """As `PeerConnections`."""
        try:
            return await LaneStream.open(connection.yamux, protocol)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise Unreachable(f"{peer_id(connection.peer)}: {error}") from error

    async def _on_hop(self, connection: MuxedConnection, stream: YamuxStream) -> None:
        assert self.relay is not None
        async with stream:
            await self.relay.serve_hop(connection.peer, stream, connection.yamux.lift_allowance)

    async def upgrade_outbound(self, path: MigratingConnection, peer: PeerKey) -> MuxedConnection:
        """As `PathUpgrader`."""
        if self.host is None:
            raise Unreachable("not serving")
        swarm = self.host.get_network()
        assert isinstance(swarm, Swarm)
        return _muxed(await swarm.upgrade_outbound_raw_conn(RawConnection(path, True), self.id_of(peer)))

    async def serve_inbound(self, path: MigratingConnection, source: str) -> None:
        """As `PathUpgrader`."""
        tcp = self.tcp
        if tcp is None or tcp.handler is None or (arrival := await tcp.reception.wait_turn(source)) is None:
            await path.close()
            return
        with trio.CancelScope() as scope, guarded(Source.HANDSHAKE, source):
            path.on_closed = arrival.drop = scope.cancel
            self._arriving[path] = arrival
            try:
                await tcp.handler(path)
            finally:
                self._arriving.pop(path, None)
                tcp.reception.finish(arrival)
                await path.close()

    async def _on_stream(self, net_stream: INetStream) -> None:
        """A peer opened a stream: agree on a protocol, then run its handler."""
        muxed = getattr(net_stream, "muxed_stream", None)
        host = self.host
        if host is None or not isinstance(muxed, MuxedStream):
            return
        assert isinstance(muxed.muxed_conn, MuxedConnection)
        with guarded(Source.STREAM, muxed.muxed_conn.peer) as outcome:
            await self._serve_stream(host, net_stream, muxed, muxed.muxed_conn)
        if outcome.error is not None:
            _log.info("a stream ended peer=%s reason=%r", peer_id(muxed.muxed_conn.peer), outcome.why)
            if isinstance(outcome.error, NoneSpoken):  # a reset could overtake the answer, which says why
                with trio.move_on_after(NEGOTIATION_S):
                    await muxed.stream.aclose()
            else:
                muxed.stream.reset()

    async def _serve_stream(
        self, host: Host, net_stream: INetStream, muxed: MuxedStream, connection: MuxedConnection
    ) -> None:
        with trio.fail_after(NEGOTIATION_S):
            handlers = host.handlers
            protocol = await answer(StreamChannel(muxed.stream), [*LANE_OF, *self._serves, *handlers])
        if not self._gate.may_open(connection, protocol):
            # Normal: an honest peer that connects asks before its grant is here, and asks again later.
            _log.info("%s needs a grant peer=%s", protocol, peer_id(connection.peer))
            muxed.stream.reset()
            return
        if protocol in LANE_OF:
            self._accept_stream(muxed, LANE_OF[protocol])
        elif protocol in self._serves:
            await self._serves[protocol](connection, muxed.stream)
        else:
            net_stream.set_protocol(TProtocol(protocol))
            await _serve_by_library(handlers[protocol], net_stream)

    def _accept_stream(self, muxed: MuxedStream, lane: Lane) -> None:
        connection = muxed.muxed_conn
        assert isinstance(connection, MuxedConnection)
        if self._nursery is None or self._accept is None:
            return
        edge = self._edges.get(connection.peer)
        if edge:
            edge.note_use(connection, lane)
        self._nursery.start_soon(partial(attend, self, self._accept, connection.peer, lane, muxed.stream))


def _muxed(conn: object) -> MuxedConnection:
    """The connection under one that the library returned."""
    assert isinstance(conn, SwarmConn)
    assert isinstance(conn.muxed_conn, MuxedConnection)
    return conn.muxed_conn


async def _serve_by_library(handler: StreamHandlerFn, stream: INetStream) -> None:
    """Raises `PeerError` for any error of the library's handlers: they raise undocumented ones for invalid input."""
    try:
        await handler(stream)
    except Exception as error:
        raise PeerError(f"{stream.get_protocol()}: {type(error).__name__}: {error}") from error
