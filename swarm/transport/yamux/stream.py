"""One yamux stream, as a transport's `Stream`."""

import operator
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import trio

from swarm.transport.base import Stream
from swarm.transport.yamux.window import ReceiveWindow, SendWindow

if TYPE_CHECKING:
    from swarm.transport.yamux.connection import Connection

__all__ = ["YamuxStream"]

_MAX_READ_BYTES: Final = 262_144
"""What a read without a limit returns at most."""
_JOIN_BYTES: Final = 2_048
"""Pieces below this are joined as they arrive. Kept one by one, single bytes would cost us thirty times their window in
objects."""


class YamuxStream(Stream):
    """A stream over a `Connection`; that makes it, feeds it and forgets it.

    `send_all` returns when its bytes are queued for the socket, in whole frames: cancelling it never harms the
    connection, though then nobody knows how much was sent. A writer whose peer reads nothing waits, up to
    `Limits.stall_s`; then the stream is reset. `aclose` waits until what was queued has left.
    """

    def __init__(self, connection: "Connection", stream_id: int, window: ReceiveWindow) -> None:
        self.stream_id = stream_id
        self.receive_window = window
        self.send_window = SendWindow()
        self._connection = connection
        self._chunks: deque[bytes] = deque()
        self._head_read = 0  # bytes of the first chunk that were read already
        self._unread = 0  # bytes in all chunks
        self._least = 1  # bytes that the reader waits for
        self._readers = trio.lowlevel.ParkingLot()
        self._writers = trio.lowlevel.ParkingLot()
        self._sending = False
        self._receiving = False
        self._parked = False  # the present sender has waited, and so given others their turn
        self.ended = False  # the peer's FIN came
        self.finished = False  # our FIN is queued
        self.broken = ""  # reset by either side, or the connection ended: why
        self.closed = False  # aclose() was called
        self.closed_at_s = 0.0
        self.discarded_bytes = 0  # arrived after that

    # Sending.

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._only_sender():
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check_sendable()
            self._parked = False
            view = _unchanging(data)
            while view:
                length = min(await self._wait_sendable(), len(view))
                self._queue(view[:length])
                view = view[length:]
            if not self._parked:  # others get their turn, but once is enough
                await trio.lowlevel.cancel_shielded_checkpoint()

    def send_now(self, data: bytes | bytearray | memoryview) -> bool:
        connection = self._connection
        if self._sending or self.closed or self.finished or self.broken or not connection.has_room:
            return False
        if len(data) > min(self.send_window.credit, connection.limits.send_frame_bytes):
            return False
        if data:
            self._queue(_unchanging(data))
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
        self._connection.queue_data(self.stream_id, frame)

    async def _wait_sendable(self) -> int:
        """How long a frame may be sent now; waits for credit and for room in the connection's queue."""
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
        if self.closed or self.finished:
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
        return await self.receive_at_least(1, max_bytes)

    async def receive_at_least(self, least: int, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError("max_bytes must be at least 1")
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            parked = False
            # Half a window is always to come, however much of the other half is not given back yet.
            self._least = max(1, min(least, self.receive_window.size // 2))
            while self._unread < self._least and not self.closed and not self.ended and not self.broken:
                await self._readers.park()
                parked = True
            if not parked:
                await trio.lowlevel.cancel_shielded_checkpoint()
            if self.closed:
                raise trio.ClosedResourceError("this stream is closed")
            if not self._chunks:
                if self.ended:
                    return b""
                raise trio.BrokenResourceError(self.broken)
            data = self._take(_MAX_READ_BYTES if max_bytes is None else max_bytes)
        finally:
            self._receiving = False
            self._least = 1
        self._connection.consumed(self, len(data))
        return data

    def _take(self, max_bytes: int) -> bytes:
        """What is there, in one piece: a reader's turn costs more than the copy."""
        chunks, taken, length = self._chunks, [], 0
        while chunks and length < max_bytes:
            chunk, start = chunks[0], self._head_read
            end = min(len(chunk), start + max_bytes - length)
            taken.append(chunk[start:end] if end - start < len(chunk) else chunk)
            length += end - start
            if end == len(chunk):
                chunks.popleft()
                end = 0
            self._head_read = end
        self._unread -= length
        return taken[0] if len(taken) == 1 else b"".join(taken)

    # Closing.

    async def aclose(self) -> None:
        if not self.closed:
            self.closed = True
            self.closed_at_s = trio.current_time()
            self._connection.close_stream(self, self._unread)
            self._forget_unread()
            self._wake()
        await trio.lowlevel.checkpoint()
        await self._connection.flushed()

    def reset(self, why: str = "this stream was reset") -> None:
        """End both directions at once; the peer's end breaks."""
        self._connection.reset_stream(self)
        self.break_(why)

    # What the connection calls.

    @property
    def over(self) -> bool:
        """Both directions have ended and nothing is left to read: the connection may forget it. Sooner, and what is
        unread would count for no window any more."""
        return not self._chunks and (bool(self.broken) or (self.ended and self.finished))

    def deliver(self, piece: bytes) -> bool:
        """Whether that wakes a reader."""
        chunks = self._chunks
        if len(piece) < _JOIN_BYTES and chunks and len(chunks[-1]) < _JOIN_BYTES:
            chunks[-1] += piece
        else:
            chunks.append(piece)
        self._unread += len(piece)
        return self._unread >= self._least and bool(self._readers.unpark_all())

    def end(self) -> None:
        self.ended = True
        self._readers.unpark_all()

    def granted(self, increment: int) -> None:
        self.send_window.raise_by(increment)
        self._writers.unpark_all()

    def break_(self, why: str, *, keep_unread: bool = False) -> None:
        """No more in either direction. What the peer sent before its FIN stays readable, the rest goes."""
        if not self.broken:
            self.broken = why
            if not self.ended and not keep_unread:
                self._forget_unread()
            self._wake()

    def _forget_unread(self) -> None:
        self._chunks.clear()
        self._unread = 0

    def _wake(self) -> None:
        self._readers.unpark_all()
        self._writers.unpark_all()
        self._connection.room.unpark_all()

    def __repr__(self) -> str:
        return f"<YamuxStream {self.stream_id}>"


def _unchanging(data: bytes | bytearray | memoryview) -> memoryview:
    """Frames wait in a queue after the caller went on, so what it could change is copied."""
    return memoryview(data if isinstance(data, bytes) else bytes(data))
