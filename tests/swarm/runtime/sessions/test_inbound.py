"""What arrives on bulk streams is verified, stored and posted; invalid content ends the session."""

from pathlib import Path

import pytest
from bench_kit import ME, PEER, bench, chunks, ended, header_frame, part_frame, piece_frame
from runtime_kit import AUTHORITY

from codec import Chunk, ChunkKey, open_header
from swarm.protocol.core.events import HeaderStored, PeerDown, PieceBad, PieceStored, Stray, VersionId
from swarm.protocol.core.wire import Detach, Frame, FrameKind, pack_frame
from swarm.runtime import RuntimeLimits
from swarm.runtime.framing import frame_message


async def test_pieces_are_verified_stored_and_posted(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        stream = await b.bulk()
        made = chunks()[0]
        data = header_frame(made, 3) + piece_frame(made, 0, 3)
        for at in range(0, len(data), 101):
            await stream.send_all(data[at : at + 101])
        await b.settle()
        (header,) = b.core.of(HeaderStored)
        assert (header.peer, header.stripe, header.chunk_id) == (PEER.public, 3, made.id)
        assert header.header_bytes == len(made.header)
        assert sum(header.piece_bytes) == len(made.body)
        assert b.core.of(PieceStored) == [PieceStored(PEER.public, 3, header.key, 0, len(made.body))]
        assert b.store.chunks.body(header.key) == made.body
        # Complete, so written to disk; it stays in memory as well for children that are behind.
        assert b.store.chunks.written_bytes == b.store.chunks.memory_bytes == len(made.body)


async def test_pieces_of_a_chunk_that_is_not_needed_are_thrown_away(tmp_path: Path, autojump_clock: object) -> None:
    """A member with a shard keeps the header only. Its peer is not to blame: it may have been asked before."""
    async with bench(tmp_path) as b:
        await b.control()
        stream = await b.bulk()
        made = chunks()[0]
        b.store.chunks.put_header(open_header(made.header, AUTHORITY.public), made.header, bodiless=True)
        await stream.send_all(header_frame(made, 3) + piece_frame(made, 0, 3))
        await b.settle()
        (header,) = b.core.of(HeaderStored)
        assert not header.wanted
        assert b.core.of(PieceStored) == []
        assert b.core.of(Stray) == [Stray(PEER.public, 3, len(made.body))]
        assert b.store.chunks.body(header.key) is None
        assert b.store.chunks.memory_bytes == 0


async def test_several_bulk_streams_at_once(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path, RuntimeLimits(bulk_streams_in=3)) as b:
        await b.control()
        made = chunks()
        data = [header_frame(each) + piece_frame(each) for each in made]
        streams = [await b.bulk() for _ in made]
        for start in range(0, max(map(len, data)), 1000):  # all of them a little at a time
            for stream, frames in zip(streams, data, strict=True):
                if start < len(frames):
                    await stream.send_all(frames[start : start + 1000])
        await b.settle()
        assert sorted(header.key.seq for header in b.core.of(HeaderStored)) == list(range(len(made)))
        assert all(chunk.whole for chunk in b.store.chunks.all())

        while len(streams) < 4:
            streams.append(await b.bulk())
            await b.settle()
        assert await ended(streams[0])  # one too many: the oldest is closed
        await streams[1].send_all(header_frame(made[0]))
        await b.settle()
        assert b.runtime.counts.duplicates == len(made[0].header)
        assert b.core.of(PeerDown) == []


async def test_duplicates_are_counted_and_posted_but_stored_once(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        stream = await b.bulk()
        made = chunks()[0]
        await stream.send_all((header_frame(made) + piece_frame(made)) * 3)
        await b.settle()
        assert len(b.core.of(HeaderStored)) == len(b.core.of(PieceStored)) == 3
        assert b.runtime.counts.received == made.nbytes
        assert b.runtime.counts.duplicates == 2 * made.nbytes


def _forged(made: Chunk) -> dict[str, tuple[bytes, str]]:
    key = open_header(made.header, AUTHORITY.public).key
    flipped = made.header[:-1] + bytes([made.header[-1] ^ 1])
    body = bytes([made.body[0] ^ 1]) + made.body[1:]
    return {
        "a header without a valid signature": (header_frame(Chunk(flipped, made.body), key=key), "signature"),
        "a header under another key": (header_frame(made, key=ChunkKey(0, 9, 0, 0)), "frame.key"),
        "a piece that was changed": (header_frame(made) + piece_frame(made, body=body), "piece.hash"),
        "a piece cut short": (header_frame(made) + piece_frame(made, body=made.body[:-1]), "piece.length"),
        "a piece that does not exist": (
            header_frame(made) + pack_frame(Frame(FrameKind.PIECE, 0, key, 99, 0, 1, 1)) + b"x", "piece.index",
        ),
        "a piece without its header": (piece_frame(made), "header did not come first"),
        "an oversized frame": (pack_frame(Frame(FrameKind.PIECE, 0, key, 0, 0, 1, (1 << 20) + 1)), "bytes of body"),
        "a frame of an unknown kind": (b"\x09" + bytes(100), "frame: kind 9"),
        "a part that was not requested": (part_frame(1, b"hello"), "was never asked for"),
    }  # fmt: skip


@pytest.mark.parametrize("lie", list(_forged(chunks()[0])))
async def test_invalid_content_ends_the_session_and_is_not_stored(
    tmp_path: Path, autojump_clock: object, lie: str
) -> None:
    async with bench(tmp_path) as b:
        control = await b.control()
        stream = await b.bulk()
        data, why = _forged(chunks()[0])[lie]
        await stream.send_all(data)
        assert await ended(control)
        (bad,) = b.core.of(PieceBad)
        assert bad.peer == PEER.public
        assert why in bad.what
        assert b.core.of(PieceStored) == []
        assert all(not chunk.have for chunk in b.store.chunks.all())
        assert b.runtime.counts.peers_dropped == 1


async def test_bulk_without_a_session_is_not_read(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        await b.peer.connect(ME.public, [b.me.address])
        stream = await b.bulk()
        await stream.send_all(header_frame(chunks()[0]))
        assert await ended(stream)
        assert b.store.chunks.all() == []


async def test_bulk_streams_are_read_only_after_a_grant_was_shown(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        b.core.strangers.add(PEER.public)
        control, stream = await b.control(), await b.bulk()
        made = chunks()[0]
        await stream.send_all(header_frame(made))
        await b.settle(5)
        assert b.store.chunks.all() == []
        b.core.strangers.clear()
        await control.send_all(frame_message(Detach(1)))  # only a message can make a core admit a peer
        await b.settle()
        assert len(b.store.chunks.all()) == 1

        b.core.strangers.add(PEER.public)
        late = await b.bulk()
        await late.send_all(header_frame(chunks()[1]))
        assert await ended(late)  # it is not kept open for ever
        assert len(b.store.chunks.all()) == 1
        await control.aclose()


async def test_a_truncated_frame_ends_the_session_without_a_ban(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        stream = await b.bulk()
        await stream.send_all(header_frame(chunks()[0])[:-5])
        await b.settle(b.runtime._limits.frame_deadline_s + 1)
        assert [event.why for event in b.core.of(PeerDown)] == ["too slow"]
        assert b.core.of(PieceBad) == []


async def test_pieces_of_a_dropped_attempt_are_discarded(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        stream = await b.bulk()
        made = chunks()[0]
        await stream.send_all(header_frame(made))
        await b.settle()
        b.store.chunks.drop(VersionId(0, 1), 0)
        await stream.send_all(piece_frame(made))
        await b.settle()
        assert b.core.of(PieceBad) == b.core.of(PieceStored) == []
        assert b.runtime.counts.stray == len(made.body)
