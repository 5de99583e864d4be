"""One yamux connection: many streams over one secured connection.

It runs three tasks. The reader passes frames to streams; it never waits for a stream's reader, since windows bound what
can arrive. The writer sends whole frames from a queue, so that a cancelled sender cannot leave half a frame behind; if
the writer itself is cancelled, the connection is ending. The watcher sends pings: if nothing is heard within
`YamuxLimits.silence_s` of a ping, the peer is gone, and every stream breaks.

A peer that breaks a rule (window, length, id, flags) ends the connection, and `reason` says which. Data that merely
comes late, for a stream that we reset or never knew, is answered with RST. The work that a peer causes is charged to
its `PeerBudget`. While the budget is in debt we do not read, so that TCP holds the peer back.
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from codec.errors import PeerError
from swarm.guard import Source, guarded
from swarm.transport.base import Unreachable
from swarm.transport.yamux.cost import Cost, PeerBudget
from swarm.transport.yamux.frames import (
    ACK,
    FIN,
    GO_AWAY_NORMAL,
    INITIAL_WINDOW_BYTES,
    RST,
    SYN,
    FrameParser,
    Head,
    Kind,
    encode_head,
)
from swarm.transport.yamux.limits import YamuxLimits
from swarm.transport.yamux.link import ByteLink, Closer
from swarm.transport.yamux.stream import YamuxStream
from swarm.transport.yamux.watch import Watch
from swarm.transport.yamux.window import ReceiveWindow

__all__ = ["Connection"]

_WRITE_BYTES: Final = 266_240
"""Payload of one write at most, unless one frame has more: a piece of 256 KiB with its frame head. Enough to make the
system call cheap, little enough that a ping is not delayed long."""
_PAUSE_S: Final = 1.0
"""The longest time that we do not read a peer in debt. One turn's work (`Cost.TURN`) is paid off sooner, also at a
stranger's rate. So the peer's pings are answered, and its silence is noticed."""
_MAX_STREAM_ID: Final = 2**32 - 1


class Connection:
    """One end of a yamux session. It is live while `run` runs; any task may call the other methods."""

    def __init__(
        self,
        link: ByteLink,
        *,
        client: bool,
        limits: YamuxLimits | None = None,
        budget: PeerBudget | None = None,
        who: bytes = b"",
    ) -> None:
        """`client`: we dialed, so our stream ids are odd. `budget`: shared by the peer's connections; None: a new one.
        `who`: the peer, for the log."""
        self.limits = limits or YamuxLimits()
        self.budget = budget or PeerBudget(self.limits)
        self._who = who
        self.reason = ""
        """Why the connection ended; empty while it lives."""
        self.round_trip_s = 0.0
        """Smoothed, from pings; 0 until the first answer."""
        self.shortest_round_trip_s = math.inf
        """The shortest measurement: the path's distance, without queues and busy processors. Infinite until the first
        answer."""
        self.used_at_s = trio.current_time()
        """When a stream was last opened or ended."""
        self._link = link
        self._parser = FrameParser(self.limits.max_frame_bytes)
        self._cost = 0  # units that are not charged to the budget yet
        self._allowance_bytes = self.limits.allowance_bytes
        self._streams: dict[int, YamuxStream] = {}
        self._next_id = 1 if client else 2
        self._accepted: deque[YamuxStream] = deque()
        self._accepting = trio.lowlevel.ParkingLot()
        self._going_away = False
        # The data frame whose payload is arriving.
        self._target: YamuxStream | None = None
        self._target_head = Head(Kind.DATA, 0, 0, 0)
        # Frames to be written.
        self._control: deque[bytes] = deque()
        self._data: deque[tuple[bytes, int, tuple[memoryview, ...]]] = deque()  # header, bytes of payload, its parts
        self._queued_bytes = 0
        self._frames_queued = 0
        self._frames_written = 0
        self._leaving = 0, 0  # frames, bytes of their payload
        self._is_writing = False
        self._writer = trio.lowlevel.ParkingLot()
        self.room = trio.lowlevel.ParkingLot()
        self._watch = Watch(self.budget, trio.current_time())
        self._ping = (0, 0.0)  # value, when sent
        self._scope = trio.CancelScope()

    @property
    def closed(self) -> bool:
        return bool(self.reason)

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    @property
    def unread_bytes(self) -> int:
        """The most unread data that the peer can make us hold now: all receive windows together."""
        return sum(stream.receive_window.size for stream in self._streams.values())

    async def run(self) -> None:
        """Run the connection until it ends or is cancelled. Raises nothing that a peer or the network can cause."""
        self.budget.connections += 1
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    for loop in (self._read_loop, self._write_loop, self._watch_loop):
                        nursery.start_soon(self._guard, loop)
        finally:
            self._end("the connection was closed")
            self.budget.connections -= 1
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(Closer(self._link))

    async def open(self) -> YamuxStream:
        """Open a stream, without a round trip. Raises `Unreachable` if the connection ends or has too many streams."""
        await trio.lowlevel.checkpoint()
        if self.closed or self._going_away:
            raise Unreachable(self.reason or "the peer is going away")
        if self._own_streams() >= self.limits.max_outbound_streams or self._next_id > _MAX_STREAM_ID:
            raise Unreachable(f"{self.limits.max_outbound_streams} streams are open on this connection already")
        stream = self._add_stream(self._next_id)
        self._next_id += 2
        self._queue_control(Kind.WINDOW, SYN, stream.stream_id, stream.receive_window.first_increment)
        return stream

    async def accept(self) -> YamuxStream:
        """Wait for the next stream that the peer opens. Raises `Unreachable` when the connection has ended."""
        await trio.lowlevel.checkpoint()
        while not self._accepted:
            if self.closed:
                raise Unreachable(self.reason)
            await self._accepting.park()
        return self._accepted.popleft()

    async def aclose(self) -> None:
        """End the connection. Tries for 0.1 s to send what is queued and a GO_AWAY."""
        if not self.closed:
            self._queue_control(Kind.GO_AWAY, 0, 0, GO_AWAY_NORMAL)
            with trio.move_on_after(0.1):
                await self.flushed()
        self._end("we closed the connection")
        await trio.aclose_forcefully(Closer(self._link))

    async def flushed(self) -> None:
        """Wait until every frame that is queued now was written, or the connection has ended."""
        mark = self._frames_queued
        while self._frames_written < mark and not self.closed:
            await self.room.park()

    def widen(self, limits: YamuxLimits) -> None:
        """Replace the limits by ones that allow no less, and widen the peer's budget to them."""
        self.budget.widen(limits)
        self.limits = limits
        self._allowance_bytes = limits.allowance_bytes

    def lift_allowance(self) -> None:
        """Let the peer send more than its allowance, since other rules (a relay's) bound it from now on."""
        self._allowance_bytes = None

    # Called by streams (`StreamOwner`).

    @property
    def has_room(self) -> bool:
        """Whether the queue to the socket may take another data frame; if not, wait on `room`."""
        return self._queued_bytes < self.limits.send_queue_bytes

    def queue_data(
        self, stream_id: int, length: int, payload: tuple[memoryview, ...], flags: int = 0, *, at_once: bool = False
    ) -> None:
        """Queue a data frame of `length` bytes, which are in the parts of `payload`; drop it if the connection is
        closed. `at_once`: write it now if nothing is before it, as far as the socket takes it."""
        if self.reason:
            return
        self._data.append((encode_head(Kind.DATA, flags, stream_id, length), length, payload))
        self._queued_bytes += length
        self._frames_queued += 1
        is_next = at_once and not self._is_writing and len(self._data) == 1
        if is_next and (offer := self._link.offer) is not None:
            self._is_writing = True
            if offer(self._take_queued()):
                self._note_written()
                return
        if self._writer:
            self._writer.unpark_all()

    def note_read(self, stream: YamuxStream, length: int) -> None:
        """The stream's reader took `length` bytes: give credit back to the peer."""
        if stream.is_done:
            self._forget_stream(stream)
        elif not stream.fin_received and not self.closed:
            increment = stream.receive_window.note_read(length, trio.current_time(), self.round_trip_s)
            if increment:
                self._queue_control(Kind.WINDOW, 0, stream.stream_id, increment)

    def finish_stream(self, stream: YamuxStream) -> None:
        """Queue the stream's FIN, once."""
        if not stream.fin_queued:
            stream.fin_queued = True
            self.queue_data(stream.stream_id, 0, (), FIN)
            if stream.is_done:
                self._forget_stream(stream)

    def close_stream(self, stream: YamuxStream, unread_bytes: int) -> None:
        """Queue the stream's FIN. Then remember it until the peer's FIN comes, or reset it when too much data comes
        (`YamuxLimits.discard_bytes`) or after a time (`YamuxLimits.linger_s`)."""
        if stream.broken:
            self._forget_stream(stream)
            return
        self.finish_stream(stream)
        if stream.fin_received:
            self._forget_stream(stream)
        else:
            self._discard(stream, unread_bytes)

    def _discard(self, stream: YamuxStream, length: int) -> None:
        stream.discarded_bytes += length
        if stream.discarded_bytes > self.limits.discard_bytes:
            stream.reset()  # sends one RST, however many pieces of a frame are still to come

    def reset_stream(self, stream: YamuxStream) -> None:
        """Queue the stream's RST and forget the stream."""
        if not stream.broken:
            # As a data frame, so that it comes after queued data: a FIN in there still ends the stream in order.
            self.queue_data(stream.stream_id, 0, (), RST)
        self._forget_stream(stream)

    # Reading.

    async def _read_loop(self) -> None:
        parser = self._parser
        while True:
            data: bytes | memoryview = await self._link.receive()
            if not data:
                raise trio.BrokenResourceError("the peer closed the connection")
            earned = len(data) // Cost.BYTES_A_UNIT - Cost.RECEIVE
            while data:
                self._watch.note_heard(len(data), trio.current_time())
                for event in parser.feed(data):
                    if isinstance(event, Head):
                        self._on_head(event)
                        if self._cost >= Cost.TURN:
                            parser.pause()
                    else:
                        self._on_payload(event)
                data = parser.rest
                debt_s = self.budget.charge_work(self._cost - earned, trio.current_time())
                self._cost = earned = 0
                if debt_s or data:
                    await self._pause_reading(min(debt_s, _PAUSE_S), len(data))

    async def _pause_reading(self, seconds: float, length: int) -> None:
        """Let other tasks run, and handle no frame for `seconds`, while `length` bytes of frames wait."""
        self.budget.hold_bytes(length)
        try:
            await trio.sleep(seconds)
        finally:
            self.budget.release_bytes(length)

    def _on_head(self, head: Head) -> None:
        self._cost += Cost.FRAME
        if head.kind is Kind.PING:
            self._on_ping(head)
        elif head.kind is Kind.GO_AWAY:
            self._going_away = True
        else:
            stream = self._streams.get(head.stream_id)
            if head.flags & SYN:
                stream = self._on_syn(head.stream_id, stream)
            elif stream and stream.broken:
                stream = None  # kept only until its reader has taken what came before the end
            if head.kind is Kind.WINDOW:
                if stream:
                    stream.add_credit(head.length)
                    self._on_flags(stream, head.flags)
                # else: the update crossed our end of the stream; no answer is needed
            else:
                self._on_data(stream, head)

    def _on_syn(self, stream_id: int, known: YamuxStream | None) -> YamuxStream | None:
        if known or stream_id % 2 == self._next_id % 2:
            raise PeerError(f"yamux stream id {stream_id} was not the peer's to open")
        if self.budget.streams >= self.budget.max_streams or len(self._accepted) >= self.limits.accept_backlog:
            self._answer(Kind.WINDOW, RST, stream_id, 0)
            return None
        self._cost += Cost.OPEN
        stream = self._add_stream(stream_id)
        self._queue_control(Kind.WINDOW, ACK, stream_id, stream.receive_window.first_increment)
        self._accepted.append(stream)
        self._accepting.unpark()
        return stream

    def _on_data(self, stream: YamuxStream | None, head: Head) -> None:
        if self._allowance_bytes is not None:
            self._allowance_bytes -= head.length
            if self._allowance_bytes < 0:
                raise PeerError(f"yamux: over {self.limits.allowance_bytes} bytes before the peer was admitted")
        if stream is None:
            if head.length and not head.flags & (SYN | RST):
                self._answer(Kind.WINDOW, RST, head.stream_id, 0)
        else:
            if stream.fin_received and head.length:
                raise PeerError(f"yamux data after the end of stream {head.stream_id}")
            stream.receive_window.spend(head.length)
        self._target, self._target_head = stream, head
        if not head.length and stream:
            self._on_flags(stream, head.flags)

    def _on_payload(self, piece: memoryview) -> None:
        stream = self._target
        if stream is None or stream.broken:
            return
        if stream.closed:
            self._discard(stream, len(piece))
        elif stream.deliver(piece):
            self._cost += Cost.WAKE
        if not self._parser.payload_left:
            self._on_flags(stream, self._target_head.flags)

    def _on_flags(self, stream: YamuxStream, flags: int) -> None:
        if flags & FIN:
            stream.receive_fin()
        if flags & RST:
            stream.break_("the peer reset the stream")
        if flags & (FIN | RST) and stream.is_done:
            self._forget_stream(stream)

    def _on_ping(self, head: Head) -> None:
        if head.flags & SYN:
            self._watch.note_answered(trio.current_time())
            self._answer(Kind.PING, ACK, 0, head.length)
        elif head.length == self._ping[0]:
            measured_s = trio.current_time() - self._ping[1]
            self.round_trip_s = 0.75 * self.round_trip_s + 0.25 * measured_s if self.round_trip_s else measured_s
            self.shortest_round_trip_s = min(self.shortest_round_trip_s, measured_s)

    def _answer(self, kind: Kind, flags: int, stream_id: int, length: int) -> None:
        self._cost += Cost.ANSWER
        self._queue_control(kind, flags, stream_id, length)

    # Writing.

    def _queue_control(self, kind: Kind, flags: int, stream_id: int, length: int) -> None:
        if self.closed:
            return
        if len(self._control) >= self.limits.max_control_frames:
            self._end("the peer asks for answers and does not read them")
            return
        self._control.append(encode_head(kind, flags, stream_id, length))
        self._frames_queued += 1
        if self._writer:
            self._writer.unpark_all()

    async def _write_loop(self) -> None:
        while True:
            parts = [] if self._is_writing else self._take_queued()
            if not parts and not self._is_writing:
                await self._writer.park()
                continue
            self._is_writing = True
            self._watch.writing_since_s = trio.current_time()
            await self._link.send(parts)
            self._watch.writing_since_s = math.inf
            self._note_written()

    def _take_queued(self) -> list[bytes | memoryview]:
        """Take the parts of the next write from the queues: what is to be noted as written when they have left."""
        parts: list[bytes | memoryview] = list(self._control)
        frames, length = len(parts), 0
        self._control.clear()
        while self._data and (not length or length + self._data[0][1] <= _WRITE_BYTES):
            head, size, payload = self._data.popleft()
            frames += 1
            length += size
            parts.append(head)
            parts += payload
        self._leaving = frames, length
        return parts

    def _note_written(self) -> None:
        frames, length = self._leaving
        self._is_writing = False
        self._queued_bytes -= length
        self._frames_written += frames
        if self.room:
            self.room.unpark_all()

    # Watching.

    async def _watch_loop(self) -> None:
        """Send pings, and end the connection when its peer is gone. A deadline on each write would cost more."""
        watch = self._watch
        while True:
            now_s = trio.current_time()
            if why := watch.overdue(self.limits, now_s):
                raise trio.BrokenResourceError(why)
            if watch.is_ping_due(self.limits, now_s):
                self._ping = (self._ping[0] + 1 & 0xFFFFFFFF, now_s)
                self._queue_control(Kind.PING, SYN, 0, self._ping[0])
                watch.note_ping(now_s)
            self._sweep()
            await trio.sleep_until(watch.next_look_at_s(self.limits, now_s))

    def _sweep(self) -> None:
        """Reset the streams that we closed `YamuxLimits.linger_s` ago and the peer has not."""
        before_s = trio.current_time() - self.limits.linger_s
        for stream in [stream for stream in self._streams.values() if stream.closed]:
            if stream.closed_at_s <= before_s:
                stream.reset()

    # Ending.

    async def _guard(self, loop: Callable[[], Awaitable[None]]) -> None:
        with guarded(Source.CONNECTION, self._who) as outcome:
            await loop()
        if outcome.error is not None:
            self._end(outcome.why)

    def _end(self, why: str) -> None:
        if not self.reason:
            self.reason = why
            not_accepted = set(self._accepted)
            for stream in list(self._streams.values()):
                stream.break_(why, keep_unread=True)
                if stream.is_done or stream in not_accepted:  # the users of the others read the rest, or close them
                    self._forget_stream(stream)
            self._data.clear()
            self._control.clear()
            self.room.unpark_all()
            self._accepting.unpark_all()
            self._scope.cancel()

    # The table.

    def _add_stream(self, stream_id: int) -> YamuxStream:
        self.used_at_s = trio.current_time()
        limits = self.limits
        most_bytes = min(limits.max_window_bytes, INITIAL_WINDOW_BYTES + limits.window_budget_bytes)
        window = ReceiveWindow(self.budget.window, min(limits.first_window_bytes, most_bytes), most_bytes)
        stream = self._streams[stream_id] = YamuxStream(self, stream_id, window)
        self.budget.streams += self._is_peers(stream_id)
        return stream

    def _forget_stream(self, stream: YamuxStream) -> None:
        if self._streams.pop(stream.stream_id, None):
            stream.receive_window.release()
            self.budget.streams -= self._is_peers(stream.stream_id)
            self.used_at_s = trio.current_time()

    def _is_peers(self, stream_id: int) -> bool:
        return stream_id % 2 != self._next_id % 2

    def _own_streams(self) -> int:
        return sum(1 for stream_id in self._streams if not self._is_peers(stream_id))
