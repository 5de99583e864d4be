"""The machine's own uplink as one queue: all bulk streams together leave no faster than it was said to carry.

A version begins on many connections at once. Each finds its own pace, none knows of the others, and together they
overflow the router in a few milliseconds: what is dropped there is sent again a round trip later, when all the rest has
arrived. So who says what the uplink carries has what leaves spread over it, in the order in which it was given.

Packets' headers come on top, so the link is never idle. More would gather in the router's queue: a tenth more overflows
one of 50 ms within half a second.
"""

import math
from typing import Final

import trio

__all__ = ["Paced", "Pacer"]

BURST_S: Final = 0.01
"""So much of the uplink's time may leave at once: less than any router's queue."""


class Pacer:
    """When the next bytes may leave. `mbit`: what the uplink carries; infinite: nobody said."""

    def __init__(self, mbit: float = math.inf) -> None:
        self._bytes_s = mbit * 125_000
        self._free_at_s = -math.inf

    async def admit(self, size: int) -> None:
        """Wait for the turn of so many bytes."""
        now = trio.current_time()
        start = max(self._free_at_s, now)
        self._free_at_s = start + size / self._bytes_s
        if start - BURST_S > now:
            await trio.sleep_until(start - BURST_S)


class Paced(trio.abc.SendStream):
    """A stream whose bytes wait for their turn."""

    def __init__(self, stream: trio.abc.SendStream, pacer: Pacer) -> None:
        self._stream, self._pacer = stream, pacer

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._pacer.admit(len(data))
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()
