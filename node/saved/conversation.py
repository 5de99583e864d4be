"""One stream between a holder of fragments and the process that asks it: messages, bodies, deadlines."""

from collections.abc import AsyncIterator, Awaitable, Callable
from struct import Struct as Packing
from types import UnionType
from typing import Any, Final

import trio

from codec.errors import PeerError, SwarmError
from node.saved.messages import MAX_ANSWER_BYTES, Message, Refused, decode, encode
from swarm.runtime.framing import ByteReader
from swarm.transport.base import Stream

__all__ = ["ANSWER_S", "PART_BYTES", "STATE_PROTOCOL", "Conversation", "Declined"]

STATE_PROTOCOL: Final = "/swarm-node/saved/1"
PART_BYTES: Final = 128 << 10
"""What is read or written at once: a body waits in memory in parts of this size."""
ANSWER_S: Final = 60.0
"""For a message, from when it is waited for. More is given where a holder first reads or syncs a large fragment."""
STALLED_S: Final = 60.0
"""A body of which no part moves for so long is given up."""
_LENGTH: Final = Packing("<I")

Write = Callable[[bytes | memoryview], Awaitable[None]]


class Declined(SwarmError):
    """The other end refused what was asked; the text says why."""


class Conversation:
    """Either end of a stream, which the caller closes. Everything raises `PeerError` for bytes that break a rule,
    `trio.TooSlowError`, and what a broken stream raises."""

    def __init__(self, stream: Stream, write: Write | None = None) -> None:
        """`write`: sends bodies instead of the stream: at the uplink's pace, for example."""
        self._stream, self._write = stream, write or stream.send_all
        self._reader = ByteReader(stream)

    async def send(self, message: Message) -> None:
        """Send a message."""
        data = encode(message)
        with trio.fail_after(STALLED_S):
            await self._stream.send_all(_LENGTH.pack(len(data)) + data)

    async def receive(self, within_s: float = ANSWER_S, max_bytes: int = MAX_ANSWER_BYTES) -> Message | None:
        """The next message; None at the end of the stream."""
        with trio.fail_after(within_s):
            if await self._reader.at_end():
                return None
            (size,) = _LENGTH.unpack(await self._reader.exactly(_LENGTH.size))
            if not 0 < size <= max_bytes:
                raise PeerError(f"saved state: a message of {size} bytes, at most {max_bytes}")
            return decode(bytes(await self._reader.exactly(size)))

    async def ask(self, question: Message, kinds: type[Any] | UnionType, within_s: float = ANSWER_S) -> Any:
        """The answer to a question. Raises `Declined` for a refusal."""
        await self.send(question)
        return await self.expect(kinds, within_s)

    async def expect(self, kinds: type[Any] | UnionType, within_s: float = ANSWER_S) -> Any:
        """The next message, which is of these kinds. Raises `Declined` for a refusal."""
        message = await self.receive(within_s)
        if isinstance(message, Refused):
            raise Declined(message.why)
        if not isinstance(message, kinds):
            raise PeerError(f"saved state: {type(message).__name__} is no answer to that")
        return message

    async def send_part(self, part: bytes | memoryview) -> None:
        """Send a part of a body."""
        with trio.fail_after(STALLED_S):
            await self._write(part)

    async def parts(self, size: int) -> AsyncIterator[bytes | memoryview]:
        """The next `size` bytes, in parts."""
        left = size
        while left:
            with trio.fail_after(STALLED_S):
                part = await self._reader.exactly(min(left, PART_BYTES))
            left -= len(part)
            yield part

    async def body(self, size: int) -> bytes:
        """The next `size` bytes at once; the caller has bounded them."""
        found = bytearray()
        async for part in self.parts(size):
            found += part
        return bytes(found)
