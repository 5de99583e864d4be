"""A session with a peer that keeps it busy, or does not read: each wait ends, and the stream is closed."""

import pytest
import trio
from trio.testing import MockClock

from node.doctor.session import VisitSession
from swarm.protocol.core.wire import Ping, Pong
from swarm.runtime.framing import frame_message
from swarm.transport.base import Stream

PEER = b"p" * 32


class FakeStream(Stream):
    """A stream to a peer that sends `said` every 4 s, and reads only if `reads`."""

    def __init__(self, said: bytes = b"", *, reads: bool = True) -> None:
        self._said, self._reads = said, reads
        self.closed = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if not self._said:
            await trio.sleep_forever()
        await trio.sleep(4)
        return self._said

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if not self._reads:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()


class FakeTransport:
    """Opens one stream to each peer."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream

    async def open_stream(self, peer: bytes, lane: object) -> FakeStream:
        await trio.lowlevel.checkpoint()
        return self._stream


def session_on(stream: FakeStream):
    return VisitSession.open(FakeTransport(stream), PEER)  # type: ignore[arg-type]


async def test_answers_to_another_ping_do_not_prolong_a_measurement(autojump_clock: MockClock) -> None:
    async with session_on(FakeStream(frame_message(Pong(77)))) as session:
        with trio.move_on_after(600) as outer:
            with pytest.raises(trio.TooSlowError):
                await session.round_trip_ms(3, 5.0)
        assert not outer.cancelled_caught
        assert trio.current_time() == pytest.approx(5.0)


async def test_a_peer_that_does_not_read_does_not_hold_up_a_send(autojump_clock: MockClock) -> None:
    stream = FakeStream(frame_message(Ping(1)), reads=False)
    async with session_on(stream) as session:
        await trio.sleep(5)  # the reading task answers the ping meanwhile
        with trio.move_on_after(600) as outer:
            with pytest.raises(trio.TooSlowError):
                await session.send(Ping(0))
        assert not outer.cancelled_caught


async def test_the_stream_is_closed_when_the_block_raises() -> None:
    stream = FakeStream()
    with pytest.RaisesGroup(LookupError):
        async with session_on(stream):
            raise LookupError
    assert stream.closed


async def test_the_stream_is_closed_when_the_block_is_cancelled() -> None:
    stream = FakeStream()
    with trio.CancelScope() as scope:
        async with session_on(stream):
            scope.cancel()
            await trio.sleep_forever()
    assert stream.closed
