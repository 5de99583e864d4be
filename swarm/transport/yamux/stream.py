"""One yamux stream, as a transport's `Stream`."""

import operator
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import trio

from swarm.transport.base import Stream
from swarm.transport.yamux.limits import YamuxLimits
from swarm.transport.yamux.window import ReceiveWindow, SendWindow

__all__ = ["StreamOwner", "YamuxStream"]

_MAX_READ_BYTES: Final = 262_144
"""The most that a read without a limit returns, and that is read without a turn for other tasks."""
_READ_COST_BYTES: Final = 8_192
"""A read counts as this many bytes beside its own: 32 short ones may follow one another without a turn for others."""
_JOIN_BYTES: Final = 2_048
"""Pieces below this are joined as they arrive. Single bytes, kept as objects, would take thirty times the memory of
their window."""

_AT_ONCE_BYTES: Final = 65_536
"""What is sent in the sender's own turn, which saves waking the connection's writer. Shorter frames wait for the
writer, which joins them: a system call and a record of TLS for each would cost more."""


class StreamOwner(Protocol):
    """What a stream needs of its connection. `Connection` documents the methods."""

    limits: YamuxLimits
    room: trio.lowlevel.ParkingLot
    """Unparked when the queue to the socket has drained, and when a stream or the connection ends."""

    @property
    def has_room(self) -> bool: ...

    def queue_data(
        self, stream_id: int, length: int, payload: tuple[memoryview, ...], flags: int = 0, *, at_once: bool = False
    ) -> None: ...

    def note_read(self, stream: "YamuxStream", length: int) -> None: ...

    def finish_stream(self, stream: "YamuxStream") -> None: ...

    def close_stream(self, stream: "YamuxStream", unread_bytes: int) -> None: ...

    def reset_stream(self, stream: "YamuxStream") -> None: ...

    async def flushed(self) -> None: ...


class YamuxStream(Stream):
    """A stream over a `Connection`, which makes it, delivers its data and forgets it.

    `send_all` returns when its bytes are queued for the socket, in whole frames. So cancelling it never harms the
    connection, but the caller cannot know how much was sent. A writer whose peer reads nothing waits up to
    `YamuxLimits.stall_s`; then the stream is reset. `aclose` waits until what was queued has been written.
    """

    def __init__(self, connection: StreamOwner, stream_id: int, window: ReceiveWindow) -> None:
        self.stream_id = stream_id
        self.receive_window = window
        self.send_window = SendWindow()
        self._connection = connection
        self._unread: deque[bytes] = deque()
        self._first_read = 0  # bytes of the first piece that were read already
        self._unread_bytes = 0
        self._least = 1  # bytes that the reader waits for
        self._sink: memoryview | None = None  # where data goes at once, as the reader waits for just that much
        self._sunk_bytes = 0  # of the sink
        self._since_turn = 0  # bytes read since other tasks had a turn
        self._readers = trio.lowlevel.ParkingLot()
        self._writers = trio.lowlevel.ParkingLot()
        self._sending = False
        self._receiving = False
        self._parked = False  # the running `send_all` has waited, so other tasks had their turn
        self.fin_received = False
        self.fin_queued = False  # set by the connection
        self.broken = ""  # why: reset by either end, or the connection ended
        self.closed = False  # `aclose` was called
        self.closed_at_s = 0.0
        self.discarded_bytes = 0  # data that came after `aclose`; counted by the connection

    # Sending.

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._only_sender():
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check_sendable()
            self._parked = False
            view = _frozen(data)
            while view:
                length = min(await self._wait_sendable(), len(view))
                self._queue(view[:length])
                view = view[length:]
            if not self._parked:  # other tasks get their turn once in each call
                await trio.lowlevel.cancel_shielded_checkpoint()

    def send_now(self, *parts: bytes | bytearray | memoryview) -> bool:
        connection = self._connection
        if self._sending or self.closed or self.fin_queued or self.broken or not connection.has_room:
            return False
        length = sum(map(len, parts))
        if length > self.send_window.credit or length > connection.limits.send_frame_bytes:
            return False
        if length:
            self.send_window.credit -= length
            connection.queue_data(self.stream_id, length, tuple(map(_frozen, parts)), at_once=length >= _AT_ONCE_BYTES)
        return True

    async def wait_send_all_might_not_block(self) -> None:
        with self._only_sender():
            await trio.lowlevel.checkpoint()
            self._check_sendable()
            await self._wait_sendable()

    async def send_eof(self) -> None:
        with self._only_sender():
            await trio.lowlevel.checkpoint()
            if self.closed:
                raise trio.ClosedResourceError("this stream is closed")
            if self.broken:
                raise trio.BrokenResourceError(self.broken)
            self._connection.finish_stream(self)

    def _queue(self, frame: memoryview) -> None:
        self.send_window.credit -= len(frame)
        self._connection.queue_data(self.stream_id, len(frame), (frame,))

    async def _wait_sendable(self) -> int:
        """Wait for credit and for room in the connection's queue. Returns how long a frame may be sent."""
        connection = self._connection
        while True:
            if not self.send_window.credit:
                self._parked = True
                stall_s = connection.limits.stall_s
                with trio.move_on_after(stall_s):
                    while not self.send_window.credit:
                        await self._writers.park()
                        self._check_sendable()
                if not self.send_window.credit:
                    self.reset(f"the peer has read nothing for {stall_s:g} s")
            self._check_sendable()
            if connection.has_room:
                return min(self.send_window.credit, connection.limits.send_frame_bytes)
            self._parked = True
            await connection.room.park()
            self._check_sendable()

    def _check_sendable(self) -> None:
        if self.closed or self.fin_queued:
            raise trio.ClosedResourceError("this stream is closed for sending")
        if self.broken:
            raise trio.BrokenResourceError(self.broken)

    @contextmanager
    def _only_sender(self) -> Iterator[None]:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            yield
        finally:
            self._sending = False

    # Receiving.

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        self._since_turn = _MAX_READ_BYTES
        return await self.receive_at_least(1, max_bytes)

    async def receive_at_least(self, least: int, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError("max_bytes must be at least 1")
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            # The peer always has credit for half a window; credit for the other half may not be given back yet.
            self._least = max(1, min(least, self.receive_window.size // 2))
            while self._unread_bytes < self._least and not self.closed and not self.fin_received and not self.broken:
                await self._park_reader()
            if self._since_turn >= _MAX_READ_BYTES:
                self._since_turn = 0
                await trio.lowlevel.cancel_shielded_checkpoint()
            if self.closed:
                raise trio.ClosedResourceError("this stream is closed")
            if not self._unread:
                if self.fin_received:
                    return b""
                raise trio.BrokenResourceError(self.broken)
            data = self._take_unread(_MAX_READ_BYTES if max_bytes is None else max_bytes)
        finally:
            self._receiving = False
            self._least = 1
        self._since_turn += len(data) + _READ_COST_BYTES
        self._connection.note_read(self, len(data))
        return data

    async def receive_exactly(self, size: int, first: bytes = b"") -> memoryview:
        """As the interface says. What arrives meanwhile is copied once, to its place, and its credit given back."""
        buffer = memoryview(bytearray(size))
        buffer[: len(first)] = first
        filled = len(first)
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            if self._unread and not self.closed:
                filled += await self._move_unread(buffer[filled:])
            self._sink, self._sunk_bytes = buffer, filled
            while self._sunk_bytes < size and not self.closed and not self.fin_received and not self.broken:
                await self._park_reader()
            if self._sunk_bytes < size and self.closed:
                raise trio.ClosedResourceError("this stream is closed")
            if self._sunk_bytes < size and not self.fin_received:
                raise trio.BrokenResourceError(self.broken)
        finally:
            self._receiving, self._sink = False, None
        self._since_turn += _READ_COST_BYTES
        return buffer[: self._sunk_bytes]

    async def _move_unread(self, buffer: memoryview) -> int:
        """Move unread data to `buffer`, as much as it holds; returns how much. Gives other tasks their turn if one is
        due."""
        if self._since_turn >= _MAX_READ_BYTES:
            self._since_turn = 0
            await trio.lowlevel.cancel_shielded_checkpoint()
        pieces, filled = self._unread, 0
        while pieces and filled < len(buffer):
            piece = memoryview(pieces[0])[self._first_read :][: len(buffer) - filled]
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._first_read += len(piece)
            if self._first_read == len(pieces[0]):
                pieces.popleft()
                self._first_read = 0
        self._unread_bytes -= filled
        self._since_turn += filled
        self._connection.note_read(self, filled)
        return filled

    async def _park_reader(self) -> None:
        await self._readers.park()
        self._since_turn = 0

    def _take_unread(self, max_bytes: int) -> bytes:
        """Remove up to `max_bytes` of the unread data, joined: another wake-up of the reader costs more than the
        copy."""
        pieces, taken, length = self._unread, [], 0
        while pieces and length < max_bytes:
            piece, start = pieces[0], self._first_read
            end = min(len(piece), start + max_bytes - length)
            taken.append(piece[start:end] if end - start < len(piece) else piece)
            length += end - start
            if end == len(piece):
                pieces.popleft()
                end = 0
            self._first_read = end
        self._unread_bytes -= length
        return taken[0] if len(taken) == 1 else b"".join(taken)

    # Closing.

    async def aclose(self) -> None:
        if not self.closed:
            self.closed = True
            self.closed_at_s = trio.current_time()
            self._connection.close_stream(self, self._unread_bytes)
            self._forget_unread()
            self._wake()
        await trio.lowlevel.checkpoint()
        await self._connection.flushed()

    def reset(self, why: str = "this stream was reset") -> None:
        """End both directions at once; the stream breaks at the peer's end, too."""
        self._connection.reset_stream(self)
        self.break_(why)

    # Called by the connection.

    @property
    def is_done(self) -> bool:
        """Both directions have ended and nothing is left to read, so the connection may forget the stream. If it did so
        before the last read, unread data would not count against any window."""
        return not self._unread and (bool(self.broken) or (self.fin_received and self.fin_queued))

    def deliver(self, piece: memoryview) -> bool:
        """Add received data, which is copied. Returns whether it wakes a reader."""
        woken = False
        if self._sink is not None:
            end = self._sunk_bytes + len(piece)
            if end < len(self._sink):
                self._sink[self._sunk_bytes : end] = piece
                self._sunk_bytes = end
                self._connection.note_read(self, len(piece))
                return False
            taken = len(self._sink) - self._sunk_bytes
            self._sink[self._sunk_bytes :] = piece[:taken]
            self._sunk_bytes += taken
            self._sink = None
            self._connection.note_read(self, taken)
            woken = bool(self._readers.unpark_all())
            piece = piece[taken:]
            if not piece:
                return woken
        pieces = self._unread
        if len(piece) < _JOIN_BYTES and pieces and len(pieces[-1]) < _JOIN_BYTES:
            pieces[-1] += piece
        else:
            pieces.append(bytes(piece))
        self._unread_bytes += len(piece)
        if self._unread_bytes >= self._least and self._readers:
            self._readers.unpark_all()
            return True
        return woken

    def receive_fin(self) -> None:
        self.fin_received = True
        self._readers.unpark_all()

    def add_credit(self, increment: int) -> None:
        """The peer allows `increment` more bytes. Raises `PeerError` if that overflows its window."""
        self.send_window.add_credit(increment)
        if self._writers:
            self._writers.unpark_all()

    def break_(self, why: str, *, keep_unread: bool = False) -> None:
        """End both directions. Unread data stays readable if the peer's FIN came after it, or with `keep_unread`."""
        if not self.broken:
            self.broken = why
            if not self.fin_received and not keep_unread:
                self._forget_unread()
            self._wake()

    def _forget_unread(self) -> None:
        self._unread.clear()
        self._unread_bytes = 0

    def _wake(self) -> None:
        self._readers.unpark_all()
        self._writers.unpark_all()
        self._connection.room.unpark_all()

    def __repr__(self) -> str:
        return f"<YamuxStream {self.stream_id}>"


def _frozen(data: bytes | bytearray | memoryview) -> memoryview:
    """A view of data that cannot change. Frames wait in a queue after `send_all` returns, so mutable data is copied."""
    if isinstance(data, memoryview) and data.readonly:
        return data
    return memoryview(data if isinstance(data, bytes) else bytes(data))
