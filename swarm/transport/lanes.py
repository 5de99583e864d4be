"""The two lanes: their protocol ids, their streams, and which connections to a peer they use."""

import math
from typing import Final

import trio

from swarm.transport.base import Lane, OtherProtocol, PathKind, Stream
from swarm.transport.connection.multistream import HEADER, encode
from swarm.transport.connection.muxer import MuxedConnection
from swarm.transport.yamux import Connection, YamuxStream

__all__ = ["LANE_OF", "PROTOCOL_OF", "TARGET_CONNECTIONS_ID", "Edge", "LaneStream", "StreamChannel"]

PROTOCOL_OF: Final = {Lane.CONTROL: "/swarm-node/control/1", Lane.BULK: "/swarm-node/bulk/1"}
LANE_OF: Final = {protocol: lane for lane, protocol in PROTOCOL_OF.items()}
TARGET_CONNECTIONS_ID: Final = "/swarm-node/ways/1"
"""The end that was dialed asks the other for a number of bulk connections (one byte); the other end dials, and answers
how many there are (one byte). The id has an older name of them."""


class StreamChannel:
    """A stream as a `multistream.Channel`."""

    def __init__(self, stream: YamuxStream) -> None:
        self._stream = stream

    async def read(self, n: int | None = None, /) -> bytes:
        return await self._stream.receive_some(n)

    async def write(self, data: bytes, /) -> None:
        await self._stream.send_all(data)


class LaneStream(Stream):
    """The opener's end of a stream. It sends without waiting for the other end to agree on the protocol. The first read
    checks the answer; any other than the expected one breaks the stream."""

    def __init__(self, stream: YamuxStream, protocol: str) -> None:
        self._stream = stream
        self._protocol = protocol
        self._expected = encode(HEADER, protocol)  # the part of the answer that has not come yet

    @classmethod
    async def open(cls, connection: Connection, protocol: str) -> "LaneStream":
        """Open a stream for `protocol`. Raises `Unreachable` or `trio.BrokenResourceError`."""
        stream = await connection.open()
        try:
            await stream.send_all(encode(HEADER, protocol))
        except BaseException:
            stream.reset()
            raise
        return cls(stream, protocol)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await self._check_answer()
        return await self._stream.receive_some(max_bytes)

    async def receive_at_least(self, least: int, max_bytes: int | None = None) -> bytes:
        await self._check_answer()
        return await self._stream.receive_at_least(least, max_bytes)

    async def receive_exactly(self, size: int, first: bytes = b"") -> bytes | memoryview:
        await self._check_answer()
        return await self._stream.receive_exactly(size, first)

    async def _check_answer(self) -> None:
        while self._expected:
            got = await self._stream.receive_some(len(self._expected))
            if not got or not self._expected.startswith(got):
                self._stream.reset(f"the peer does not speak {self._protocol}")
                raise OtherProtocol(self._protocol)
            self._expected = self._expected[len(got) :]

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    def send_now(self, *parts: bytes | bytearray | memoryview) -> bool:
        return self._stream.send_now(*parts)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class Edge:
    """Our connections to one peer, and the lane that each is for.

    The dialer knows the lane that it dialed for. The other end takes the first connection for the control lane and the
    rest for bulk, until a stream shows otherwise.
    """

    def __init__(self) -> None:
        self._lanes: dict[MuxedConnection, Lane] = {}
        self.dialing = 0
        """Bulk connections that are being made; counted by the task that makes them."""
        self.ended = trio.Event()
        """Set when the last connection has ended."""

    def add_connection(self, connection: MuxedConnection) -> None:
        lane = connection.dialed_for
        if lane is None:
            lane = Lane.BULK if self.live(Lane.CONTROL) else Lane.CONTROL
        self._lanes[connection] = lane

    def remove_connection(self, connection: MuxedConnection) -> None:
        """Sets `ended` if it was the last one."""
        self._lanes.pop(connection, None)
        if not self.connections:
            self.ended.set()

    def note_use(self, connection: MuxedConnection, lane: Lane) -> None:
        """The peer opened a stream of `lane` on the connection. If that is the control lane, we open no bulk on it."""
        if lane is Lane.CONTROL and connection in self._lanes:
            self._lanes[connection] = lane

    def pick(self, lane: Lane) -> MuxedConnection | None:
        """The connection for a new stream of `lane`: the one with the fewest streams."""
        return min(self.live(lane), key=lambda connection: connection.yamux.stream_count, default=None)

    def live(self, lane: Lane) -> list[MuxedConnection]:
        """The live connections of a lane."""
        return [connection for connection in self.connections if self._lanes[connection] is lane]

    @property
    def connections(self) -> list[MuxedConnection]:
        """The live connections."""
        return [connection for connection in self._lanes if not connection.is_closed]

    @property
    def path_kind(self) -> PathKind | None:
        """The best path of the live connections, in the order of `PathKind`: a circuit only if there is no other."""
        path_kinds = {connection.path_kind for connection in self.connections}
        return next((path_kind for path_kind in PathKind if path_kind in path_kinds), None)

    @property
    def congestion_control(self) -> str:
        """The congestion control of a live connection ("bbr", "cubic"), or "" when it is not known."""
        return next((connection.congestion_control for connection in self.connections), "")

    @property
    def round_trip_s(self) -> float:
        """The shortest round trip that a live connection has measured, in seconds; 0 while it is not known."""
        shortest_s = min((each.yamux.shortest_round_trip_s for each in self.connections), default=math.inf)
        return 0.0 if math.isinf(shortest_s) else shortest_s

    def idle(self, now_s: float, idle_s: float) -> list[MuxedConnection]:
        """The bulk connections that we dialed and that were unused for `idle_s`; one bulk connection always stays."""
        unused = [
            each
            for each in self.live(Lane.BULK)
            if each.is_initiator and not each.yamux.stream_count and now_s - each.yamux.used_at_s > idle_s
        ]
        return unused[1:] if len(unused) == len(self.live(Lane.BULK)) else unused
