"""Sends messages in batches: whatever was posted while the last frame was sent travels in the next one."""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
import trio

from node.ipc.async_channel import AsyncChannel

__all__ = ["Outbox"]

FRAME_BYTES: Final = 1 << 20
"""A frame gets no further message when it has this much. The largest message: a body of 8 MiB with notes of 16 MiB."""


class Outbox:
    """Messages to one end. What waits here is bounded by those who post: by windows, and by the budget of bodies, which
    counts a body until the other end has read it, or it is withdrawn."""

    def __init__(self, pack: Callable[[list[Any]], msgspec.Struct]) -> None:
        """`pack(messages)`: the frame with these messages."""
        self._pack = pack
        self._waiting: deque[tuple[msgspec.Struct, int]] = deque()
        self._posted = trio.Event()

    def post(self, message: msgspec.Struct, size: int = 0) -> None:
        """Send `message`, with about `size` bytes, after those that were posted before. Never waits."""
        self._waiting.append((message, size))
        self._posted.set()

    def withdraw(self, message: msgspec.Struct) -> bool:
        """Do not send this message (the same object). False: it was sent, or is being sent."""
        for at, (waiting, _) in enumerate(self._waiting):
            if waiting is message:
                del self._waiting[at]
                return True
        return False

    async def run(self, channel: AsyncChannel) -> None:
        """Send until cancelled. Raises `ChannelClosed`."""
        while True:
            await self._posted.wait()
            batch, size = [], 0
            while self._waiting and size < FRAME_BYTES:
                message, more = self._waiting.popleft()
                batch.append(message)
                size += more
            if not self._waiting:
                self._posted = trio.Event()
            if batch:
                await channel.send(self._pack(batch))
