"""The shell under a scripted core: what it does with peers that break the rules, fall silent, cross or flood."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
from shell_kit import AUTHORITY, Log, key, new_replica, step

from codec import Chunk, ChunkKey, open_header, seal_chunk
from swarm.protocol.events import (
    Close,
    Dial,
    Effect,
    Event,
    HeaderStored,
    Heard,
    PeerDown,
    PeerUp,
    Persist,
    Persisted,
    PieceBad,
    PieceStored,
    Send,
    SendBlob,
    SendDone,
    SendHeader,
    SendPiece,
    SetTimer,
    Timer,
    VersionId,
)
from swarm.protocol.wire import (
    NO_STRIPE,
    Blob,
    Detach,
    Frame,
    FrameKind,
    Lacks,
    Message,
    WantBlob,
    WantBlock,
    Work,
    pack_frame,
)
from swarm.shell import Limits, Manifests, Shell, here_and_now
from swarm.shell.answers import Answers
from swarm.shell.framing import ByteReader, frame_message, read_message
from swarm.shell.jobs import Jobs
from swarm.shell.model import Model
from swarm.store import Store
from swarm.transport.base import Lane
from swarm.transport.memory import Link, MemoryNetwork, MemoryTransport

ME, PEER, OTHER = key(5), key(6), key(7)


@dataclass
class Scripted:
    """A core that remembers what happened."""

    events: list[Event] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    strangers: set[bytes] = field(default_factory=set)

    def admits(self, peer: bytes) -> bool:
        return peer not in self.strangers

    def start(self, now: float, addrs: tuple[str, ...]) -> list[Effect]:
        return []

    def apply(self, event: Event, now: float) -> list[Effect]:
        self.events.append(event)
        self.at_s.append(now)
        return [Close(event.peer, event.what, 60.0)] if isinstance(event, PieceBad) else []

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if type(event) is kind]


@dataclass
class Bench:
    """A shell, and a peer that is a bare transport."""

    shell: Shell
    core: Scripted
    store: Store
    model: Model
    network: MemoryNetwork
    me: MemoryTransport
    peer: MemoryTransport
    nursery: trio.Nursery
    heard: dict[Lane, list[trio.abc.HalfCloseableStream]]

    async def control(self, peer: MemoryTransport | None = None) -> trio.abc.HalfCloseableStream:
        """The peer dials us."""
        peer = peer or self.peer
        await peer.connect(self.me.key, [self.me.address])
        stream = await peer.open_stream(self.me.key, Lane.CONTROL)
        await trio.testing.wait_all_tasks_blocked()
        return stream

    async def bulk(self, peer: MemoryTransport | None = None) -> trio.abc.HalfCloseableStream:
        return await (peer or self.peer).open_stream(self.me.key, Lane.BULK)

    async def settle(self, seconds: float = 1.0) -> None:
        await trio.sleep(seconds)


@asynccontextmanager
async def bench(folder: Path, limits: Limits | None = None, link: Link | None = None) -> AsyncIterator[Bench]:
    network = MemoryNetwork(link)
    me, peer = MemoryTransport(network, ME), MemoryTransport(network, PEER)
    core, log = Scripted(), Log()
    limits = limits or Limits()
    with Store(folder, AUTHORITY.public) as store:
        model = Model(store)
        manifests = Manifests(AUTHORITY.public)
        jobs = Jobs(store, model, manifests, limits, here_and_now)
        answers = Answers(store, jobs, manifests, here_and_now)
        shell = Shell(
            core, me, store, manifests, log,
            authority=AUTHORITY.public, jobs=jobs, answers=answers, limits=limits, run_sync=here_and_now,
        )  # fmt: skip
        heard: dict[Lane, list[trio.abc.HalfCloseableStream]] = {Lane.CONTROL: [], Lane.BULK: []}

        async def accept(_: bytes, lane: Lane, stream: trio.abc.HalfCloseableStream) -> None:
            heard[lane].append(stream)
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            await nursery.start(shell.run)
            await nursery.start(peer.serve, accept)
            yield Bench(shell, core, store, model, network, me, peer, nursery, heard)
            nursery.cancel_scope.cancel()


def chunks() -> list[Chunk]:
    replica = new_replica()
    return [
        seal_chunk(ChunkKey(0, 1, 0, seq), replica.root, replica.layout.hash, [delta], AUTHORITY)
        for seq, delta in enumerate(step(replica, 1))
    ]


def header_frame(chunk: Chunk, stripe: int = 0, key: ChunkKey | None = None) -> bytes:
    key = key or open_header(chunk.header, AUTHORITY.public).key
    size = len(chunk.header)
    return pack_frame(Frame(FrameKind.HEADER, stripe, key, 0, 0, size, size)) + chunk.header


def piece_frame(chunk: Chunk, index: int = 0, stripe: int = 0, body: bytes | None = None) -> bytes:
    header = open_header(chunk.header, AUTHORITY.public)
    if body is None:
        piece = header.piece_range(index)
        body = chunk.body[piece.start : piece.stop]
    return pack_frame(Frame(FrameKind.PIECE, stripe, header.key, index, 0, len(body), len(body))) + body


def part_frame(request: int, body: bytes, offset: int = 0, total: int | None = None) -> bytes:
    total = offset + len(body) if total is None else total
    return pack_frame(Frame(FrameKind.PART, NO_STRIPE, ChunkKey(0, 0, 0, 0), request, offset, total, len(body))) + body


async def read(stream: trio.abc.ReceiveStream) -> Message | None:
    with trio.fail_after(30):
        found = await read_message(ByteReader(stream), 10)
        return None if found is None else found[0]


async def ended(stream: trio.abc.ReceiveStream) -> bool:
    """Whether the other side has closed or broken it."""
    try:
        with trio.fail_after(60):
            while await stream.receive_some():
                pass
    except trio.BrokenResourceError:
        return True
    return True


# ---------------------------------------------------------------- control


async def test_messages_both_ways_in_any_pieces(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        stream = await b.control()
        sent = [Work(b"one"), Detach(3), Work(b"x" * 100_000)]
        data = b"".join(map(frame_message, sent))
        for at in range(0, len(data), 777):
            await stream.send_all(data[at : at + 777])
        await b.settle()
        assert [event.message for event in b.core.of(Heard)] == sent
        assert b.core.of(PeerUp) == [PeerUp(PEER.public, False, b.peer.address)]
        b.shell.perform([Send(PEER.public, Detach(1))])
        assert await read(stream) == Detach(1)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff\xff\xff\xff", "message: 4294967295 bytes"),
        (b"\0\0\0\0", "message: 0 bytes"),
        (b"\x03\0\0\0\x63\x91\x01", "protocol version"),
        (b"\x03\0\0\0\x01\xc1\xc1", "message:"),
    ],
    ids=["oversized", "empty", "of another protocol", "garbled"],
)
async def test_a_malformed_message_costs_the_session(
    tmp_path: Path, autojump_clock: object, data: bytes, why: str
) -> None:
    async with bench(tmp_path) as b:
        stream = await b.control()
        await stream.send_all(data)
        assert await ended(stream)
        await b.settle()
        (bad,) = b.core.of(PieceBad)
        assert why in bad.what
        assert isinstance(b.core.events[-1], PeerDown)
        again = await b.control()  # banned by the core's Close
        assert await ended(again)
        assert len(b.core.of(PeerUp)) == 1


async def test_half_a_message_has_a_deadline_and_silence_has_none(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        stream = await b.control()
        await b.settle(3600)
        assert b.core.of(PeerDown) == []
        await stream.send_all(b"\x09\0\0")
        await b.settle(b.shell._limits.frame_deadline_s + 1)
        (down,) = b.core.of(PeerDown)
        assert down.why == "too slow"
        assert b.core.of(PieceBad) == []


async def test_a_peer_that_does_not_read_is_closed(tmp_path: Path, autojump_clock: object) -> None:
    limits = Limits(control_queue_bytes=1 << 20)
    async with bench(tmp_path, limits) as b:
        await b.control()
        for _ in range(30):
            b.shell.perform([Send(PEER.public, Work(b"x" * 100_000))])
        await b.settle()
        (down,) = b.core.of(PeerDown)
        assert down.why == "does not read its control stream"


async def test_a_frozen_peer_is_found_by_the_write_deadline(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        for _ in range(8):
            b.shell.perform([Send(PEER.public, Work(b"x" * 100_000))])
        await b.settle(b.shell._limits.write_deadline_s + 1)
        assert [event.why for event in b.core.of(PeerDown)] == ["too slow"]


async def test_a_close_lets_the_last_words_out(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        stream = await b.control()
        b.shell.perform([Send(PEER.public, Detach(1)), Close(PEER.public, "enough"), Send(PEER.public, Detach(2))])
        assert await read(stream) == Detach(1)
        assert await ended(stream)
        await b.settle()
        assert b.core.of(PeerDown) == [PeerDown(PEER.public, why="enough")]


async def test_a_dial_that_fails_says_so(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        b.shell.perform([Dial(OTHER.public, ("/memory/nowhere",))])
        await b.settle()
        (down,) = b.core.of(PeerDown)
        assert down.dial_failed
        assert "does not answer" in down.why


# ---------------------------------------------------------------- crossing


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
async def test_when_both_dial_one_session_stays(tmp_path: Path, autojump_clock: object, delay_s: float) -> None:
    network = MemoryNetwork(Link(delay_s=delay_s))
    cores, shells, transports = [], [], []
    async with trio.open_nursery() as nursery:
        for n, owner in enumerate((ME, PEER)):
            transport, core = MemoryTransport(network, owner), Scripted()
            store = Store(tmp_path / str(n), AUTHORITY.public)
            manifests = Manifests(AUTHORITY.public)
            shell = Shell(core, transport, store, manifests, Log(), authority=AUTHORITY.public, run_sync=here_and_now)
            await nursery.start(shell.run)
            cores.append(core)
            shells.append(shell)
            transports.append(transport)
        for n in (0, 1):
            other = transports[1 - n]
            shells[n].perform([Dial(other.key, (other.address,))])
        await trio.sleep(1)
        for n in (0, 1):
            up, down = len(cores[n].of(PeerUp)), len(cores[n].of(PeerDown))
            assert up - down == 1
            assert len(list(shells[n].peers)) == 1
        dialers = [next(iter(shell.peers)).dialed for shell in shells]
        assert sorted(dialers) == [False, True]
        assert dialers[0] == (ME.public < PEER.public)
        for n in (0, 1):
            shells[n].perform([Send(transports[1 - n].key, Work(bytes([n])))])
        await trio.sleep(1)
        assert [event.message for event in cores[0].of(Heard)] == [Work(b"\1")]
        assert [event.message for event in cores[1].of(Heard)] == [Work(b"\0")]
        nursery.cancel_scope.cancel()


async def test_a_peer_that_returns_replaces_its_old_session(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        old = await b.control()
        new = await b.control()
        assert await ended(old)
        await new.send_all(frame_message(Work(b"back")))
        await b.settle()
        assert [type(event) for event in b.core.events] == [PeerUp, PeerDown, PeerUp, Heard]


# ---------------------------------------------------------------- bulk, in


async def test_pieces_are_verified_stored_and_told(tmp_path: Path, autojump_clock: object) -> None:
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
        assert b.store.chunks.memory_bytes == 0  # whole, so written


async def test_several_bulk_streams_at_once(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path, Limits(bulk_streams_in=3)) as b:
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
        assert await ended(streams[0])  # one too many: the oldest goes
        await streams[1].send_all(header_frame(made[0]))
        await b.settle()
        assert b.shell.counts.duplicates == len(made[0].header)
        assert b.core.of(PeerDown) == []


async def test_duplicates_are_counted_and_told_but_stored_once(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        stream = await b.bulk()
        made = chunks()[0]
        await stream.send_all((header_frame(made) + piece_frame(made)) * 3)
        await b.settle()
        assert len(b.core.of(HeaderStored)) == len(b.core.of(PieceStored)) == 3
        assert b.shell.counts.received == made.nbytes
        assert b.shell.counts.duplicates == 2 * made.nbytes


def _forged(made: Chunk) -> dict[str, tuple[bytes, str]]:
    key = open_header(made.header, AUTHORITY.public).key
    flipped = made.header[:-1] + bytes([made.header[-1] ^ 1])
    body = bytes([made.body[0] ^ 1]) + made.body[1:]
    return {
        "a header that nobody signed": (header_frame(Chunk(flipped, made.body), key=key), "signature"),
        "a header under another key": (header_frame(made, key=ChunkKey(0, 9, 0, 0)), "frame.key"),
        "a piece that was changed": (header_frame(made) + piece_frame(made, body=body), "piece.hash"),
        "a piece cut short": (header_frame(made) + piece_frame(made, body=made.body[:-1]), "piece.length"),
        "a piece that does not exist": (
            header_frame(made) + pack_frame(Frame(FrameKind.PIECE, 0, key, 99, 0, 1, 1)) + b"x", "piece.index",
        ),
        "a piece without its header": (piece_frame(made), "header did not come first"),
        "an oversized frame": (pack_frame(Frame(FrameKind.PIECE, 0, key, 0, 0, 1, (1 << 20) + 1)), "bytes of body"),
        "a frame of no kind": (b"\x09" + bytes(100), "frame: kind 9"),
        "a part that nobody asked for": (part_frame(1, b"hello"), "was never asked for"),
    }  # fmt: skip


@pytest.mark.parametrize("lie", list(_forged(chunks()[0])))
async def test_a_lie_costs_the_session_and_is_not_stored(tmp_path: Path, autojump_clock: object, lie: str) -> None:
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
        assert b.shell.counts.peers_dropped == 1


async def test_bulk_without_a_session_is_not_read(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        await b.peer.connect(ME.public, [b.me.address])
        stream = await b.bulk()
        await stream.send_all(header_frame(chunks()[0]))
        assert await ended(stream)
        assert b.store.chunks.all() == []


async def test_bulk_is_read_once_a_grant_was_shown_and_not_before(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        b.core.strangers.add(PEER.public)
        control, stream = await b.control(), await b.bulk()
        made = chunks()[0]
        await stream.send_all(header_frame(made))
        await b.settle(5)
        assert b.store.chunks.all() == []
        b.core.strangers.clear()
        await b.settle()
        assert len(b.store.chunks.all()) == 1

        b.core.strangers.add(PEER.public)
        late = await b.bulk()
        await late.send_all(header_frame(chunks()[1]))
        assert await ended(late)  # and not for ever
        assert len(b.store.chunks.all()) == 1
        await control.aclose()


async def test_a_frame_cut_off_costs_the_session_but_is_no_lie(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        stream = await b.bulk()
        await stream.send_all(header_frame(chunks()[0])[:-5])
        await b.settle(b.shell._limits.frame_deadline_s + 1)
        assert [event.why for event in b.core.of(PeerDown)] == ["too slow"]
        assert b.core.of(PieceBad) == []


async def test_pieces_of_a_dropped_attempt_are_thrown_away(tmp_path: Path, autojump_clock: object) -> None:
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
        assert b.shell.counts.stray == len(made.body)


# ---------------------------------------------------------------- bulk, out


async def test_pushes_go_before_pulls_and_pulls_before_blobs(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        made = chunks()[0]
        header = open_header(made.header, AUTHORITY.public)
        stored, _ = b.store.chunks.put_header(header, made.header)
        b.store.chunks.put_piece(header.key, 0, made.body)
        name = b.store.put_file(b"config" * 1000)
        await b.control()
        b.shell.perform([
            SendBlob(PEER.public, 7, Blob.FILE, name, 0),
            SendPiece(PEER.public, 1, header.key, 0, pull=True),
            SendHeader(PEER.public, 2, header.key),
            SendPiece(PEER.public, 2, header.key, 0),
        ])  # fmt: skip
        await b.settle()
        (stream,) = b.heard[Lane.BULK]
        reader = ByteReader(stream)
        from swarm.protocol.wire import FRAME_HEAD, unpack_frame_head

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
        assert b.shell.counts.pushed == made.nbytes
        assert b.shell.counts.pulled == len(made.body)
        assert stored.whole


async def test_what_we_lack_is_said(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        stream = await b.control()
        b.shell.perform([SendBlob(PEER.public, 7, Blob.FILE, b"n" * 32, 0)])
        assert await read(stream) == Lacks(7)


async def test_a_peer_that_asks_without_reading_is_closed(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path, Limits(bulk_queue_items=100)) as b:
        name = b.store.put_file(b"x" * 1_000_000)
        await b.control()
        b.shell.perform([SendBlob(PEER.public, n, Blob.FILE, name, 0) for n in range(200)])
        await b.settle()
        assert [event.why for event in b.core.of(PeerDown)] == ["does not read its bulk stream"]


# ---------------------------------------------------------------- what we ask for


async def test_a_file_must_have_the_hash_it_was_asked_by(tmp_path: Path, autojump_clock: object) -> None:
    from blake3 import blake3

    async with bench(tmp_path) as b:
        await b.control()
        stream = await b.bulk()
        body = b"tokenizer" * 40_000
        name = blake3(body).digest()
        b.shell.perform([Send(PEER.public, WantBlob(1, Blob.FILE, name, 0))])
        half = len(body) // 2
        await stream.send_all(part_frame(1, body[:half], 0, len(body)) + part_frame(1, body[half:], half))
        await b.settle()
        assert b.store.file(name) == body
        assert [type(event).__name__ for event in b.core.events] == ["PeerUp", "PartsDone"]

        b.shell.perform([Send(PEER.public, WantBlob(2, Blob.FILE, b"n" * 32, 0))])
        await stream.send_all(part_frame(2, body))
        await b.settle()
        assert "blob.hash" in b.core.of(PieceBad)[0].what


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (part_frame(1, b"x", 0, 1 << 39), "part.total"),
        (part_frame(1, b"x" * 10, 0, 20) + part_frame(1, b"x" * 10, 5, 20), "out of order"),
        (part_frame(1, b"x" * 10, 0, 20) + part_frame(1, b"x" * 5, 10, 30), "out of order"),
        (part_frame(1, b"", 0, 20), "part.length"),
    ],
    ids=["too large", "overlapping", "another total", "empty"],
)
async def test_parts_come_in_order_and_within_bounds(
    tmp_path: Path, autojump_clock: object, frames: bytes, why: str
) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        stream = await b.bulk()
        b.shell.perform([Send(PEER.public, WantBlob(1, Blob.FILE, b"n" * 32, 0))])
        await stream.send_all(frames)
        await b.settle()
        assert why in b.core.of(PieceBad)[0].what


async def test_a_block_is_taken_only_with_its_versions_hash(tmp_path: Path, autojump_clock: object) -> None:
    from codec import Manifest

    async with bench(tmp_path) as b:
        truth = new_replica(1)
        b.model.replica = new_replica(2)
        manifest = Manifest(AUTHORITY.public, 0, 0, 0, bytes(32), truth.root, truth.layout.hash, (), 0, 0)
        await b.control()
        stream = await b.bulk()
        b.shell.perform([Send(PEER.public, WantBlock(1, 0))])
        await stream.send_all(part_frame(1, truth.read_block(0)))
        await b.settle()
        assert type(b.core.events[-1]).__name__ == "UnknownLabel"  # no manifest, so no hash to hold it against

        b.shell.manifests.note(manifest.seal(AUTHORITY))
        b.shell.perform([Send(PEER.public, WantBlob(2, Blob.HASHES, truth.root, 0))])
        await stream.send_all(part_frame(2, truth.hashes.tobytes()))
        await b.settle()
        assert b.core.events[-1].differs == (0, 1, 2)  # type: ignore[attr-defined]

        b.shell.perform([Send(PEER.public, WantBlock(3, 0)), Send(PEER.public, WantBlock(4, 0))])
        await stream.send_all(part_frame(3, truth.read_block(0)))
        await b.settle()
        assert b.shell.counts.stray == len(truth.read_block(0))  # asked for again since: this one does not count
        await stream.send_all(part_frame(4, truth.read_block(0)))
        await b.settle()
        assert b.core.events[-1].request == 4  # type: ignore[attr-defined]
        assert b.model.replica.read_block(0) == truth.read_block(0)

        b.shell.perform([Send(PEER.public, WantBlock(5, 1))])
        await stream.send_all(part_frame(5, bytes(len(truth.read_block(1)))))
        await b.settle()
        assert "block.hash" in b.core.of(PieceBad)[0].what
        assert b.model.replica.read_block(1) != bytes(len(truth.read_block(1)))


# ---------------------------------------------------------------- timers, records, life


async def test_timers_come_when_due_and_the_newest_of_a_name_counts(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        now = trio.current_time()
        b.shell.perform([SetTimer("a", now + 5), SetTimer("b", now + 2), SetTimer("a", now + 1)])
        await b.shell.apply(Timer("wake"))  # the loop sleeps until it looks at its timers again
        await b.settle(10)
        due = [(event.name, at) for event, at in zip(b.core.events, b.core.at_s, strict=True) if event != Timer("wake")]
        assert due == [("a", now + 1), ("b", now + 2)]


async def test_records_are_durable_before_it_is_said(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        b.shell.perform([Persist("t1", "grant/1", b"a"), Persist("t2", "grant/1", b"b")])
        await b.settle()
        assert b.core.of(Persisted) == [Persisted("t1"), Persisted("t2")]
        assert b.store.records.get("grant/1") == b"b"


async def test_nothing_outlives_the_shell(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        control = await b.control()
        bulk = await b.bulk()
        await bulk.send_all(header_frame(chunks()[0])[:50])
        await control.send_all(b"\x09")
    assert b.me.peers() == []


async def test_a_queue_forgets_what_was_dropped(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        key = ChunkKey(0, 1, 0, 0)
        b.shell.perform([SendPiece(PEER.public, 0, key, 0)])
        await b.settle()
        assert b.core.of(SendDone) == [SendDone(PEER.public, 0, key, 0)]  # its place in the queue is free
