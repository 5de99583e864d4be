"""Exact reads from a stream, and control messages behind their length."""

import math
from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import Final

import trio

from codec.errors import PeerError
from swarm.protocol.core.wire import MAX_MESSAGE_BYTES, Message, decode, encode
from swarm.transport.base import Stream

__all__ = ["ByteReader", "Patience", "frame_message", "read_frame", "read_message"]

_LENGTH: Final = Struct("<I")
_RECEIVE_BYTES: Final = 256 << 10
_DIRECT_BYTES: Final = range(64 << 10, (256 << 10) + 1)
"""What is received into a buffer of its own: large pieces. Of shorter ones several are read at once, and a peer that
announces more gets no buffer before its bytes have come."""

_HEAD_BYTES: Final = 4096
"""What is received at once after a large frame, as another one may follow: its head. More would be copied twice."""


class Patience:
    """A deadline for waits that begin and end thousands of times a second.

    A task of its own looks at the clock now and then; a cancel scope for each wait would cost more than the operation
    that it guards. While nothing is waited for the task sleeps."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since_s = math.inf
        self._begun: trio.Event | None = None
        """What the sleeping task waits for; None: it does not sleep, or there is none."""

    def begin(self) -> None:
        """A wait for the peer begins."""
        self._since_s = trio.current_time()
        if self._begun is not None:
            self._begun.set()
            self._begun = None

    def end(self) -> None:
        """The wait is over."""
        self._since_s = math.inf

    async def watch(self) -> None:
        """Run until cancelled. Raises `trio.TooSlowError` once a wait has lasted too long."""
        while True:
            if math.isinf(self._since_s):
                self._begun = trio.Event()
                await self._begun.wait()
            await trio.sleep_until(min(self._since_s, trio.current_time()) + self._seconds)
            if trio.current_time() >= self._since_s + self._seconds:
                raise trio.TooSlowError


class ByteReader:
    """The receiving end of a stream with a buffer. For one task at a time."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._chunks: deque[bytes] = deque()
        self._at = 0
        """Bytes of the first chunk that were taken already."""
        self._size = 0
        self._next_bytes = _RECEIVE_BYTES
        """How much to receive at once when a frame begins."""

    def has(self, size: int) -> bool:
        """Whether the next `size` bytes are in the buffer, so that `take` may be called."""
        return self._size >= size

    def take(self, size: int) -> bytes:
        """The next `size` bytes, which are in the buffer."""
        if not size:
            return b""
        parts: list[bytes] = []
        left = size
        while left:
            first = self._chunks[0]
            end = self._at + left
            if end < len(first):
                parts.append(first[self._at : end])
                self._at = end
                break
            parts.append(first[self._at :])
            left -= len(first) - self._at
            self._at = 0
            self._chunks.popleft()
        self._size -= size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def exactly(self, size: int) -> bytes | memoryview:
        """The next `size` bytes. Raises `PeerError` when the stream ends before them. A view is of a buffer that is the
        caller's alone."""
        if size > self._size and size in _DIRECT_BYTES:
            data = await self._stream.receive_exactly(size, self.take(self._size))
            if len(data) < size:
                raise PeerError("stream: it ended inside a frame")
            self._next_bytes = _HEAD_BYTES
            return data
        self._next_bytes = _RECEIVE_BYTES
        while self._size < size:
            if not await self._fill(size - self._size):
                raise PeerError("stream: it ended inside a frame")
        return self.take(size)

    async def at_end(self) -> bool:
        """Wait for the next byte: False, or True when the stream has ended cleanly."""
        return not self._size and not await self._fill(1, self._next_bytes)

    def forget(self) -> None:
        """Drop what nobody is going to read: an error of this stream may keep the reader alive for a while."""
        self._chunks.clear()
        self._size = self._at = 0

    async def _fill(self, least: int, most: int = _RECEIVE_BYTES) -> bool:
        """Receive at least `least` bytes in one call, if the stream can wait for them. False at the end."""
        data = await self._stream.receive_at_least(least, max(least, most))
        if data:
            self._chunks.append(data)
            self._size += len(data)
        return bool(data)


def frame_message(message: Message) -> bytes:
    """`message` as it is written to a control stream: u32 length (little-endian), then the message."""
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


async def read_frame(
    reader: ByteReader, patience: Patience, max_bytes: Callable[[], int] = lambda: MAX_MESSAGE_BYTES
) -> bytes | None:
    """The next message, encoded, without its length; None at the end of the stream.

    `max_bytes`: how long it may be, asked once its length has arrived. Waits without limit for a message to begin,
    because leases detect silent peers; once it has begun, `patience` applies, unless all of it came at once. Raises
    `PeerError`.
    """
    if await reader.at_end():
        return None
    waits = not reader.has(_LENGTH.size)
    if waits:
        patience.begin()
    (size,) = _LENGTH.unpack(await reader.exactly(_LENGTH.size))
    if not 0 < size <= max_bytes():
        raise PeerError(f"message: {size} bytes, at most {max_bytes()}")
    if not waits and not reader.has(size):
        patience.begin()
    data = bytes(await reader.exactly(size))
    patience.end()
    return data


async def read_message(reader: ByteReader, patience: Patience) -> tuple[Message, int] | None:
    """The next message, and its size on the wire in bytes; see `read_frame`."""
    data = await read_frame(reader, patience)
    return None if data is None else (decode(data), _LENGTH.size + len(data))
