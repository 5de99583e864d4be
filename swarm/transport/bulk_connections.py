"""Makes further bulk connections to a peer, up to the number that its path needs (`parallel`)."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

from swarm.transport.base import Lane, PathKind, PeerKey, Unreachable
from swarm.transport.connection.muxer import MuxedConnection
from swarm.transport.host import NEGOTIATION_S
from swarm.transport.lanes import TARGET_CONNECTIONS_ID, Edge, LaneStream
from swarm.transport.parallel import CONNECTION_COUNTS, socket_window_bytes, target_connections
from swarm.transport.tuning import BBR
from swarm.transport.yamux import YamuxStream

__all__ = ["BulkConnections"]


class BulkConnections:
    """One for a transport. Only the end that knows an address dials; the other end asks it to."""

    def __init__(
        self,
        edges: Mapping[PeerKey, Edge],
        addresses: Mapping[PeerKey, Sequence[str]],
        dial: Callable[[PeerKey, Sequence[str]], Awaitable[object]],
        open_on: Callable[[MuxedConnection, str], Awaitable[LaneStream]],
        *,
        up_mbit: float,
        ask_s: float,
    ) -> None:
        """`edges`, `addresses`: the transport's, by peer. `dial`: makes one bulk connection; raises `Unreachable`.
        `up_mbit`: our uplink in Mbit/s. `ask_s`: how long the peer may take to dial when we ask it."""
        self._edges = edges
        self._addresses = addresses
        self._dial = dial
        self._open_on = open_on
        self._up_mbit = up_mbit
        self._ask_s = ask_s
        self._window_bytes = socket_window_bytes()

    def target(self, peer: PeerKey) -> int:
        """As `Transport.target_connections`."""
        edge = self._edges.get(peer)
        if edge is None or edge.path_kind in (PathKind.CIRCUIT, PathKind.PUNCHED):
            return 1  # each further connection would cost the relay a circuit
        by_bandwidth = edge.congestion_control == BBR.decode()
        return target_connections(edge.round_trip_s, self._window_bytes, self._up_mbit, by_bandwidth)

    async def add_if_needed(self, peer: PeerKey) -> None:
        """Make a bulk connection if none is free and there are fewer than the target. Raises `Unreachable`."""
        edge = self._edges[peer]
        bulk = edge.live(Lane.BULK)
        if any(not each.yamux.stream_count for each in bulk) or len(bulk) + edge.dialing >= self.target(peer):
            return
        edge.dialing += 1
        try:
            if self._addresses.get(peer):
                await self._dial(peer, self._addresses[peer])
            else:
                await self._ask_peer(peer, len(bulk) + edge.dialing)
        finally:
            edge.dialing -= 1

    async def _ask_peer(self, peer: PeerKey, count: int) -> None:
        """Ask the peer, which dialed us, to dial again until there are `count` bulk connections. Raises
        `Unreachable`."""
        connection = self._edges[peer].pick(Lane.CONTROL)
        if connection is None:
            return
        try:
            with trio.fail_after(self._ask_s):
                async with await self._open_on(connection, TARGET_CONNECTIONS_ID) as stream:
                    await stream.send_all(bytes([count]))
                    await stream.receive_some(1)
        except (trio.BrokenResourceError, trio.TooSlowError) as error:
            raise Unreachable(f"the peer makes no more connections: {error}") from error

    async def serve_request(self, connection: MuxedConnection, stream: YamuxStream) -> None:
        """The other end of `_ask_peer`: dial until there are as many bulk connections as the peer wants."""
        peer = connection.peer
        async with stream:
            with trio.fail_after(NEGOTIATION_S):
                asked = await stream.receive_some(1)
            wanted = min(asked[0], CONNECTION_COUNTS[-1]) if asked else 0
            for _ in range(wanted):  # at most this many dials: the peer may close each connection at once
                edge, addresses = self._edges.get(peer), self._addresses.get(peer)
                if not edge or not addresses:  # we never dialed it, or its last connection ended meanwhile
                    return
                if len(edge.live(Lane.BULK)) + edge.dialing >= wanted:
                    break
                edge.dialing += 1
                try:
                    await self._dial(peer, addresses)
                finally:
                    edge.dialing -= 1
            if edge := self._edges.get(peer):
                await stream.send_all(bytes([len(edge.live(Lane.BULK))]))
