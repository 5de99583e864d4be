"""Transports that meet in one process: for tests, also on trio's mock clock.

A `MemoryNetwork` connects `MemoryTransport`s. Its links have a delay and a rate and can be cut. A peer can be killed,
or shielded: then it cannot be dialed, and is reached through a relay or by a connection that it dials itself. There are
no threads, no sockets and no randomness, so the same program gives the same run. Buffers are bounded, so a writer waits
for a reader that stops, as on a real network.
"""

import contextlib
import math
import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from codec.sign import Key
from swarm.protocol.core.reach import circuit, is_circuit, relay_of
from swarm.transport.base import Accept, Lane, PathKind, PeerKey, Stream, Traffic, Transport, Unreachable, attend

__all__ = ["Link", "MemoryNetwork", "MemoryStream", "MemoryTransport"]

_SEGMENT_BYTES: Final = 65_536
"""A long write is sent in segments of this size, so that streams on a slow link alternate."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a path. `rate_bytes_s` is shared by all streams that use it."""

    delay_s: float = 0.0
    rate_bytes_s: float = math.inf
    buffer_bytes: int = 262_144
    """Bytes of one stream that may be under way or unread before its writer waits; below rate x delay it limits the
    rate."""


_RESERVATION_EVERY_S: Final = 0.5
"""How often a peer checks its connections to the relays at which it keeps a reservation."""


class MemoryNetwork:
    """The network between memory transports. All methods take effect at once and never block."""

    def __init__(self, default: Link | None = None) -> None:
        self._default = default or Link()
        self._links: dict[tuple[PeerKey, PeerKey], Link] = {}
        self._cut: set[frozenset[PeerKey]] = set()
        self._free_at_s: dict[tuple[PeerKey, PeerKey], float] = {}
        self._listening: dict[str, MemoryTransport] = {}
        self._streams: dict[frozenset[PeerKey], dict[MemoryStream, None]] = {}
        self._leaving: dict[frozenset[PeerKey], list[MemoryStream]] = {}
        """Ends of the connection that a pair closed last, of which something may still arrive."""
        self._shielded: set[PeerKey] = set()
        self._circuits: set[frozenset[PeerKey]] = set()
        self._dialed: set[tuple[PeerKey, PeerKey]] = set()  # (dialer, dialed)
        self._next_address = 1

    def link(self, a: PeerKey, b: PeerKey, link: Link) -> None:
        """Set the link between `a` and `b`, in both directions, for streams opened from now on."""
        self._links[a, b] = self._links[b, a] = link

    def cut(self, a: PeerKey, b: PeerKey) -> None:
        """Break every stream between `a` and `b`. Until `heal` neither can reach the other."""
        pair = frozenset((a, b))
        self._cut.add(pair)
        self._break(pair)

    def heal(self, a: PeerKey, b: PeerKey) -> None:
        self._cut.discard(frozenset((a, b)))

    def shield(self, peer: PeerKey) -> None:
        """Put `peer` behind a firewall: others cannot dial it any more, but it can dial them."""
        self._shielded.add(peer)

    def kill(self, peer: PeerKey) -> None:
        """Break the streams of `peer` at both ends and stop answering at its addresses. Its tasks go on."""
        self._listening = {at: other for at, other in self._listening.items() if other.key != peer}
        for pair in [pair for pair in self._streams if peer in pair]:
            self._break(pair)

    def path(self, source: PeerKey, target: PeerKey) -> Link:
        return self._links.get((source, target), self._default)

    def arrival_s(self, source: PeerKey, target: PeerKey, length_bytes: int) -> float:
        """When bytes that are sent now arrive. Occupies the link for the time that they take."""
        link = self.path(source, target)
        start_s = max(trio.current_time(), self._free_at_s.get((source, target), 0.0))
        free_at_s = self._free_at_s[source, target] = start_s + length_bytes / link.rate_bytes_s
        return free_at_s + link.delay_s

    def _break(self, pair: frozenset[PeerKey]) -> None:
        for stream in (*self._forget(pair), *self._leaving.pop(pair, ())):
            stream.break_()

    def _forget(self, pair: frozenset[PeerKey]) -> "dict[MemoryStream, None]":
        """Forget a connection; its streams."""
        self._circuits.discard(pair)
        self._dialed = {(a, b) for a, b in self._dialed if {a, b} != pair}
        return self._streams.pop(pair, {})

    # Called by transports.

    def new_address(self) -> str:
        address = f"/memory/{self._next_address}"
        self._next_address += 1
        return address

    def listen(self, address: str, transport: "MemoryTransport") -> None:
        self._listening[address] = transport

    def unlisten(self, transport: "MemoryTransport") -> None:
        self._listening = {at: other for at, other in self._listening.items() if other is not transport}

    def listening(self, address: str) -> "MemoryTransport | None":
        """The transport that listens at `address` and can be dialed there."""
        other = self._listening.get(address)
        return None if other is None or other.key in self._shielded else other

    def find(self, caller: PeerKey, peer: PeerKey, address: str) -> "MemoryTransport | None":
        """The transport of `peer`, if `caller` can reach it at `address`."""
        if is_circuit(address):
            relay = self._listening.get(relay_of(address)[0])
            is_connected = relay and relay.key not in self._shielded and self.joined(relay.key, peer)
            has_reservation = (other := self.serving(peer)) and address in other.circuits()
            return other if is_connected and has_reservation else None
        other = self._listening.get(address)
        if other is None or other.key != peer or peer in self._shielded or frozenset((caller, peer)) in self._cut:
            return None
        return other

    def serving(self, peer: PeerKey) -> "MemoryTransport | None":
        """The transport of `peer`, if it serves."""
        return next((other for other in self._listening.values() if other.key == peer), None)

    def joined(self, a: PeerKey, b: PeerKey) -> bool:
        """Whether `a` and `b` are connected."""
        return frozenset((a, b)) in self._streams

    def neighbours(self, peer: PeerKey) -> list[PeerKey]:
        """The peers that `peer` is connected to."""
        return [other for pair in self._streams if peer in pair for other in pair if other != peer]

    def join(self, a: PeerKey, b: PeerKey, *, through_relay: bool = False) -> None:
        """Connect `a` to `b`, which it dialed."""
        pair = frozenset((a, b))
        self._streams.setdefault(pair, {})
        self._dialed.add((a, b))
        (self._circuits.add if through_relay else self._circuits.discard)(pair)

    def path_kind(self, a: PeerKey, b: PeerKey) -> PathKind | None:
        """How `a` reaches `b`."""
        pair = frozenset((a, b))
        if pair not in self._streams:
            return None
        if pair in self._circuits:
            return PathKind.CIRCUIT
        return PathKind.DIALED if (a, b) in self._dialed else PathKind.ACCEPTED

    def disconnect(self, a: PeerKey, b: PeerKey) -> None:
        """End the connection between `a` and `b`. What is on its way is lost."""
        self._break(frozenset((a, b)))

    def close(self, closer: PeerKey, other: PeerKey) -> None:
        """`closer` ends the connection as TCP does: what it has sent still arrives at `other`, and then the streams
        are broken there. What `other` has sent, or sends until then, is lost."""
        pair = frozenset((closer, other))
        self._leaving[pair] = [stream for stream in self._forget(pair) if stream.owner == closer]
        for stream in self._leaving[pair]:
            stream.leave()

    def stream_pair(self, near: "MemoryTransport", far: "MemoryTransport") -> tuple["MemoryStream", "MemoryStream"]:
        """Open a stream between two connected transports: the near end and the far end."""
        out, back = _Pipe(self, near, far), _Pipe(self, far, near)
        ends = MemoryStream(out, back), MemoryStream(back, out)
        live = self._streams[frozenset((near.key, far.key))]
        for stale in [stream for stream in live if stream.is_done]:
            del live[stale]
        live.update(dict.fromkeys(ends))
        return ends


class _Pipe:
    """One direction of a stream: segments with their arrival times."""

    def __init__(self, network: MemoryNetwork, source: "MemoryTransport", target: "MemoryTransport") -> None:
        self._network = network
        self._source = source
        self._target = target
        self._segments: deque[tuple[float, bytes | None]] = deque()
        """(arrival time, bytes); b"" is the end of the stream, None of its connection."""
        self._held_bytes = 0  # under way or unread
        self._limit_bytes = network.path(source.key, target.key).buffer_bytes
        self.changed = trio.lowlevel.ParkingLot()
        self.ended = False  # the end of the stream was sent
        self.writer_closed = False
        self.reader_closed = False
        self.broken = False
        self.writer_left = False  # the connection was closed in order by the end that writes
        self.writer_knows_s = math.inf  # the end that reads closed it: when the end that writes learns of it

    @property
    def source(self) -> PeerKey:
        """The peer that writes."""
        return self._source.key

    def wake(self) -> None:
        self.changed.unpark_all()

    def check_writable(self) -> None:
        if self.writer_closed or self.ended:
            raise trio.ClosedResourceError("this end is closed for sending")
        if self.broken or self.reader_closed or self.writer_left or self.writer_knows_s <= trio.current_time():
            raise trio.BrokenResourceError("the other end is gone")

    async def wait_room(self) -> int:
        """Wait until the buffer has room. Returns how many bytes it takes."""
        while True:
            self.check_writable()
            if self._held_bytes < self._limit_bytes:
                return self._limit_bytes - self._held_bytes
            await self.changed.park()

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:
            room = await self.wait_room()
            segment = bytes(view[: min(room, _SEGMENT_BYTES)])
            view = view[len(segment) :]
            self._held_bytes += len(segment)
            self._source.count_sent(len(segment))
            self._append(segment)

    def send_end(self) -> None:
        if not self.ended and not self.broken:
            self.ended = True
            self._append(b"")

    def _append(self, segment: bytes) -> None:
        at_s = self._network.arrival_s(self._source.key, self._target.key, len(segment))
        if self.reader_left:
            self._held_bytes -= len(segment)
        else:
            self._segments.append((at_s, segment))
        self.wake()

    @property
    def reader_left(self) -> bool:
        """The end that reads has closed the connection in order."""
        return self.writer_knows_s < math.inf

    def close_by_writer(self) -> float:
        """The end that writes closes the connection in order. Returns when the other end learns of it."""
        self.writer_left = True
        at_s = self._network.arrival_s(self._source.key, self._target.key, 0)
        self._segments.append((at_s, None))
        self.wake()
        return at_s

    def close_by_reader(self, writer_knows_s: float) -> None:
        """The end that reads closes the connection in order; what was on its way is lost."""
        self.writer_knows_s = writer_knows_s
        self._segments.clear()
        self._held_bytes = 0
        self.wake()

    async def receive(self, max_bytes: int | None) -> bytes:
        while True:
            if self.reader_closed:
                raise trio.ClosedResourceError("this end is closed")
            if self.broken or self.reader_left:
                raise trio.BrokenResourceError("the other end is gone")
            if not self._segments:
                await self.changed.park()
                continue
            at_s, segment = self._segments[0]
            wait_s = at_s - trio.current_time()
            if wait_s > 0:
                with trio.move_on_after(wait_s):  # parks instead of sleeping, since a broken pipe must wake its reader
                    await self.changed.park()
                continue
            if segment is None:
                raise trio.BrokenResourceError("the other end has closed the connection")
            if not segment:
                return b""  # leave the end in the queue, so that every later read returns it, too
            self._segments.popleft()
            if max_bytes is not None and len(segment) > max_bytes:
                self._segments.appendleft((at_s, segment[max_bytes:]))
                segment = segment[:max_bytes]
            self._held_bytes -= len(segment)
            self._target.count_received(len(segment))
            self.wake()
            return segment


class MemoryStream(Stream):
    """One end of a stream between two memory transports."""

    def __init__(self, out: _Pipe, back: _Pipe) -> None:
        self._out = out
        self._back = back
        self._sending = False
        self._receiving = False

    @property
    def owner(self) -> PeerKey:
        """The peer whose end it is."""
        return self._out.source

    def leave(self) -> None:
        """The owner closes the connection in order: what it has sent still arrives."""
        self._back.close_by_reader(self._out.close_by_writer())

    @property
    def is_done(self) -> bool:
        """Whether it can carry nothing any more."""
        return self._out.broken or (self._out.writer_closed and self._back.writer_closed)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._begin_send()
        try:
            await trio.lowlevel.checkpoint()
            self._out.check_writable()
            await self._out.send(data)
        finally:
            self._sending = False

    async def wait_send_all_might_not_block(self) -> None:
        self._begin_send()
        try:
            await trio.lowlevel.checkpoint()
            await self._out.wait_room()
        finally:
            self._sending = False

    async def send_eof(self) -> None:
        self._begin_send()
        try:
            await trio.lowlevel.checkpoint()
            if self._out.writer_closed:
                raise trio.ClosedResourceError("this end is closed")
            self._out.send_end()
        finally:
            self._sending = False

    def _begin_send(self) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError("max_bytes must be at least 1")
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint()
            return await self._back.receive(max_bytes)
        finally:
            self._receiving = False

    async def aclose(self) -> None:
        self._out.send_end()
        self._out.writer_closed = True
        self._back.reader_closed = True
        self._out.wake()
        self._back.wake()
        await trio.lowlevel.checkpoint()

    def break_(self) -> None:
        """Make both directions fail from now on; bytes under way are lost."""
        for pipe in (self._out, self._back):
            pipe.broken = True
            pipe.wake()


class MemoryTransport(Transport):
    """A peer on a `MemoryNetwork`. Connecting takes one round trip; opening a stream takes none."""

    def __init__(self, network: MemoryNetwork, key: Key, via: Sequence[str] = ()) -> None:
        """`via`: addresses of relays at which it keeps a reservation, so that it can be dialed through them."""
        self.via = tuple(via)
        self.key = key.public
        self.traffic = Traffic()
        self.network = network
        self.address = network.new_address()
        self._accept: Accept | None = None
        self._nursery: trio.Nursery | None = None

    async def serve(
        self, accept: Accept, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        async with trio.open_nursery() as nursery:
            self._accept, self._nursery = accept, nursery
            self.network.listen(self.address, self)
            try:
                task_status.started([self.address, *self.circuits()])
                nursery.start_soon(self._keep_reservations)
                await trio.sleep_forever()
            finally:
                self._accept = self._nursery = None
                self.network.unlisten(self)
                for peer in self.peers():
                    self.network.disconnect(self.key, peer)

    def circuits(self) -> list[str]:
        """Its addresses through relays."""
        return [circuit(address) for address in self.via]

    async def _keep_reservations(self) -> None:
        """Stay connected to the relays: a reservation lasts as long as the connection."""
        while True:
            for address in self.via:
                relay = self.network.listening(address)
                if relay is not None and not self.network.joined(self.key, relay.key):
                    with contextlib.suppress(Unreachable):
                        await self.connect(relay.key, [address])
            await trio.sleep(_RESERVATION_EVERY_S)

    async def connect(self, peer: PeerKey, addrs: Sequence[str]) -> None:
        await trio.lowlevel.checkpoint()
        if self.network.joined(self.key, peer):
            return
        await self._round_trip(peer)
        for address in sorted(addrs, key=is_circuit):
            if self.network.find(self.key, peer, address):
                self.network.join(self.key, peer, through_relay=is_circuit(address))
                return
        raise Unreachable(f"{peer.hex()[:8]} does not answer at {', '.join(addrs) or 'no address'}")

    async def _round_trip(self, peer: PeerKey) -> None:
        await trio.sleep(self.network.path(self.key, peer).delay_s + self.network.path(peer, self.key).delay_s)

    async def probe(self, peer: PeerKey, address: str) -> bool:
        await self._round_trip(peer)
        found = self.network.find(self.key, peer, address) is not None
        if found and self.path_kind(peer) is PathKind.CIRCUIT and not is_circuit(address):
            self.network.join(self.key, peer)
        return found

    def path_kind(self, peer: PeerKey) -> PathKind | None:
        return self.network.path_kind(self.key, peer)

    async def open_stream(self, peer: PeerKey, lane: Lane) -> MemoryStream:
        await trio.lowlevel.checkpoint()
        if not self.network.joined(self.key, peer):
            raise Unreachable(f"not connected to {peer.hex()[:8]}")
        far = self.network.serving(peer)
        if far is None:
            raise Unreachable(f"{peer.hex()[:8]} does not answer")
        near_end, far_end = self.network.stream_pair(self, far)
        far.serve_stream(self.key, lane, far_end)
        return near_end

    def serve_stream(self, peer: PeerKey, lane: Lane, stream: MemoryStream) -> None:
        """Accept a stream that `peer` opened."""
        assert self._nursery is not None
        assert self._accept is not None
        self._nursery.start_soon(partial(attend, self, self._accept, peer, lane, stream))

    async def disconnect(self, peer: PeerKey) -> None:
        self.network.disconnect(self.key, peer)
        await trio.lowlevel.checkpoint()

    def remote_address(self, peer: PeerKey) -> str | None:
        if not self.network.joined(self.key, peer):
            return None
        far = self.network.serving(peer)
        return far.address if far else None

    def peers(self) -> list[PeerKey]:
        return self.network.neighbours(self.key)

    def count_sent(self, length: int) -> None:
        self.traffic.sent += length

    def count_received(self, length: int) -> None:
        self.traffic.received += length
