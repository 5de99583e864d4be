"""Bytes from a stream, exactly as many as asked for, and control messages with their length in front."""

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


class Patience:
    """A deadline for what comes thousands of times a second: a task of its own looks at the clock now and then, where
    a cancel scope each time would cost more than what it guards."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since_s = math.inf

    def begin(self) -> None:
        """From now on we wait for a peer."""
        self._since_s = trio.current_time()

    def end(self) -> None:
        """It came."""
        self._since_s = math.inf

    async def watch(self) -> None:
        """Raises `trio.TooSlowError` once something has lasted too long; for ever otherwise."""
        while True:
            await trio.sleep_until(min(self._since_s, trio.current_time()) + self._seconds)
            if trio.current_time() >= self._since_s + self._seconds:
                raise trio.TooSlowError


class ByteReader:
    """A receiving end with a buffer. One task at a time."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._chunks: deque[bytes] = deque()
        self._at = 0
        """Bytes of the first chunk that were taken already."""
        self._size = 0

    def has(self, size: int) -> bool:
        """Whether the next `size` bytes are here already, so that `take` may be called."""
        return self._size >= size

    def take(self, size: int) -> bytes:
        """The next `size` bytes, which are here."""
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

    async def exactly(self, size: int) -> bytes:
        """The next `size` bytes. Raises `PeerError` when the stream ends within them."""
        while self._size < size:
            if not await self._fill(size - self._size):
                raise PeerError("stream: it ended inside a frame")
        return self.take(size)

    async def at_end(self) -> bool:
        """Wait for the next byte: False, or True when the stream has ended cleanly."""
        return not self._size and not await self._fill()

    def forget(self) -> None:
        """Drop what nobody is going to read: an error of this stream may keep the reader alive for a while."""
        self._chunks.clear()
        self._size = self._at = 0

    async def _fill(self, least: int = 1) -> bool:
        """Have more: of a long frame all that is missing at once, if the stream can wait for that."""
        data = await self._stream.receive_at_least(least, max(least, _RECEIVE_BYTES))
        if data:
            self._chunks.append(data)
            self._size += len(data)
        return bool(data)


def frame_message(message: Message) -> bytes:
    """`message` as it goes onto a control stream."""
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


async def read_frame(
    reader: ByteReader, patience: Patience, most: Callable[[], int] = lambda: MAX_MESSAGE_BYTES
) -> bytes | None:
    """The next message as it came, without its length; None at the end of the stream. `most`: how long it may be, asked
    when its length has come.

    Waits for ever for a message to begin (silence is the leases' business), but only so long for it to arrive. Raises
    `PeerError`.
    """
    if await reader.at_end():
        return None
    patience.begin()
    (size,) = _LENGTH.unpack(await reader.exactly(_LENGTH.size))
    if not 0 < size <= most():
        raise PeerError(f"message: {size} bytes, at most {most()}")
    data = await reader.exactly(size)
    patience.end()
    return data


async def read_message(reader: ByteReader, patience: Patience) -> tuple[Message, int] | None:
    """The next message and its size on the wire; see `read_frame`."""
    data = await read_frame(reader, patience)
    return None if data is None else (decode(data), _LENGTH.size + len(data))
