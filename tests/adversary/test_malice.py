"""A hostile peer against real processes: it gets no data and changes no state."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from kit import checkpoint, holds, layout_of, root_of, step, ticket_of, weights
from peer_kit import GONE, HostilePeer

from codec import BlockDelta, ChunkKey, Manifest, seal_chunk
from codec.sign import Key
from node.host.port import free_port
from node.settings import keyfile
from node.settings.ticket import Ticket
from scenarios.harness.swarm import Swarm, swarm_in
from swarm.protocol.core.boots import latest_boot
from swarm.protocol.core.documents import Heartbeat, seal
from swarm.protocol.core.wire import (
    NO_STRIPE,
    Blob,
    Frame,
    FrameKind,
    HeartbeatNews,
    Hello,
    Join,
    ManifestNews,
    Refused,
    WantBlob,
    WantBlock,
    WantChunk,
    Welcome,
    pack_frame,
)
from swarm.runtime.framing import ByteReader, Patience, read_message
from swarm.transport.base import Lane

pytestmark = [pytest.mark.slow, pytest.mark.adversary]

FIRST = weights()
SECOND = step(FIRST, 1)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """A seed and one node, both at version 0."""
    with swarm_in(tmp_path) as swarm:
        checkpoint(tmp_path / "step_1", SECOND)
        swarm.seed(checkpoint(tmp_path / "base", FIRST), "--listen", f"127.0.0.1:{free_port()}")
        swarm.start("box", "join", swarm.ticket(), "--engine", "none", "--listen", f"127.0.0.1:{free_port()}")
        swarm.until("box", holds(root_of(FIRST)))
        yield swarm
        for name in ("seed", "box"):
            assert "Traceback" not in swarm.log(name, 1 << 22)


def where(swarm: Swarm) -> tuple[Key, int, bytes, int]:
    """The authority's key, the seed's port, the node's public key and port."""
    key = keyfile.load(swarm.home("seed") / "authority.key")
    box = keyfile.load(swarm.home("box") / "node.key")
    ports = [int(swarm.log(name, 1 << 20).partition("/tcp/")[2].partition('"')[0]) for name in ("seed", "box")]
    return key, ports[0], box.public, ports[1]


def join(key: Key, port: int, **options: Any) -> Join:
    capability = Ticket.parse(ticket_of(key, port, **options)).capability
    return Join(capability, ("/ip4/127.0.0.1/tcp/9",), "hostile", "", 100.0, 100.0, False)


async def test_a_peer_without_a_grant_gets_nothing(swarm: Swarm) -> None:
    key, seed_port, box, box_port = where(swarm)
    layout = layout_of(FIRST)
    wants = (
        WantBlock(1, 0), WantBlob(2, Blob.LAYOUT, layout.hash, 0), WantChunk(0, 1, 0, 0, b""),
        WantBlob(3, Blob.HASHES, bytes.fromhex(root_of(FIRST)), 0),
    )  # fmt: skip
    for victim, port in ((box, box_port), (key.public, seed_port)):
        for turn, want in enumerate(wants):
            async with HostilePeer(Key(bytes([turn + 1]) * 32)).running() as hostile:
                stream = await hostile.dial(victim, port)
                await hostile.say(stream, want)
                heard = await hostile.answers(stream)
                assert not any(isinstance(message, Welcome | ManifestNews) for message in heard)
                assert hostile.bulk_bytes == 0
                assert await hostile.refused(victim, port)
    await trio.to_thread.run_sync(swarm.publish, swarm.folder / "step_1")
    await trio.to_thread.run_sync(swarm.until, "box", holds(root_of(SECOND)))


async def test_floods_garbage_and_replays_stop_no_process(swarm: Swarm) -> None:
    key, seed_port, box, box_port = where(swarm)
    async with HostilePeer(Key(b"\x11" * 32)).running() as flood:
        stream = await flood.dial(key.public, seed_port)
        forged = join(key, seed_port, signer=Key(b"\x12" * 32))
        with trio.move_on_after(10):
            with suppress(*GONE):
                await flood.say(stream, *[forged] * 2000)
        refusals = 0
        with trio.move_on_after(3), suppress(*GONE):  # it may close the session before its answer is read
            reader = ByteReader(stream)
            while (found := await read_message(reader, Patience(10.0))) is not None:
                assert isinstance(found[0], Refused)
                refusals += 1
        assert refusals < 20
    for turn, garbage in enumerate(
        (b"\xff" * 4000, b"GET / HTTP/1.1\r\n\r\n" * 50, b"\x05\0\0\0\x01\xc1\xc1\xc1\xc1" * 99)
    ):
        for victim, port in ((box, box_port), (key.public, seed_port)):
            async with HostilePeer(Key(bytes([0x20 + turn]) * 32)).running() as hostile:
                stream = await hostile.dial(victim, port)
                with suppress(*GONE):
                    await stream.send_all(garbage)
                await hostile.answers(stream)
    # The grant that one peer got with a ticket does not admit another peer.
    async with HostilePeer(Key(b"\x31" * 32)).running() as first, HostilePeer(Key(b"\x32" * 32)).running() as second:
        stream = await first.dial(key.public, seed_port)
        await first.say(stream, join(key, seed_port))
        with trio.fail_after(20):
            message, _ = await read_message(ByteReader(stream), Patience(10.0)) or (None, 0)
        assert isinstance(message, Welcome)
        for victim, port in ((box, box_port), (key.public, seed_port)):
            thief = await second.dial(victim, port)
            await second.say(thief, Hello(message.grant, 0, 0, 0, 0), WantBlock(1, 0))
            await second.answers(thief)
            assert second.bulk_bytes == 0
    await trio.to_thread.run_sync(swarm.publish, swarm.folder / "step_1")
    await trio.to_thread.run_sync(swarm.until, "box", holds(root_of(SECOND)))


async def test_a_lying_member_is_dropped_and_the_node_ends_at_the_right_bits(swarm: Swarm) -> None:
    """A member sends flipped bits in a piece and in a header, and a chunk and a manifest of another swarm."""
    key, seed_port, box, box_port = where(swarm)
    layout, root = layout_of(FIRST), bytes.fromhex(root_of(SECOND))  # chunks of the version after the next
    deltas = [BlockDelta(0, 0, bytes(32), bytes(range(256)) * 200)]
    true = seal_chunk(ChunkKey(0, 2, 0, 0), root, layout.hash, deltas, key)
    foreign = seal_chunk(ChunkKey(0, 2, 0, 1), root, layout.hash, deltas, Key(b"\x41" * 32))
    bent = bytearray(true.header)
    bent[200] ^= 1
    piece = bytearray(true.body[:16384])
    piece[1000] ^= 4
    lies = (
        [(FrameKind.HEADER, 0, true.header), (FrameKind.PIECE, 0, bytes(piece))],
        [(FrameKind.HEADER, 0, bytes(bent))],
        [(FrameKind.HEADER, 1, foreign.header)],
        [(FrameKind.PIECE, 5, b"of no header")],
    )
    for turn, lie in enumerate(lies):
        async with HostilePeer(Key(bytes([0x50 + turn]) * 32)).running() as hostile:
            to_box = await member(hostile, key, seed_port, box, box_port)
            bulk = await hostile.transport.open_stream(box, Lane.BULK)
            for kind, seq, body in lie:
                head = pack_frame(Frame(kind, NO_STRIPE, ChunkKey(0, 2, 0, seq), 0, 0, 0, len(body)))
                with suppress(*GONE):  # dropped already
                    await bulk.send_all(head + body)
            await hostile.answers(to_box)
            assert await hostile.refused(box, box_port)
    async with HostilePeer(Key(b"\x60" * 32)).running() as hostile:
        to_box = await member(hostile, key, seed_port, box, box_port)
        other = Key(b"\x61" * 32)
        manifest = Manifest(other.public, 0, 1, 0, root, bytes(32), layout.hash, (), 0, 0)
        await hostile.say(to_box, ManifestNews(manifest.seal(other)))
        await hostile.answers(to_box)
    await trio.to_thread.run_sync(swarm.publish, swarm.folder / "step_1")
    await trio.to_thread.run_sync(swarm.until, "box", holds(root_of(SECOND)))


async def test_an_older_seed_stops_when_a_later_boot_of_its_key_is_heard(swarm: Swarm) -> None:
    key, seed_port, _, _ = where(swarm)
    async with HostilePeer(Key(b"\x71" * 32)).running() as messenger:
        stream = await messenger.dial(key.public, seed_port)
        await messenger.say(stream, join(key, seed_port))
        with trio.fail_after(20):
            await read_message(ByteReader(stream), Patience(10.0))
        beat = Heartbeat(key.public, latest_boot(time.time()), 1, 2e9, 1, 0, 0, b"", b"")
        await messenger.say(stream, HeartbeatNews(seal(beat, key)))
        assert await trio.to_thread.run_sync(swarm.ends, "seed") == 1
    assert "Run one seed per key" in swarm.log("seed")


async def member(hostile: HostilePeer, key: Key, seed_port: int, box: bytes, box_port: int) -> Any:
    """Make `hostile` a member with a valid ticket, and greet the node; returns its control stream to the node."""
    stream = await hostile.dial(key.public, seed_port)
    await hostile.say(stream, join(key, seed_port))
    with trio.fail_after(20):
        found = await read_message(ByteReader(stream), Patience(10.0))
    assert found is not None
    assert isinstance(found[0], Welcome)
    to_box = await hostile.dial(box, box_port)
    await hostile.say(to_box, Hello(found[0].grant, 0, 0, 0, 0))
    return to_box
