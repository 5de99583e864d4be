"""What leaves on bulk streams, and in which order."""

from pathlib import Path

import pytest
from bench_kit import PEER, bench, chunks, read
from runtime_kit import AUTHORITY

from codec import open_header
from swarm.protocol.core.events import PeerDown, SendBlob, SendDone, SendHeader, SendPiece
from swarm.protocol.core.wire import FRAME_HEAD, NO_STRIPE, Blob, FrameKind, Lacks, unpack_frame_head
from swarm.runtime import RuntimeLimits
from swarm.runtime.framing import ByteReader
from swarm.transport.base import Lane


async def test_pushes_go_before_pulls_and_pulls_before_blobs(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        made = chunks()[0]
        header = open_header(made.header, AUTHORITY.public)
        stored, _ = b.store.chunks.put_header(header, made.header)
        b.store.chunks.put_piece(header.key, 0, made.body)
        name = b.store.put_file(b"config" * 1000)
        await b.control()
        b.runtime.perform([
            SendBlob(PEER.public, 7, Blob.FILE, name, 0),
            SendPiece(PEER.public, 1, header.key, 0, pull=True),
            SendHeader(PEER.public, 2, header.key),
            SendPiece(PEER.public, 2, header.key, 0),
        ])  # fmt: skip
        await b.settle()
        (stream,) = b.heard[Lane.BULK]
        reader = ByteReader(stream)
        frames = []
        for _ in range(4):
            frame = unpack_frame_head(await reader.exactly(FRAME_HEAD))
            frames.append((frame.kind, frame.stripe, await reader.exactly(frame.length)))
        assert frames == [
            (FrameKind.HEADER, 2, made.header),
            (FrameKind.PIECE, 2, made.body),
            (FrameKind.PIECE, 1, made.body),
            (FrameKind.PART, NO_STRIPE, b"config" * 1000),
        ]
        assert b.core.of(SendDone) == [
            SendDone(PEER.public, 2, header.key, -1),
            SendDone(PEER.public, 2, header.key, 0),
            SendDone(PEER.public, 1, header.key, 0, pull=True),
        ]
        assert b.runtime.counts.pushed == made.nbytes
        assert b.runtime.counts.pulled == len(made.body)
        assert stored.whole


async def test_a_missing_blob_is_answered_with_lacks(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        stream = await b.control()
        b.runtime.perform([SendBlob(PEER.public, 7, Blob.FILE, b"n" * 32, 0)])
        assert await read(stream) == Lacks(7)


async def test_a_peer_that_asks_without_reading_is_closed(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path, RuntimeLimits(bulk_queue_items=100)) as b:
        name = b.store.put_file(b"x" * 1_000_000)
        await b.control()
        b.runtime.perform([SendBlob(PEER.public, n, Blob.FILE, name, 0) for n in range(200)])
        await b.settle()
        assert [event.why for event in b.core.of(PeerDown)] == ["does not read its bulk stream"]


async def test_a_header_that_comes_while_a_blob_is_looked_up_is_sent_after_it(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as b:
        made = chunks()[0]
        header = open_header(made.header, AUTHORITY.public)
        b.store.chunks.put_header(header, made.header)
        name = b.store.put_file(b"config")
        usual = b.runtime._blobs.find_blob

        async def slowly(effect: SendBlob) -> object:
            found = await usual(effect)
            b.runtime.perform([SendHeader(PEER.public, 2, header.key)])
            return found

        monkeypatch.setattr(b.runtime._blobs, "find_blob", slowly)
        await b.control()
        b.runtime.perform([SendBlob(PEER.public, 7, Blob.FILE, name, 0)])
        await b.settle()
        assert b.core.of(PeerDown) == []
        (stream,) = b.heard[Lane.BULK]
        reader = ByteReader(stream)
        kinds = []
        for _ in range(2):
            frame = unpack_frame_head(await reader.exactly(FRAME_HEAD))
            await reader.exactly(frame.length)
            kinds.append(frame.kind)
        assert kinds == [FrameKind.PART, FrameKind.HEADER]
