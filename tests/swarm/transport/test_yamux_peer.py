"""Yamux against a peer that the test controls frame by frame: seven kinds of misbehaviour at each step."""

from dataclasses import replace

import pytest
import trio
import trio.testing
from yamux_kit import LIMITS, acted, data, window

from swarm.transport.base import Unreachable
from swarm.transport.yamux import Connection, StreamLink
from swarm.transport.yamux.frames import ACK, FIN, INITIAL_WINDOW_BYTES, RST, SYN, FrameParser, Head, Kind, encode_head

# Opening.


async def test_open_is_acknowledged_with_a_window() -> None:
    async with acted() as peer:
        await peer.send(window(1, flags=SYN))
        assert await peer.heard() == [Head(Kind.WINDOW, ACK, 1, LIMITS.first_window_bytes - INITIAL_WINDOW_BYTES)]
        assert [stream.stream_id for stream in await peer.streams()] == [1]


async def test_data_may_come_with_the_syn() -> None:
    async with acted() as peer:
        await peer.send(data(1, b"hello", SYN | FIN))
        (stream,) = await peer.streams()
        assert await stream.receive_some() == b"hello"
        assert await stream.receive_some() == b""


async def test_window_of_the_syn_counts() -> None:
    async with acted() as peer:
        await peer.send(window(1, 1000, SYN))
        (stream,) = await peer.streams()
        assert stream.send_window.credit == INITIAL_WINDOW_BYTES + 1000


@pytest.mark.parametrize(
    "frames",
    [
        [window(1, flags=SYN), window(1, flags=SYN)],  # duplicated
        [window(2, flags=SYN)],  # an id that only our end may use
        [data(1, b"x", SYN), data(1, b"x", SYN)],
    ],
)
async def test_forged_opens_end_the_connection(frames: list[bytes]) -> None:
    async with acted() as peer:
        await peer.send(*frames)
        assert "was not the peer's to open" in peer.ours.reason


async def test_opens_beyond_the_limit_are_refused() -> None:
    async with acted(replace(LIMITS, max_inbound_streams=2)) as peer:
        await peer.send(*(window(stream_id, flags=SYN) for stream_id in (1, 3, 5)), data(5, b"lost"))
        refused = [head for head in await peer.heard() if head.flags & RST]
        assert {head.stream_id for head in refused} == {5}
        assert not peer.ours.closed
        await peer.send(data(1, flags=RST), window(7, flags=SYN))  # one ends, so another may be opened
        assert [head.flags for head in await peer.heard()] == [ACK]


# Data.


async def test_bytes_one_at_a_time() -> None:
    async with acted() as peer:
        for byte in window(1, flags=SYN) + data(1, b"slow", FIN):
            await peer.send(bytes([byte]))
        (stream,) = await peer.streams()
        assert b"".join([piece async for piece in stream]) == b"slow"


async def test_duplicated_and_reordered_data_are_just_data() -> None:
    """The link is ordered; a stream takes frames as they come, and streams do not affect one another."""
    async with acted() as peer:
        await peer.send(window(1, flags=SYN), window(3, flags=SYN))
        await peer.send(data(3, b"b"), data(1, b"a"), data(1, b"a"), data(3, b"c"))
        one, three = await peer.streams()
        assert (await one.receive_some(), await three.receive_some()) == (b"aa", b"bc")


async def test_data_past_the_window_ends_the_connection() -> None:
    async with acted(replace(LIMITS, window_budget_bytes=0)) as peer:
        await peer.send(window(1, flags=SYN), data(1, bytes(INITIAL_WINDOW_BYTES)))
        (stream,) = await peer.streams()
        assert not peer.ours.closed
        await peer.send(encode_head(Kind.DATA, 0, 1, 1))  # the header is refused before any payload
        assert "past a window of 0" in peer.ours.reason
        assert len(await stream.receive_some()) > 0  # the valid data stays readable


async def test_a_whole_window_may_be_one_frame() -> None:
    """js-libp2p sends a window in one frame."""
    async with acted() as peer:
        await peer.send(window(1, flags=SYN), data(1, bytes(LIMITS.first_window_bytes), FIN))
        (stream,) = await peer.streams()
        assert sum([len(piece) async for piece in stream]) == LIMITS.first_window_bytes


async def test_a_frame_that_is_too_long_ends_the_connection() -> None:
    async with acted() as peer:
        await peer.send(window(1, flags=SYN), encode_head(Kind.DATA, 0, 1, LIMITS.max_frame_bytes + 1))
        assert "yamux length" in peer.ours.reason


async def test_reading_gives_the_window_back() -> None:
    async with acted(replace(LIMITS, window_budget_bytes=0)) as peer:
        await peer.send(window(1, flags=SYN), data(1, bytes(INITIAL_WINDOW_BYTES)))
        (stream,) = await peer.streams()
        await peer.heard()
        assert await peer.heard() == []  # nothing before it reads
        taken = 0
        while taken < INITIAL_WINDOW_BYTES:
            taken += len(await stream.receive_some())
        given_back = sum(head.length for head in await peer.heard())
        assert INITIAL_WINDOW_BYTES // 2 <= given_back <= INITIAL_WINDOW_BYTES


async def test_unknown_streams_get_rst_and_their_payload_is_dropped() -> None:
    async with acted() as peer:
        await peer.send(data(9, b"who?"), data(9), data(9, flags=FIN), data(9, flags=RST), window(9, 5), data(9, b"!"))
        assert await peer.heard() == [Head(Kind.WINDOW, RST, 9, 0)] * 2
        await peer.send(data(11, b"and then", SYN))
        (stream,) = await peer.streams()
        assert await stream.receive_some() == b"and then"


async def test_data_after_the_end() -> None:
    async with acted() as peer:
        await peer.send(data(1, b"x", SYN | FIN), data(1, b"y"))
        assert "after the end of stream 1" in peer.ours.reason


async def test_a_window_that_overflows() -> None:
    async with acted() as peer:
        await peer.send(window(1, flags=SYN), window(1, 2**32 - 1))
        assert "window increment" in peer.ours.reason


# Ending.


@pytest.mark.parametrize("end", [FIN, RST])
async def test_our_end_and_theirs_cross(end: int) -> None:
    async with acted() as peer:
        await peer.send(window(1, flags=SYN), data(1, b"x"))
        (stream,) = await peer.streams()
        await stream.aclose()
        await peer.heard()
        await peer.send(data(1, b"late"), window(1, 10), data(1, flags=end))
        assert await peer.heard() == []  # the peer could not know of our end yet, so it gets no RST
        assert peer.ours.stream_count == 0
        assert not peer.ours.closed


async def test_a_stream_that_keeps_sending_after_we_closed_is_reset() -> None:
    async with acted() as peer:
        await peer.send(window(1, flags=SYN))
        (stream,) = await peer.streams()
        await stream.aclose()
        await peer.heard()
        await peer.send(*[data(1, bytes(10_000))] * 10)
        answers = await peer.heard()
        assert {(head.stream_id, head.flags) for head in answers} == {(1, RST)}
        assert peer.ours.stream_count == 0


async def test_reset_wakes_reader_and_writer() -> None:
    async with acted() as peer:
        await peer.send(window(1, flags=SYN), data(1, b"unread"))
        (stream,) = await peer.streams()
        with pytest.RaisesGroup(trio.BrokenResourceError):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.send_all, bytes(10_000_000))
                await trio.testing.wait_all_tasks_blocked()
                await peer.send(data(1, flags=RST))
        with pytest.raises(trio.BrokenResourceError, match="the peer reset"):
            await stream.receive_some()  # unread data is dropped with the reset


async def test_half_closed_and_still_sending() -> None:
    async with acted() as peer:
        await peer.send(data(1, b"question", SYN | FIN))
        (stream,) = await peer.streams()
        assert await stream.receive_some() == b"question"
        assert await stream.receive_some() == b""
        await stream.send_all(b"answer")
        await stream.aclose()
        heads = await peer.heard()
        assert [(head.kind, head.flags, head.length) for head in heads[-2:]] == [(Kind.DATA, 0, 6), (Kind.DATA, FIN, 0)]
        assert peer.ours.stream_count == 0


async def test_go_away_lets_streams_finish() -> None:
    async with acted() as peer:
        await peer.send(window(1, flags=SYN), encode_head(Kind.GO_AWAY, 0, 0, 0), data(1, b"bye", FIN))
        (stream,) = await peer.streams()
        assert await stream.receive_some() == b"bye"
        with pytest.raises(Unreachable, match="going away"):
            await peer.ours.open()


# The connection.


async def test_pings_are_answered_and_a_flood_of_them_ends_it(autojump_clock: trio.testing.MockClock) -> None:
    near_io, far_io = trio.testing.lockstep_stream_pair()
    ours = Connection(StreamLink(near_io), client=False, limits=replace(LIMITS, max_control_frames=100))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.run)
        await far_io.send_all(encode_head(Kind.PING, SYN, 0, 77))
        parser = FrameParser(1)
        heads: list[Head] = []
        while Head(Kind.PING, ACK, 0, 77) not in heads:
            heads += [event for event in parser.feed(await far_io.receive_some(1000)) if isinstance(event, Head)]
        await far_io.send_all(encode_head(Kind.PING, SYN, 0, 1) * 5000)  # the peer reads none of the answers
    assert "asks for answers and does not read them" in ours.reason


async def test_the_link_ends_in_the_middle_of_a_frame() -> None:
    async with acted() as peer:
        await peer.send(window(1, flags=SYN), data(1, b"whole"), encode_head(Kind.DATA, FIN, 1, 100) + b"half")
        (stream,) = await peer.streams()
        await peer.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert await stream.receive_some() == b"wholehalf"
        with pytest.raises(trio.BrokenResourceError):  # the frame with the FIN is incomplete, so there is no end
            await stream.receive_some()


async def test_cancelled_in_the_middle_of_a_frame_closes_the_connection() -> None:
    near_io, far_io = trio.testing.lockstep_stream_pair()
    ours = Connection(StreamLink(near_io), client=False, limits=LIMITS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.run)
        stream = await ours.open()
        await stream.send_all(bytes(1000))
        await far_io.receive_some(30)  # now the writer is in the middle of a frame
        nursery.cancel_scope.cancel()
    assert ours.closed
    with pytest.raises(trio.BrokenResourceError):
        await stream.send_all(b"x")
    while await far_io.receive_some(1000):
        pass
