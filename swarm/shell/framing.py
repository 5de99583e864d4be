"""Bytes from a stream, exactly as many as asked for, and control messages with their length in front."""

from struct import Struct
from typing import Final

import trio

from codec.errors import PeerError
from swarm.protocol.wire import MAX_MESSAGE_BYTES, Message, decode, encode

__all__ = ["ByteReader", "frame_message", "read_message"]

_LENGTH: Final = Struct("<I")
_RECEIVE_BYTES: Final = 256 << 10


class ByteReader:
    """A receiving end with a buffer. One task at a time."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._at = 0

    async def exactly(self, size: int) -> bytes:
        """The next `size` bytes. Raises `PeerError` when the stream ends within them."""
        while len(self._buffer) - self._at < size:
            if not await self._fill():
                raise PeerError("stream: it ended inside a frame")
        data = bytes(memoryview(self._buffer)[self._at : self._at + size])
        self._at += size
        return data

    def has(self, size: int) -> bool:
        """Whether the next `size` bytes are here already, so that `exactly` will not wait."""
        return len(self._buffer) - self._at >= size

    async def at_end(self) -> bool:
        """Wait for the next byte: False, or True when the stream has ended cleanly."""
        return len(self._buffer) == self._at and not await self._fill()

    async def _fill(self) -> bool:
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        data = await self._stream.receive_some(_RECEIVE_BYTES)
        self._buffer += data
        return bool(data)


def frame_message(message: Message) -> bytes:
    """`message` as it goes onto a control stream."""
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


async def read_message(reader: ByteReader, deadline_s: float) -> tuple[Message, int] | None:
    """The next message and its size on the wire; None at the end of the stream.

    Waits for ever for a message to begin (silence is the leases' business), but `deadline_s` for it to arrive. Raises
    `PeerError`, `trio.TooSlowError`.
    """
    if await reader.at_end():
        return None
    with trio.fail_after(deadline_s):
        (size,) = _LENGTH.unpack(await reader.exactly(_LENGTH.size))
        if not 0 < size <= MAX_MESSAGE_BYTES:
            raise PeerError(f"message: {size} bytes, at most {MAX_MESSAGE_BYTES}")
        return decode(await reader.exactly(size)), _LENGTH.size + size
