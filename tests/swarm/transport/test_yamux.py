"""Yamux as its users see it: two ends over an in-memory stream."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
import trio.testing

from swarm.transport.base import Unreachable
from swarm.transport.yamux import Connection, StreamLink, YamuxLimits, YamuxStream


@asynccontextmanager
async def session(limits: YamuxLimits | None = None) -> AsyncIterator[tuple[Connection, Connection]]:
    near_io, far_io = trio.testing.memory_stream_pair()
    near = Connection(StreamLink(near_io), client=True, limits=limits)
    far = Connection(StreamLink(far_io), client=False, limits=limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.run)
        nursery.start_soon(far.run)
        yield near, far
        nursery.cancel_scope.cancel()


async def stream_pair(near: Connection, far: Connection) -> tuple[YamuxStream, YamuxStream]:
    stream = await near.open()
    return stream, await far.accept()


async def test_is_a_stream() -> None:
    async with session() as (near, far):

        async def make() -> tuple[YamuxStream, YamuxStream]:
            return await stream_pair(near, far)

        async def make_clogged() -> tuple[YamuxStream, YamuxStream]:
            ends = await stream_pair(near, far)
            for end in ends:
                await trio.testing.wait_all_tasks_blocked()
                await end.send_all(bytes(end.send_window.credit))
            return ends

        await trio.testing.check_half_closeable_stream(make, make_clogged)
        assert not near.closed
        assert not far.closed


async def test_many_streams_in_both_directions() -> None:
    async with session() as (near, far):

        async def send(connection: Connection, number: int) -> None:
            async with await connection.open() as stream:
                await stream.send_all(bytes([number]) * 100_000)

        got: list[tuple[int, int]] = []

        async def serve(connection: Connection) -> None:
            for _ in range(20):
                stream = await connection.accept()
                data = b"".join([bytes(piece) async for piece in stream])
                got.append((data[0], len(data)))
                await stream.aclose()

        async with trio.open_nursery() as nursery:
            for connection in (near, far):
                nursery.start_soon(serve, connection)
                for number in range(20):
                    nursery.start_soon(send, connection, number)
        assert sorted(got) == sorted((number, 100_000) for number in range(20) for _ in "ab")
        await trio.testing.wait_all_tasks_blocked()
        assert near.stream_count == 0 == far.stream_count


async def test_a_reader_that_pauses_a_minute(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.send_all, bytes(5_000_000))
            await trio.sleep(70)
            left = 5_000_000
            while left:
                left -= len(await reader.receive_some())


async def test_a_reader_that_stops_for_good(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        start_s = trio.current_time()
        with pytest.raises(trio.BrokenResourceError, match="read nothing for 180 s"):
            await writer.send_all(bytes(5_000_000))
        assert trio.current_time() - start_s == pytest.approx(180)
        other, _ = await stream_pair(near, far)  # the connection itself still works
        await other.send_all(b"x")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BrokenResourceError):
            await reader.receive_some()


async def test_a_silent_peer_is_found(autojump_clock: trio.testing.MockClock) -> None:
    near_io, _far_io = trio.testing.memory_stream_pair()
    near = Connection(StreamLink(near_io), client=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.run)
        stream = await near.open()
        with pytest.raises(trio.BrokenResourceError, match="nothing heard"):
            await stream.receive_some()
        assert trio.current_time() <= YamuxLimits().ping_interval_s + YamuxLimits().silence_s
    assert near.closed
    with pytest.raises(Unreachable, match="nothing heard"):
        await near.open()
    with pytest.raises(Unreachable, match="nothing heard"):
        await near.accept()


async def test_a_socket_that_takes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    near_io, far_io = trio.testing.lockstep_stream_pair()
    limits = replace(YamuxLimits(), silence_s=3600.0)
    near = Connection(StreamLink(near_io), client=True, limits=limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.run)
    assert "taken nothing for 30 s" in near.reason
    await far_io.aclose()


async def test_window_grows_for_a_fast_reader_within_the_budget(autojump_clock: trio.testing.MockClock) -> None:
    limits = replace(YamuxLimits(), window_budget_bytes=3 << 20)
    async with session(limits) as (near, far):
        ends = [await stream_pair(near, far) for _ in range(8)]
        bound = 8 * 262_144 + (3 << 20)
        assert far.unread_bytes <= bound

        async def drain(stream: YamuxStream) -> None:
            left = 8_000_000
            while left:
                left -= len(await stream.receive_some())

        async with trio.open_nursery() as nursery:
            for writer, reader in ends:
                nursery.start_soon(writer.send_all, bytes(8_000_000))
                nursery.start_soon(drain, reader)
        assert far.unread_bytes <= bound
        for writer, reader in ends:
            await writer.aclose()
            await reader.aclose()
        await trio.testing.wait_all_tasks_blocked()
        first, _ = await stream_pair(near, far)  # the budget was given back
        await trio.testing.wait_all_tasks_blocked()
        assert first.send_window.credit == limits.first_window_bytes


async def test_cancelled_in_the_middle_of_sending() -> None:
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.send_all, bytes(10_000_000))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        await writer.aclose()
        other, other_reader = await stream_pair(near, far)
        await other.send_all(b"whole")
        assert await other_reader.receive_some() == b"whole"  # no half frame in between
        got = 0
        while piece := await reader.receive_some():
            got += len(piece)
        assert 0 < got < 10_000_000


async def test_accept_queue_and_stream_limits() -> None:
    limits = replace(YamuxLimits(), accept_backlog=2, max_outbound_streams=4)
    async with session(limits) as (near, far):
        streams = [await near.open() for _ in range(4)]
        with pytest.raises(Unreachable, match="4 streams"):
            await near.open()
        await trio.testing.wait_all_tasks_blocked()
        assert [bool(stream.broken) for stream in streams] == [False, False, True, True]
        await far.accept()
        await streams[0].aclose()
        await near.open()
        await trio.testing.wait_all_tasks_blocked()
        assert not near.closed


async def test_close_sends_everything_first() -> None:
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        await writer.send_all(bytes(900_000))
        await writer.aclose()
        await near.aclose()
        got = 0
        while piece := await reader.receive_some():
            got += len(piece)
        assert got == 900_000


async def test_a_closed_stream_that_the_peer_keeps_open_is_swept(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as (near, far):
        stream, other = await stream_pair(near, far)
        await stream.aclose()
        assert near.stream_count == 1
        await trio.sleep(60)
        assert near.stream_count == 0
        with pytest.raises(trio.BrokenResourceError):
            await other.send_all(b"x")
        assert await other.receive_some() == b""  # our FIN had come before the reset


async def test_a_reply_survives_closing_with_the_request_unended() -> None:
    async with session() as (near, far):
        asker, answerer = await stream_pair(near, far)
        await asker.send_all(b"question")
        assert await answerer.receive_some() == b"question"
        await answerer.send_all(b"answer")
        await answerer.aclose()
        with pytest.raises(trio.BrokenResourceError):
            await asker.send_all(bytes(2_000_000))
        assert await asker.receive_some() == b"answer"
        assert await asker.receive_some() == b""


async def test_both_ends_reset_at_once() -> None:
    async with session() as (near, far):
        one, other = await stream_pair(near, far)
        one.reset()
        other.reset()
        await trio.testing.wait_all_tasks_blocked()
        assert near.stream_count == far.stream_count == 0
        assert not near.closed
        assert not far.closed


async def test_a_lost_connection_breaks_streams_but_keeps_received_data() -> None:
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        await writer.send_all(b"last words")
        await trio.testing.wait_all_tasks_blocked()
        await near.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert await reader.receive_some() == b"last words"
        with pytest.raises(trio.BrokenResourceError):
            await reader.receive_some()
        with pytest.raises(trio.BrokenResourceError):
            await writer.send_all(b"x")


async def test_round_trip_is_measured() -> None:
    async with session() as (near, _):
        while not near.round_trip_s:  # noqa: ASYNC110
            await trio.sleep(0.001)
        assert 0 < near.shortest_round_trip_s <= near.round_trip_s < 10


async def test_a_reader_sleeps_until_enough_is_there() -> None:
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        got: list[bytes] = []

        async def read() -> None:
            got.append(await reader.receive_at_least(1000, 1500))
            got.append(await reader.receive_at_least(1000))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for number in range(3):
                await writer.send_all(bytes([number]) * 400)
                await trio.testing.wait_all_tasks_blocked()
                assert [len(part) for part in got] == ([1200] if number == 2 else [])
            await writer.send_all(b"end")
            await writer.send_eof()
        assert got == [b"\0" * 400 + b"\1" * 400 + b"\2" * 400, b"end"]


async def test_a_reader_that_gave_up_has_the_next_one_wait_for_a_byte() -> None:
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.receive_at_least, 1000)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        await writer.send_all(b"a")
        with trio.fail_after(1):
            assert await reader.receive_some() == b"a"


@pytest.mark.parametrize(("how", "left"), [("reset", b""), ("connection", b"not enough")])
async def test_a_reader_that_waits_for_more_learns_that_the_stream_broke(how: str, left: bytes) -> None:
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        await writer.send_all(b"not enough")

        got = bytearray()

        async def read() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                while True:
                    got.extend(await reader.receive_at_least(1000))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            if how == "reset":
                writer.reset()
            else:
                await near.aclose()
        assert got == left


async def test_more_than_a_window_is_not_waited_for() -> None:
    """The writer could never send that much at once."""
    limits = replace(YamuxLimits(), window_budget_bytes=0)
    async with session(limits) as (near, far):
        writer, reader = await stream_pair(near, far)
        content, got = bytes(range(256)) * 16_384, b""

        async def send() -> None:
            await writer.send_all(content)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            with trio.fail_after(10):
                while len(got) < len(content):
                    got += await reader.receive_at_least(len(content) - len(got))
        assert got == content


async def test_data_that_need_not_wait_is_sent_at_once() -> None:
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        data = bytearray(b"at once")
        assert writer.send_now(data)
        data[:] = b"changed"
        assert await reader.receive_some() == b"at once"
        assert writer.send_now(b"")


async def test_data_that_would_wait_is_not_sent_at_all() -> None:
    async with session(replace(YamuxLimits(), window_budget_bytes=0)) as (near, far):
        writer, reader = await stream_pair(near, far)
        await trio.testing.wait_all_tasks_blocked()
        assert not writer.send_now(bytes(writer.send_window.credit + 1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.send_all, bytes(writer.send_window.credit + 1))
            await trio.testing.wait_all_tasks_blocked()
            assert not writer.send_now(b"before its turn")
            assert set(await reader.receive_at_least(1 << 30, 1 << 30)) == {0}
        await writer.send_eof()
        assert not writer.send_now(b"after the end")
        assert set(await reader.receive_some()) == {0}
        writer.reset()
        assert not writer.send_now(b"broken")


async def test_a_reader_that_knows_the_size_gets_it_in_one_buffer() -> None:
    """Part of it is there already, the rest comes in several frames, and what follows stays for the next reader."""
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        content = bytes(range(256)) * 256
        await writer.send_all(content[:1000])
        await trio.testing.wait_all_tasks_blocked()
        got: list[bytes] = []

        async def read() -> None:
            got.append(bytes(await reader.receive_exactly(len(content) + 3, b"the")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for at in range(1000, len(content) - 7000, 7000):
                await writer.send_all(content[at : at + 7000])
                await trio.testing.wait_all_tasks_blocked()
                assert not got, "it sleeps until all of it has come"
            await writer.send_all(content[at + 7000 :] + b"next")
        assert got == [b"the" + content]
        assert await reader.receive_some() == b"next"


async def test_more_than_a_window_is_received_into_one_buffer() -> None:
    """Credit is given back while the buffer fills: the writer could not send the rest otherwise."""
    async with session(replace(YamuxLimits(), window_budget_bytes=0)) as (near, far):
        writer, reader = await stream_pair(near, far)
        content = bytes(range(256)) * 8192
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.send_all, content)
            with trio.fail_after(10):
                assert await reader.receive_exactly(len(content)) == content


async def test_a_stream_that_ends_early_gives_a_short_buffer() -> None:
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        await writer.send_all(b"all there is")
        await writer.send_eof()
        assert await reader.receive_exactly(100) == b"all there is"
        assert await reader.receive_exactly(100) == b""


@pytest.mark.parametrize("how", ["reset", "connection", "closed"])
async def test_a_reader_that_knows_the_size_learns_that_the_stream_broke(how: str) -> None:
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        await writer.send_all(b"not enough")
        expected = trio.ClosedResourceError if how == "closed" else trio.BrokenResourceError

        async def read() -> None:
            with pytest.raises(expected):
                await reader.receive_exactly(1000)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await reader.receive_exactly(1000)
            if how == "reset":
                writer.reset()
            elif how == "connection":
                await near.aclose()
            else:
                await reader.aclose()


async def test_a_reader_of_many_short_parts_lets_others_run() -> None:
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        await writer.send_all(bytes(100))
        await trio.testing.wait_all_tasks_blocked()
        reads: list[int] = []
        turns: list[int] = []

        async def read() -> None:
            for _ in range(100):
                reads.append(len(await reader.receive_at_least(1, 1)))

        async def count() -> None:
            while len(reads) < 100:
                turns.append(len(reads))
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(count)
        assert 3 <= len(turns) < 50


async def test_parts_are_sent_as_one() -> None:
    async with session() as (near, far):
        writer, reader = await stream_pair(near, far)
        last = bytearray(b"last")
        assert writer.send_now(b"first ", memoryview(b"middle "), last)
        last[:] = b"what"
        assert await reader.receive_some() == b"first middle last"
