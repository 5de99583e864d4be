"""A yamux peer that tests control frame by frame, against our end. It is the dialer (odd stream ids)."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import trio
import trio.testing

from swarm.transport.base import Unreachable
from swarm.transport.yamux import Connection, StreamLink, YamuxLimits, YamuxStream
from swarm.transport.yamux.frames import FrameParser, Head, Kind, encode_head

LIMITS = replace(YamuxLimits(), ping_interval_s=1e6, silence_s=1e6)


def data(stream_id: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return encode_head(Kind.DATA, flags, stream_id, len(payload)) + payload


def window(stream_id: int, increment: int = 0, flags: int = 0) -> bytes:
    return encode_head(Kind.WINDOW, flags, stream_id, increment)


class Peer:
    """The other end of our connection."""

    def __init__(self, stream: trio.abc.Stream, ours: Connection) -> None:
        self.stream = stream
        self.ours = ours
        self._heads: list[Head] = []

    async def listen(self) -> None:
        parser = FrameParser(1 << 24)
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while piece := await self.stream.receive_some(1 << 24):
                self._heads += [event for event in parser.feed(piece) if isinstance(event, Head)]

    async def send(self, *frames: bytes) -> None:
        await self.stream.send_all(b"".join(frames))
        await trio.testing.wait_all_tasks_blocked()

    async def heard(self) -> list[Head]:
        """The headers that came since the last call, without pings."""
        await trio.testing.wait_all_tasks_blocked()
        heads, self._heads = self._heads, []
        return [head for head in heads if head.kind is not Kind.PING]

    async def streams(self) -> list[YamuxStream]:
        """Accept every stream that is waiting."""
        found: list[YamuxStream] = []

        async def accept() -> None:
            with suppress(Unreachable):
                while True:
                    found.append(await self.ours.accept())

        await until_blocked(accept)
        return found


async def until_blocked(work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` until every task is blocked, then cancel it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def acted(limits: YamuxLimits = LIMITS) -> AsyncIterator[Peer]:
    near_io, far_io = trio.testing.memory_stream_pair()
    ours = Connection(StreamLink(near_io), client=False, limits=limits)
    peer = Peer(far_io, ours)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.listen)
        nursery.start_soon(ours.run)
        await peer.heard()
        yield peer
        nursery.cancel_scope.cancel()
