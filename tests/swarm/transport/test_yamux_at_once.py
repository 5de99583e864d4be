"""Large frames leave in the turn of their sender, if nothing is before them and the link can write without waiting."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
import trio.testing

from swarm.transport.yamux import Connection, YamuxLimits, YamuxStream
from swarm.transport.yamux.frames import FrameParser, Head, Kind
from swarm.transport.yamux.link import Offer

LIMITS = replace(YamuxLimits(), ping_interval_s=1e6, silence_s=1e6)
LARGE = bytes(range(256)) * 256
"""The shortest payload that leaves at once."""


class Link:
    """A pipe that takes `room` bytes at once, and the rest when the test calls `drain`."""

    def __init__(self) -> None:
        self.written = b""
        self.room = 1 << 30
        self.offers = 0
        self.sends = 0
        self.fails = False
        self._unsent = b""
        self._drained = trio.Event()

    async def receive(self) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async def send(self, parts: Sequence[bytes | memoryview]) -> None:
        self.sends += 1
        if self.fails:
            raise trio.BrokenResourceError("the pipe is broken")
        data, self._unsent = self._unsent + b"".join(parts), b""
        taken = min(self.room, len(data))
        self.written += data[:taken]
        if taken < len(data):
            await self._drained.wait()
            self.written += data[taken:]

    @property
    def offer(self) -> Offer | None:
        return self._offer

    def _offer(self, parts: Sequence[bytes | memoryview]) -> bool:
        self.offers += 1
        data = b"".join(parts)
        taken = 0 if self.fails else min(self.room, len(data))
        self.written += data[:taken]
        self._unsent = data[taken:]
        return not self._unsent

    def drain(self) -> None:
        self.room = 1 << 30
        self._drained.set()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    def payload(self) -> bytes:
        """What the frames so far carry, those of data."""
        events = list(FrameParser(1 << 24).feed(self.written))
        return b"".join(event for event in events if not isinstance(event, Head))

    def kinds(self) -> list[Kind]:
        return [event.kind for event in FrameParser(1 << 24).feed(self.written) if isinstance(event, Head)]


@asynccontextmanager
async def sending() -> AsyncIterator[tuple[Connection, YamuxStream, Link]]:
    link = Link()
    connection = Connection(link, client=True, limits=LIMITS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        stream = await connection.open()
        stream.add_credit(1 << 24)
        await trio.testing.wait_all_tasks_blocked()
        link.written, link.sends, link.offers = b"", 0, 0
        yield connection, stream, link
        nursery.cancel_scope.cancel()


async def test_a_large_frame_leaves_in_its_senders_turn() -> None:
    async with sending() as (connection, stream, link):
        assert stream.send_now(LARGE[:5], LARGE[5:])
        assert link.payload() == LARGE
        await connection.flushed()
        await trio.testing.wait_all_tasks_blocked()
        assert (link.offers, link.sends) == (1, 0)


async def test_small_frames_wait_for_the_writer_which_joins_them() -> None:
    async with sending() as (_, stream, link):
        for _ in range(3):
            assert stream.send_now(LARGE[:-1])
        assert link.written == b""
        await trio.testing.wait_all_tasks_blocked()
        assert (link.payload(), link.sends) == (3 * LARGE[:-1], 1)


async def test_a_large_frame_waits_behind_what_is_queued() -> None:
    async with sending() as (_, stream, link):
        assert stream.send_now(b"first ")
        assert stream.send_now(LARGE)
        assert link.written == b""
        await trio.testing.wait_all_tasks_blocked()
        assert link.payload() == b"first " + LARGE


async def test_what_the_pipe_does_not_take_leaves_before_everything_else() -> None:
    """Meanwhile the bytes count as queued, a flush waits for them, and nothing overtakes them."""
    async with sending() as (connection, stream, link):
        link.room = 1000
        assert stream.send_now(LARGE)
        assert len(link.written) == 1000
        assert stream.send_now(b"then ", LARGE)
        assert stream.send_now(b"last")
        await trio.testing.wait_all_tasks_blocked()
        assert link.offers == 1
        flushed = trio.Event()

        async def flush() -> None:
            await connection.flushed()
            flushed.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flush)
            await trio.testing.wait_all_tasks_blocked()
            assert not flushed.is_set()
            link.drain()
        assert link.payload() == LARGE + b"then " + LARGE + b"last"
        assert connection._queued_bytes == 0


async def test_a_queue_that_the_pipe_does_not_take_is_bounded() -> None:
    async with sending() as (connection, stream, link):
        link.room = 0
        sent = 0
        while stream.send_now(LARGE):
            sent += len(LARGE)
        assert LIMITS.send_queue_bytes <= sent < LIMITS.send_queue_bytes + len(LARGE)
        assert not connection.has_room
        link.drain()
        await connection.flushed()
        assert stream.send_now(LARGE)
        assert len(link.payload()) == sent + len(LARGE)


async def test_control_frames_that_wait_leave_with_it() -> None:
    async with sending() as (connection, stream, link):
        connection._queue_control(Kind.WINDOW, 0, stream.stream_id, 7)
        assert stream.send_now(LARGE)
        assert link.kinds() == [Kind.WINDOW, Kind.DATA]
        await trio.testing.wait_all_tasks_blocked()
        assert (link.offers, link.sends) == (1, 0)


async def test_a_broken_pipe_ends_the_connection_and_not_the_sender() -> None:
    async with sending() as (connection, stream, link):
        link.fails = True
        assert stream.send_now(LARGE)
        await trio.testing.wait_all_tasks_blocked()
        assert connection.reason == "the pipe is broken"
        assert not stream.send_now(LARGE)
        with pytest.raises(trio.BrokenResourceError, match="the pipe is broken"):
            await stream.send_all(b"more")
