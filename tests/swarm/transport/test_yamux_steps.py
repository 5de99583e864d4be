"""Yamux frames without data: windows, ends, resets, pings, going away. Split, duplicated, reordered, oversized, forged,
cancelled midway and silent, as far as `test_yamux` and `test_yamux_peer` do not have the case."""

from dataclasses import replace

import pytest
import trio
import trio.testing
from yamux_kit import LIMITS, Peer, acted, data, until_blocked, window

from swarm.transport.base import Unreachable
from swarm.transport.yamux import YamuxStream
from swarm.transport.yamux.frames import ACK, FIN, INITIAL_WINDOW_BYTES, RST, SYN, Head, Kind, encode_head


async def opened(peer: Peer, stream_id: int = 1) -> YamuxStream:
    await peer.send(window(stream_id, flags=SYN))
    (stream,) = await peer.streams()
    await peer.heard()
    return stream


def ping(value: int, flags: int = SYN) -> bytes:
    return encode_head(Kind.PING, flags, 0, value)


# Opening.


async def test_an_open_with_more_than_a_window_ends_the_connection() -> None:
    async with acted(replace(LIMITS, window_budget_bytes=0)) as peer:
        await peer.send(encode_head(Kind.DATA, SYN, 1, INITIAL_WINDOW_BYTES + 1))
        assert "past a window" in peer.ours.reason


async def test_an_accept_that_is_cancelled_loses_no_stream() -> None:
    async with acted() as peer:
        await until_blocked(peer.ours.accept)  # type: ignore[arg-type]
        with trio.CancelScope() as scope:
            scope.cancel()
            await peer.ours.accept()
        await peer.send(window(1, flags=SYN))
        assert [stream.stream_id for stream in await peer.streams()] == [1]


async def test_an_open_that_is_cancelled_opens_nothing() -> None:
    async with acted() as peer:
        with trio.CancelScope() as scope:
            scope.cancel()
            await peer.ours.open()
        assert await peer.heard() == []
        assert peer.ours.stream_count == 0


# Windows.


async def test_windows_split_and_duplicated_add_up() -> None:
    async with acted() as peer:
        stream = await opened(peer)
        for byte in window(1, 1000) * 2:
            await peer.send(bytes([byte]))
        assert stream.send_window.credit == INITIAL_WINDOW_BYTES + 2000


async def test_a_writer_that_is_cancelled_spends_no_credit_that_comes_later() -> None:
    async with acted() as peer:
        stream = await opened(peer)
        await stream.send_all(bytes(INITIAL_WINDOW_BYTES))
        await until_blocked(lambda: stream.send_all(b"never sent"))
        await peer.heard()
        await peer.send(window(1, 4))
        assert await peer.heard() == []
        await until_blocked(lambda: stream.send_all(b"sent and more"))
        assert [(head.kind, head.length) for head in await peer.heard()] == [(Kind.DATA, 4)]


async def test_a_window_may_end_or_reset_its_stream() -> None:
    async with acted() as peer:
        stream = await opened(peer)
        await peer.send(window(1, 5, FIN))
        assert await stream.receive_some() == b""
        assert stream.send_window.credit == INITIAL_WINDOW_BYTES + 5
        other = await opened(peer, 3)
        await peer.send(window(3, 0, RST))
        with pytest.raises(trio.BrokenResourceError, match="the peer reset"):
            await other.receive_some()


# Ends and resets.


async def test_a_repeated_end_is_one_end() -> None:
    async with acted() as peer:
        stream = await opened(peer)
        await peer.send(data(1, b"x", FIN), data(1, flags=FIN))
        assert [await stream.receive_some(), await stream.receive_some()] == [b"x", b""]
        await stream.send_all(b"y")
        await stream.aclose()
        await peer.send(data(1, flags=FIN))
        assert peer.ours.stream_count == 0
        assert not peer.ours.closed


@pytest.mark.parametrize("frames", [[RST, RST], [RST, FIN], [RST | FIN], [FIN, RST]])
async def test_a_reset_with_an_end_beside_it(frames: list[int]) -> None:
    async with acted() as peer:
        stream = await opened(peer)
        await peer.send(data(1, b"said"), *(data(1, flags=each) for each in frames))
        if frames[0] & FIN:  # all data came before the end, so the reset does not drop it
            assert [await stream.receive_some(), await stream.receive_some()] == [b"said", b""]
        else:
            with pytest.raises(trio.BrokenResourceError, match="the peer reset"):
                await stream.receive_some()
        with pytest.raises(trio.BrokenResourceError, match="the peer reset"):
            await stream.send_all(b"x")
        assert peer.ours.stream_count == 0
        assert not peer.ours.closed


async def test_a_close_that_is_cancelled_has_closed() -> None:
    async with acted() as peer:
        stream = await opened(peer)
        await trio.aclose_forcefully(stream)
        assert await peer.heard() == [Head(Kind.DATA, FIN, 1, 0)]
        with pytest.raises(trio.ClosedResourceError):
            await stream.send_all(b"x")


async def test_half_an_end_ends_nothing() -> None:
    async with acted() as peer:
        stream = await opened(peer)
        await peer.send(data(1, flags=FIN)[:11])
        got: list[bytes] = []

        async def read() -> None:
            got.append(await stream.receive_some())

        await until_blocked(read)
        assert got == []
        await peer.send(data(1, flags=FIN)[11:])
        await until_blocked(read)
        assert got == [b""]


# Pings, and going away.


async def test_each_ping_is_answered_with_its_own_value_also_in_pieces() -> None:
    async with acted() as peer:
        answers: list[int] = []
        queue = peer.ours._queue_control

        def note(kind: Kind, flags: int, stream_id: int, length: int) -> None:
            answers.append(length if (kind, flags) == (Kind.PING, ACK) else -1)
            queue(kind, flags, stream_id, length)

        peer.ours._queue_control = note  # type: ignore[method-assign]
        for byte in ping(7) + ping(7) + ping(2**32 - 1):
            await peer.send(bytes([byte]))
        assert answers == [7, 7, 2**32 - 1]


async def test_answers_to_pings_that_we_never_sent_measure_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with acted() as peer:
        await trio.sleep(3)
        await peer.send(ping(0, ACK), ping(2, ACK), ping(2**32 - 1, ACK))
        assert peer.ours.round_trip_s == 0.0
        await peer.send(ping(1, ACK))
        assert peer.ours.round_trip_s == pytest.approx(3)
        await trio.sleep(50)
        await peer.send(ping(1, ACK))  # again, much later: the shortest round trip stays
        assert peer.ours.shortest_round_trip_s == pytest.approx(3)
        assert not peer.ours.closed


@pytest.mark.parametrize("reason", [0, 1, 2, 2**32 - 1])
async def test_going_away_for_any_reason_once_or_twice(reason: int) -> None:
    async with acted() as peer:
        stream = await opened(peer)
        for byte in encode_head(Kind.GO_AWAY, 0, 0, reason) * 2:
            await peer.send(bytes([byte]))
        with pytest.raises(Unreachable, match="going away"):
            await peer.ours.open()
        await stream.send_all(b"still")
        assert await peer.heard() == [Head(Kind.DATA, 0, 1, 5)]
