"""How much memory a peer can make us use, whatever it sends in whatever pieces."""

import sys
from dataclasses import replace

import pytest
import trio
import trio.testing
from yamux_kit import LIMITS, acted, data, window

from swarm.transport.yamux import Connection, StreamLink
from swarm.transport.yamux.frames import FIN, INITIAL_WINDOW_BYTES, RST, SYN, Head, Kind, encode_head

BARE = replace(LIMITS, window_budget_bytes=0)


async def test_single_bytes_take_no_more_memory_than_a_block() -> None:
    async with acted(BARE) as peer:
        sent = bytes(range(256)) * 160
        pairs = (data(1, sent[at : at + 2]) for at in range(0, len(sent), 2))
        await peer.send(window(1, flags=SYN), *pairs)
        (stream,) = await peer.streams()
        held = sys.getsizeof(stream._unread) + sum(map(sys.getsizeof, stream._unread))
        assert held < 1.2 * len(sent)
        got = await stream.receive_some(1)  # a piece that is read in part must still be joined correctly
        await peer.send(data(1, b"and more", FIN))
        assert got + b"".join([part async for part in stream]) == sent + b"and more"


async def test_an_ended_and_reset_stream_counts_until_it_is_read() -> None:
    """Otherwise a peer could send a window, end, reset, and start again while our reader is busy."""
    async with acted(replace(BARE, max_inbound_streams=2)) as peer:
        for stream_id in (1, 3):
            await peer.send(data(stream_id, bytes(INITIAL_WINDOW_BYTES), SYN | FIN), data(stream_id, flags=RST))
        first, second = await peer.streams()
        await peer.send(window(5, flags=SYN))
        assert Head(Kind.WINDOW, RST, 5, 0) in await peer.heard()
        assert peer.ours.unread_bytes == 2 * INITIAL_WINDOW_BYTES
        assert sum([len(part) async for part in first]) == INITIAL_WINDOW_BYTES  # its FIN came before the reset
        await second.aclose()  # closing without reading also frees it
        assert peer.ours.stream_count == 0
        await peer.send(window(7, flags=SYN))
        assert len(await peer.streams()) == 1


@pytest.mark.parametrize("close", [True, False])
async def test_a_reset_that_waits_for_its_reader_can_be_dropped(close: bool) -> None:
    async with acted(BARE) as peer:
        await peer.send(
            data(1, b"x", SYN | FIN), data(1, flags=RST), data(1, b"late"), window(1, 5), data(1, flags=FIN)
        )
        (stream,) = await peer.streams()
        assert [head for head in await peer.heard() if head.flags & RST] == [Head(Kind.WINDOW, RST, 1, 0)]
        assert peer.ours.stream_count == 1
        if close:
            await stream.aclose()
        else:
            stream.reset()
        assert peer.ours.stream_count == 0
        assert [head for head in await peer.heard() if head.flags & RST] == []  # the peer has reset it already
        assert not peer.ours.closed


async def test_a_frame_that_dribbles_into_a_closed_stream_is_answered_once() -> None:
    async with acted(BARE) as peer:
        await peer.send(window(1, flags=SYN))
        (stream,) = await peer.streams()
        await stream.aclose()
        await peer.send(encode_head(Kind.DATA, 0, 1, 200_000))
        for _ in range(200):
            await peer.send(bytes(1000))
        assert [head.flags for head in await peer.heard() if head.flags & RST] == [RST]
        await peer.send(data(3, b"whole", SYN))
        (other,) = await peer.streams()
        assert await other.receive_some() == b"whole"


async def test_data_that_waits_for_the_socket_is_bounded_for_any_number_of_writers() -> None:
    near_io, far_io = trio.testing.lockstep_stream_pair()  # takes nothing until it is read
    ours = Connection(StreamLink(near_io), client=True, limits=LIMITS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.run)
        for _ in range(30):
            nursery.start_soon((await ours.open()).send_all, bytes(1_000_000))
        await trio.testing.wait_all_tasks_blocked()
        assert LIMITS.send_queue_bytes <= ours._queued_bytes < LIMITS.send_queue_bytes + LIMITS.send_frame_bytes
        assert len(ours._data) + len(ours._control) < 100
        nursery.cancel_scope.cancel()
    await far_io.aclose()
