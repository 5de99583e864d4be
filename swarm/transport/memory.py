"""Peers that meet in one process: for tests, on trio's mock clock if they like.

A `MemoryNetwork` joins `MemoryTransport`s. Its links have a delay and a rate, can be cut, and a peer can be killed, or
shielded: then nobody can dial it, and it is reached through a relay or by what it dials itself. No threads, no sockets,
no randomness: the same program gives the same run. Buffers are bounded, so a reader that stops is felt by its writer,
as on a real network.
"""

import contextlib
import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from codec.sign import Key
from swarm.protocol.core.reach import circuit, is_circuit, relay_of
from swarm.transport.base import Accept, Lane, PathKind, PeerKey, Stream, Traffic, Transport, Unreachable, attend

__all__ = ["Link", "MemoryNetwork", "MemoryStream", "MemoryTransport"]

_SEGMENT_BYTES: Final = 65_536
"""A long write travels in segments of this size, so that streams which share a slow link take turns."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a path. `rate_bytes_s` is shared by all streams that use it."""

    delay_s: float = 0.0
    rate_bytes_s: float = math.inf
    buffer_bytes: int = 262_144
    """What one stream may have under way or unread before its writer waits; below rate x delay it caps the rate."""


_PLACE_EVERY_S: Final = 0.5
"""So often a peer looks whether it still has its places at relays."""


class MemoryNetwork:
    """The wires. All methods take effect at once and never block."""

    def __init__(self, default: Link | None = None) -> None:
        self._default = default or Link()
        self._links: dict[tuple[PeerKey, PeerKey], Link] = {}
        self._cut: set[frozenset[PeerKey]] = set()
        self._free_at_s: dict[tuple[PeerKey, PeerKey], float] = {}
        self._listening: dict[str, MemoryTransport] = {}
        self._streams: dict[frozenset[PeerKey], dict[MemoryStream, None]] = {}
        self._shielded: set[PeerKey] = set()
        self._circuits: set[frozenset[PeerKey]] = set()
        self._dialed: set[tuple[PeerKey, PeerKey]] = set()  # (who dialed, whom)
        self._next_address = 1
        self.topics: dict[str, dict[PeerKey, Callable[[PeerKey, bytes], None]]] = {}
        """Who gossips on what: called with the neighbour that sends and its bytes."""

    def link(self, a: PeerKey, b: PeerKey, link: Link) -> None:
        """Set the path between `a` and `b`, both ways, for streams opened from now on."""
        self._links[a, b] = self._links[b, a] = link

    def cut(self, a: PeerKey, b: PeerKey) -> None:
        """Break everything between `a` and `b`, and let neither reach the other until `heal`."""
        pair = frozenset((a, b))
        self._cut.add(pair)
        self._break(pair)

    def heal(self, a: PeerKey, b: PeerKey) -> None:
        self._cut.discard(frozenset((a, b)))

    def shield(self, peer: PeerKey) -> None:
        """From now on a firewall lets no new connection in to `peer`; those that it makes itself go out."""
        self._shielded.add(peer)

    def unshield(self, peer: PeerKey) -> None:
        self._shielded.discard(peer)

    def kill(self, peer: PeerKey) -> None:
        """`peer` is gone: its streams break at both ends and its addresses answer no more. Its tasks stay."""
        self._listening = {at: other for at, other in self._listening.items() if other.key != peer}
        for pair in [pair for pair in self._streams if peer in pair]:
            self._break(pair)

    def path(self, source: PeerKey, target: PeerKey) -> Link:
        return self._links.get((source, target), self._default)

    def arrival_s(self, source: PeerKey, target: PeerKey, length_bytes: int) -> float:
        """When bytes that are sent now get there; books the link for as long as they occupy it."""
        link = self.path(source, target)
        start_s = max(trio.current_time(), self._free_at_s.get((source, target), 0.0))
        free_at_s = self._free_at_s[source, target] = start_s + length_bytes / link.rate_bytes_s
        return free_at_s + link.delay_s

    def _break(self, pair: frozenset[PeerKey]) -> None:
        self._circuits.discard(pair)
        self._dialed = {(a, b) for a, b in self._dialed if {a, b} != pair}
        for stream in self._streams.pop(pair, {}):
            stream.break_()

    # What transports call.

    def new_address(self) -> str:
        address = f"/memory/{self._next_address}"
        self._next_address += 1
        return address

    def listen(self, address: str, transport: "MemoryTransport") -> None:
        self._listening[address] = transport

    def unlisten(self, transport: "MemoryTransport") -> None:
        self._listening = {at: other for at, other in self._listening.items() if other is not transport}

    def listening(self, address: str) -> "MemoryTransport | None":
        """Whoever listens there and can be dialed."""
        other = self._listening.get(address)
        return None if other is None or other.key in self._shielded else other

    def find(self, caller: PeerKey, peer: PeerKey, address: str) -> "MemoryTransport | None":
        """The transport at `address`, if it is `peer` and can be reached."""
        if is_circuit(address):
            relay = self._listening.get(relay_of(address)[0])
            there = relay and relay.key not in self._shielded and self.joined(relay.key, peer)
            keeps_place = (other := self.serving(peer)) and address in other.circuits()
            return other if there and keeps_place else None
        other = self._listening.get(address)
        if other is None or other.key != peer or peer in self._shielded or frozenset((caller, peer)) in self._cut:
            return None
        return other

    def serving(self, peer: PeerKey) -> "MemoryTransport | None":
        return next((other for other in self._listening.values() if other.key == peer), None)

    def joined(self, a: PeerKey, b: PeerKey) -> bool:
        return frozenset((a, b)) in self._streams

    def neighbours(self, peer: PeerKey) -> list[PeerKey]:
        return [other for pair in self._streams if peer in pair for other in pair if other != peer]

    def join(self, a: PeerKey, b: PeerKey, *, through_relay: bool = False) -> None:
        """`a` has dialed `b`."""
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

    def part(self, a: PeerKey, b: PeerKey) -> None:
        self._break(frozenset((a, b)))

    def stream_pair(self, near: "MemoryTransport", far: "MemoryTransport") -> tuple["MemoryStream", "MemoryStream"]:
        """A new stream between two joined transports: the near end and the far end."""
        out, back = _Pipe(self, near, far), _Pipe(self, far, near)
        ends = MemoryStream(out, back), MemoryStream(back, out)
        live = self._streams[frozenset((near.key, far.key))]
        for stale in [stream for stream in live if stream.over]:
            del live[stale]
        live.update(dict.fromkeys(ends))
        return ends


class _Pipe:
    """One direction of a stream: segments with the time at which they arrive."""

    def __init__(self, network: MemoryNetwork, source: "MemoryTransport", target: "MemoryTransport") -> None:
        self._network = network
        self._source = source
        self._target = target
        self._segments: deque[tuple[float, bytes]] = deque()  # (arrival time, bytes); b"" is the end of the stream
        self._held_bytes = 0
        self._limit_bytes = network.path(source.key, target.key).buffer_bytes
        self.moved = trio.lowlevel.ParkingLot()
        self.ended = False  # the writer has sent its end
        self.writer_closed = False
        self.reader_closed = False
        self.broken = False

    def wake(self) -> None:
        self.moved.unpark_all()

    def check_writable(self) -> None:
        if self.writer_closed or self.ended:
            raise trio.ClosedResourceError("this end is closed for sending")
        if self.broken or self.reader_closed:
            raise trio.BrokenResourceError("the other end is gone")

    async def wait_room(self) -> int:
        while True:
            self.check_writable()
            if self._held_bytes < self._limit_bytes:
                return self._limit_bytes - self._held_bytes
            await self.moved.park()

    async def put(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:
            room = await self.wait_room()
            segment = bytes(view[: min(room, _SEGMENT_BYTES)])
            view = view[len(segment) :]
            self._held_bytes += len(segment)
            self._source.count_sent(len(segment))
            self._append(segment)

    def end(self) -> None:
        if not self.ended and not self.broken:
            self.ended = True
            self._append(b"")

    def _append(self, segment: bytes) -> None:
        at_s = self._network.arrival_s(self._source.key, self._target.key, len(segment))
        self._segments.append((at_s, segment))
        self.wake()

    async def get(self, max_bytes: int | None) -> bytes:
        while True:
            if self.reader_closed:
                raise trio.ClosedResourceError("this end is closed")
            if self.broken:
                raise trio.BrokenResourceError("the other end is gone")
            if not self._segments:
                await self.moved.park()
                continue
            at_s, segment = self._segments[0]
            wait_s = at_s - trio.current_time()
            if wait_s > 0:
                with trio.move_on_after(wait_s):  # parked, not asleep: a broken pipe must wake its reader
                    await self.moved.park()
                continue
            if not segment:
                return b""  # and leave it there: every later read is the end, too
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
    def over(self) -> bool:
        """Nothing can move on it any more."""
        return self._out.broken or (self._out.writer_closed and self._back.writer_closed)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._begin_send()
        try:
            await trio.lowlevel.checkpoint()
            self._out.check_writable()
            await self._out.put(data)
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
            self._out.end()
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
            return await self._back.get(max_bytes)
        finally:
            self._receiving = False

    async def aclose(self) -> None:
        self._out.end()
        self._out.writer_closed = True
        self._back.reader_closed = True
        self._out.wake()
        self._back.wake()
        await trio.lowlevel.checkpoint()

    def break_(self) -> None:
        """Both directions fail from now on, and whatever was under way is lost."""
        for pipe in (self._out, self._back):
            pipe.broken = True
            pipe.wake()


class MemoryTransport(Transport):
    """A peer on a `MemoryNetwork`. Connecting takes one round trip; opening a stream none."""

    def __init__(self, network: MemoryNetwork, key: Key, via: Sequence[str] = ()) -> None:
        """`via`: addresses of relays at which it keeps a place, so that it can be dialed through them."""
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
                nursery.start_soon(self._keep_places)
                await trio.sleep_forever()
            finally:
                self._accept = self._nursery = None
                self.network.unlisten(self)
                for peer in self.peers():
                    self.network.part(self.key, peer)

    def circuits(self) -> list[str]:
        return [circuit(address) for address in self.via]

    async def _keep_places(self) -> None:
        """Stay connected to the relays, which is what a place there hangs on."""
        while True:
            for address in self.via:
                relay = self.network.listening(address)
                if relay is not None and not self.network.joined(self.key, relay.key):
                    with contextlib.suppress(Unreachable):
                        await self.connect(relay.key, [address])
            await trio.sleep(_PLACE_EVERY_S)

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
        far.take(self.key, lane, far_end)
        return near_end

    def take(self, peer: PeerKey, lane: Lane, stream: MemoryStream) -> None:
        """A stream that `peer` opened arrives."""
        assert self._nursery is not None
        assert self._accept is not None
        self._nursery.start_soon(partial(attend, self, self._accept, peer, lane, stream))

    async def disconnect(self, peer: PeerKey) -> None:
        self.network.part(self.key, peer)
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
