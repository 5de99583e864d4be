"""Several bulk streams towards one peer: which stream carries what, and when streams are opened and closed."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import trio
import trio.testing
from stream_kit import Plain, Taking, lockstep_pair, taking

from codec import ChunkKey
from swarm.protocol.core.events import Event, SendBlob, SendDone, SendHeader, SendPiece
from swarm.protocol.core.wire import FRAME_HEAD, Frame, FrameKind, unpack_frame_head
from swarm.protocol.core.wire import Blob as Want
from swarm.runtime.counts import Counts
from swarm.runtime.framing import ByteReader
from swarm.runtime.limits import RuntimeLimits
from swarm.runtime.sessions.bulk import BulkStreams
from swarm.runtime.sessions.outbound import Blob, Outbound
from swarm.runtime.sessions.pacing import Paced, Pacer
from swarm.transport.base import Unreachable

PEER = b"p" * 32
LIMITS = RuntimeLimits(bulk_queue_items=500, write_bytes=1, bulk_idle_s=100)


def piece_bytes(key: ChunkKey, index: int) -> bytes:
    return bytes([key.seq, index]) * 5000


class Chunks:
    """A store that holds every chunk."""

    def chunk(self, key: ChunkKey) -> Any:
        return type("Stored", (), {"sealed_header": b"header %d" % key.seq})()

    def piece(self, key: ChunkKey, index: int) -> bytes:
        return piece_bytes(key, index)


@dataclass
class Bench:
    """Streams to a peer that reads only when the test does."""

    bulk: BulkStreams
    far: list[Plain] = field(default_factory=list)
    """The other ends, in the order in which they were opened."""
    target_connections: int = 4
    refusing: bool = False
    events: list[Event] = field(default_factory=list)
    find_s: float = 0.0
    """How long a blob takes to be found on the disk."""

    async def open(self) -> Plain:
        await trio.sleep(0.3)
        if self.refusing:
            raise Unreachable("no more")
        near, far = lockstep_pair()
        self.far.append(far)
        return near

    async def post(self, event: Event) -> None:
        self.events.append(event)

    async def frames(self, index: int) -> list[tuple[Frame, bytes]]:
        """The frames of one stream, until it is silent for a second."""
        reader, found = ByteReader(self.far[index]), []
        with trio.move_on_after(1):
            while True:
                frame = unpack_frame_head(await reader.exactly(FRAME_HEAD))
                found.append((frame, await reader.exactly(frame.length)))
        return found


@asynccontextmanager
async def bench(limits: RuntimeLimits = LIMITS) -> AsyncIterator[Bench]:
    async def find(effect: object) -> Blob:
        await trio.sleep(it.find_s)
        return Blob(ChunkKey(0, 0, 0, 0), 3, lambda offset, size: b"xyz"[offset : offset + size])

    def make(hold: Callable[[], bool]) -> Outbound:
        return Outbound(cast("Any", Chunks()), find, Counts(), limits, hold)

    it = Bench(BulkStreams(make, limits))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            it.bulk.write_streams, it.open, lambda: it.target_connections, lambda message: None, it.post, PEER
        )
        yield it
        nursery.cancel_scope.cancel()


def chunk(seq: int, pieces: int = 3) -> list[SendHeader | SendPiece]:
    key = ChunkKey(0, 1, 0, seq)
    return [SendHeader(PEER, 0, key), *(SendPiece(PEER, 0, key, index) for index in range(pieces))]


async def test_a_chunk_keeps_its_stream_and_other_chunks_take_other_streams(autojump_clock: object) -> None:
    async with bench() as b:
        for seq in range(12):
            for effect in chunk(seq):
                assert b.bulk.put(effect)
            await trio.sleep(0.5)
        assert len(b.far) == len(b.bulk) == 4
        seen: list[list[tuple[FrameKind, int]]] = [[] for _ in b.far]
        for index in range(4):
            for frame, body in await b.frames(index):
                seen[index].append((frame.kind, frame.key.seq))
                if frame.kind is FrameKind.PIECE:
                    assert body == piece_bytes(frame.key, frame.number)
        for stream in seen:
            chunks = list(dict.fromkeys(seq for _, seq in stream))
            want = [(FrameKind.HEADER, 0), *[(FrameKind.PIECE, 0)] * 3]
            assert stream == [(kind, seq) for seq in chunks for kind, _ in want]  # whole, in order
        assert sorted(seq for stream in seen for seq in {seq for _, seq in stream}) == list(range(12))
        assert all(len(stream) >= 8 for stream in seen)
        assert len([event for event in b.events if isinstance(event, SendDone)]) == 48


async def test_no_piece_overtakes_its_header_while_a_blob_is_read(autojump_clock: object) -> None:
    """A regression: for a late joiner, the header is pushed and its pieces wait with the blobs, of which the first was
    being read."""
    async with bench(RuntimeLimits()) as b:
        b.find_s = 1.0
        b.bulk.put(SendBlob(PEER, 1, Want.FILE, b"n" * 32, 0))
        await trio.sleep(0.5)
        key = ChunkKey(0, 1, 0, 5)
        b.bulk.put(SendHeader(PEER, 0, key))
        b.bulk.put(SendPiece(PEER, 0, key, 0, late_joiner=True))
        await trio.sleep(2)
        kinds = [frame.kind for frame, _ in await b.frames(0)]
        assert kinds == [FrameKind.PART, FrameKind.HEADER, FrameKind.PIECE]


async def test_a_stream_is_opened_before_it_is_needed(autojump_clock: object) -> None:
    async with bench() as b:
        await trio.sleep(10)
        assert b.far == []
        b.bulk.be_ready()
        await trio.sleep(0.4)
        assert len(b.far) == 1
        for effect in chunk(0):
            b.bulk.put(effect)
        with trio.fail_after(0.1):  # opening it now would take 0.3 s
            await ByteReader(b.far[0]).exactly(FRAME_HEAD)


async def test_a_stream_that_is_stuck_gets_no_more(autojump_clock: object) -> None:
    async with bench() as b:
        b.target_connections = 2
        for effect in [*chunk(0, 30), *chunk(1)]:
            b.bulk.put(effect)
        await trio.sleep(2)
        assert len(b.far) == 2
        for seq in range(2, 8):
            for effect in chunk(seq):
                b.bulk.put(effect)
        assert {frame.key.seq for frame, _ in await b.frames(1)} == {2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize("target_connections", [1, 2])
async def test_no_more_streams_than_the_path_is_worth(autojump_clock: object, target_connections: int) -> None:
    async with bench() as b:
        b.target_connections = target_connections
        for seq in range(20):
            for effect in chunk(seq):
                b.bulk.put(effect)
            await trio.sleep(0.1)
        assert len(b.far) == target_connections


async def test_a_stream_that_keeps_up_stays_alone(autojump_clock: object) -> None:
    async with bench() as b:
        for seq in range(5):
            b.bulk.put(chunk(seq)[0])
            await trio.sleep(1)
            await b.frames(0)
        assert len(b.far) == 1


async def test_idle_streams_are_closed_and_the_first_stays(autojump_clock: object) -> None:
    async with bench() as b:
        for seq in range(6):
            for effect in chunk(seq):
                b.bulk.put(effect)
            await trio.sleep(0.5)
        for index in range(4):
            await b.frames(index)
        await trio.sleep(90)
        assert len(b.bulk) == 4
        await trio.sleep(20)
        assert len(b.bulk) == 1
        for index in (1, 2, 3):
            assert await b.far[index].receive_some() == b""
        for seq in range(6):  # also pieces of chunks whose stream is closed
            b.bulk.put(SendPiece(PEER, 0, ChunkKey(0, 1, 0, seq), 7))
        assert {frame.key.seq for frame, _ in await b.frames(0)} == set(range(6))


async def test_a_stream_that_cannot_be_opened_is_tried_again_later(autojump_clock: object) -> None:
    async with bench() as b:
        b.target_connections = 3
        b.bulk.put(chunk(0)[0])
        await trio.sleep(1)
        b.refusing = True
        for effect in chunk(1, 50):
            b.bulk.put(effect)
        await trio.sleep(5)
        b.refusing = False
        for effect in chunk(2):
            b.bulk.put(effect)
        await trio.sleep(5)
        assert len(b.far) == 1  # not opened at once
        assert len(await b.frames(0)) == 56
        await trio.sleep(LIMITS.bulk_retry_s)
        for effect in chunk(4, 50):
            b.bulk.put(effect)
        await trio.sleep(1)
        assert len(b.far) == 3


async def test_blobs_wait_while_another_stream_has_pieces(autojump_clock: object) -> None:
    async with bench() as b:
        b.target_connections = 2
        for effect in chunk(0, 30):
            b.bulk.put(effect)
        await trio.sleep(2)
        assert len(b.far) == 2
        b.bulk.put(SendBlob(PEER, 7, Want.FILE, b"n" * 32, 0))
        assert await b.frames(1) == []
        assert len(await b.frames(0)) == 31
        ((frame, body),) = await b.frames(1)
        assert (frame.kind, frame.number, body) == (FrameKind.PART, 7, b"xyz")


async def test_put_reports_when_too_much_waits(autojump_clock: object) -> None:
    async with bench() as b:
        b.target_connections = 3
        results = []
        for seq in range(40):
            for effect in chunk(seq, 20):
                results.append(b.bulk.put(effect))
            await trio.sleep(0.1)
        assert results[:500] == [True] * 500
        assert results[-1] is False


async def test_an_error_is_raised_when_the_first_stream_cannot_be_opened(autojump_clock: object) -> None:
    with pytest.RaisesGroup(Unreachable, flatten_subgroups=True):
        async with bench() as b:
            b.refusing = True
            b.bulk.put(chunk(0)[0])
            await trio.sleep_forever()


LARGE = RuntimeLimits(bulk_idle_s=100)


class LargePieces(Chunks):
    """Pieces of 64 KiB."""

    def piece(self, key: ChunkKey, index: int) -> bytes:
        return bytes([key.seq, index]) * (32 << 10)


@asynccontextmanager
async def one_queue(*, follows: bool, idle_s: float = math.inf) -> AsyncIterator[tuple[Outbound, Taking, list[Event]]]:
    """A queue whose task writes to a stream that takes all at once, and the events that were posted or followed."""
    events: list[Event] = []

    def follow(event: Event) -> bool:
        if follows:
            events.append(event)
        return follows

    async def post(event: Event) -> None:
        events.append(event)

    async def find(effect: object) -> Blob:
        return Blob(ChunkKey(0, 0, 0, 0), 3, lambda offset, size: b"xyz"[offset : offset + size])

    queue = Outbound(cast("Any", LargePieces()), find, Counts(), LARGE, lambda: False, follow)
    stream = taking()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(queue.write_to, Paced(stream, Pacer()), print, post, PEER, idle_s=idle_s))
        await trio.testing.wait_all_tasks_blocked()
        yield queue, stream, events
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("follows", [True, False])
async def test_a_large_piece_is_sent_in_the_turn_of_its_effect(autojump_clock: object, follows: bool) -> None:
    async with one_queue(follows=follows) as (queue, stream, events):
        key = ChunkKey(0, 1, 0, 3)
        for index in range(2):
            queue.put(SendPiece(PEER, 0, key, index))
        assert [unpack_frame_head(taken[:FRAME_HEAD]).number for taken in stream.taken] == [0, 1]
        assert stream.taken[1][FRAME_HEAD:] == LargePieces().piece(key, 1)
        assert not len(queue)
        await trio.testing.wait_all_tasks_blocked()
        assert events == [SendDone(PEER, 0, key, 0), SendDone(PEER, 0, key, 1)]
        assert queue._counts.pushed == 2 * len(LargePieces().piece(key, 0))


async def test_a_piece_is_not_sent_before_what_is_queued(autojump_clock: object) -> None:
    """Headers, pulls and late joiners' pieces are queued, and the piece behind them; so is one that the stream does not
    take. Each is counted once."""
    async with one_queue(follows=True) as (queue, stream, events):
        key = ChunkKey(0, 1, 0, 3)
        for effect in (
            SendHeader(PEER, 0, key),
            SendPiece(PEER, 0, key, 1),
            SendPiece(PEER, 0, key, 2, pull=True),
            SendPiece(PEER, 0, key, 3, late_joiner=True),
        ):
            queue.put(effect)
            assert stream.taken == []
        await trio.testing.wait_all_tasks_blocked()
        assert events == [SendDone(PEER, 0, key, index, pull=index == 2) for index in (-1, 1, 2, 3)]
        stream.is_open = False
        queue.put(SendPiece(PEER, 0, key, 4))
        assert len(queue) == 1
        await trio.testing.wait_all_tasks_blocked()
        assert events[-1] == SendDone(PEER, 0, key, 4)
        size = len(LargePieces().piece(key, 0))
        assert (queue._counts.pushed, queue._counts.pulled) == (3 * size + len(b"header 3"), size)


async def test_a_stream_that_sends_at_once_is_not_idle(autojump_clock: object) -> None:
    async with one_queue(follows=True, idle_s=100) as (queue, stream, _):
        for index in range(5):
            await trio.sleep(60)
            queue.put(SendPiece(PEER, 0, ChunkKey(0, 1, 0, 3), index))
            assert len(stream.taken) == index + 1
        await trio.sleep(101)
        queue.put(SendPiece(PEER, 0, ChunkKey(0, 1, 0, 3), 5))
        assert len(stream.taken) == 5, "the task has ended: nothing was sent for 100 s"
