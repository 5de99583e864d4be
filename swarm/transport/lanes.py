"""The two lanes: their protocol ids, their streams, and which connections of a peer they use."""

import math
from typing import Final

import trio

from swarm.transport.base import Lane, PathKind, Stream
from swarm.transport.connection.multistream import HEADER, encode
from swarm.transport.connection.muxer import MuxedConnection
from swarm.transport.yamux import Connection, YamuxStream

__all__ = ["LANE_OF", "PROTOCOL_OF", "TARGET_CONNECTIONS_ID", "Edge", "LaneStream", "StreamChannel"]

PROTOCOL_OF: Final = {Lane.CONTROL: "/swarm-node/control/1", Lane.BULK: "/swarm-node/bulk/1"}
LANE_OF: Final = {protocol: lane for lane, protocol in PROTOCOL_OF.items()}
TARGET_CONNECTIONS_ID: Final = "/swarm-node/ways/1"
"""Asks the end that dialed to have so many bulk connections (one byte); it answers how many there are (one byte)."""


class StreamChannel:
    """A stream as a `multistream.Channel`."""

    def __init__(self, stream: YamuxStream) -> None:
        self._stream = stream

    async def read(self, n: int | None = None, /) -> bytes:
        return await self._stream.receive_some(n)

    async def write(self, data: bytes, /) -> None:
        await self._stream.send_all(data)


class LaneStream(Stream):
    """The opener's end of a stream. It does not wait for the other end to agree: there is one answer that it expects,
    and that comes before the first bytes that are read. Anything else breaks the stream."""

    def __init__(self, stream: YamuxStream, protocol: str) -> None:
        self._stream = stream
        self._protocol = protocol
        self._expected = encode(HEADER, protocol)  # what is left of the answer

    @classmethod
    async def open(cls, connection: Connection, protocol: str) -> "LaneStream":
        """Raises `Unreachable` or `trio.BrokenResourceError`."""
        stream = await connection.open()
        try:
            await stream.send_all(encode(HEADER, protocol))
        except BaseException:
            stream.reset()
            raise
        return cls(stream, protocol)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self.receive_at_least(1, max_bytes)

    async def receive_at_least(self, least: int, max_bytes: int | None = None) -> bytes:
        while self._expected:
            got = await self._stream.receive_some(len(self._expected))
            if not got or not self._expected.startswith(got):
                self._stream.reset(f"the peer does not speak {self._protocol}")
                raise trio.BrokenResourceError(f"the peer does not speak {self._protocol}")
            self._expected = self._expected[len(got) :]
        return await self._stream.receive_at_least(least, max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    def send_now(self, data: bytes | bytearray | memoryview) -> bool:
        return self._stream.send_now(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class Edge:
    """Our connections to one peer, and what each is for.

    The dialer knows why it dialed. At the other end the first connection is taken for the control lane and the rest for
    bulk, until a stream says otherwise.
    """

    def __init__(self) -> None:
        self._lanes: dict[MuxedConnection, Lane] = {}
        self.dialing = 0
        """Bulk connections that are being made."""
        self.ended = trio.Event()
        """Set when the last connection has gone."""

    def add(self, connection: MuxedConnection) -> None:
        lane = connection.dialed_for
        if lane is None:
            lane = Lane.BULK if self.live(Lane.CONTROL) else Lane.CONTROL
        self._lanes[connection] = lane

    def remove(self, connection: MuxedConnection) -> None:
        self._lanes.pop(connection, None)

    def used_for(self, connection: MuxedConnection, lane: Lane) -> None:
        """The peer opened a stream of `lane` on it. Control wins: never put bulk on what the peer uses for control."""
        if lane is Lane.CONTROL and connection in self._lanes:
            self._lanes[connection] = lane

    def pick(self, lane: Lane) -> MuxedConnection | None:
        """The connection for a new stream of `lane`: the one with the fewest streams."""
        return min(self.live(lane), key=lambda connection: connection.yamux.stream_count, default=None)

    def live(self, lane: Lane) -> list[MuxedConnection]:
        return [connection for connection in self.connections if self._lanes[connection] is lane]

    @property
    def connections(self) -> list[MuxedConnection]:
        """Those that live."""
        return [connection for connection in self._lanes if not connection.is_closed]

    @property
    def path_kind(self) -> PathKind | None:
        """The best of those that live: who would go through a relay as long as there is anything else?"""
        target_connections = {connection.path_kind for connection in self.connections}
        return next((path_kind for path_kind in PathKind if path_kind in target_connections), None)

    @property
    def round_trip_s(self) -> float:
        """The shortest ever, of any connection that lives; 0 while it is not known."""
        shortest_s = min((each.yamux.path_kind_s for each in self.connections), default=math.inf)
        return 0.0 if math.isinf(shortest_s) else shortest_s

    def idle(self, now_s: float, idle_s: float) -> list[MuxedConnection]:
        """Bulk connections that we dialed and nobody has used for `idle_s`, but for one that stays."""
        unused = [
            each
            for each in self.live(Lane.BULK)
            if each.is_initiator and not each.yamux.stream_count and now_s - each.yamux.used_at_s > idle_s
        ]
        return unused[1:] if len(unused) == len(self.live(Lane.BULK)) else unused
