"""A runtime with a scripted core, and a peer that the test controls over a memory transport."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio
from runtime_kit import AUTHORITY, Log, here_and_now, key, new_replica, step

from codec import Chunk, ChunkKey, open_header, seal_chunk
from swarm.protocol.core.events import Close, Effect, Event, PieceBad, VersionId
from swarm.protocol.core.wire import NO_STRIPE, Frame, FrameKind, Message, pack_frame
from swarm.runtime import Manifests, Runtime, RuntimeLimits
from swarm.runtime.framing import ByteReader, Patience, read_message
from swarm.runtime.replica.model import Model
from swarm.runtime.services import ReplicaServices
from swarm.store import Store
from swarm.transport.base import Lane
from swarm.transport.memory import Link, MemoryNetwork, MemoryTransport

ME, PEER, OTHER = key(5), key(6), key(7)


@dataclass
class Scripted:
    """A core that records its events."""

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
    """A runtime, and a peer that is only a transport."""

    runtime: Runtime
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
async def bench(
    folder: Path, limits: RuntimeLimits | None = None, link: Link | None = None, restored: VersionId | None = None
) -> AsyncIterator[Bench]:
    """`restored`: the version that the start restored, of some bits."""
    network = MemoryNetwork(link)
    me, peer = MemoryTransport(network, ME), MemoryTransport(network, PEER)
    core, log = Scripted(), Log()
    limits = limits or RuntimeLimits()
    with Store(folder, AUTHORITY.public) as store:
        model = Model(store)
        if restored is not None:
            model.adopt(new_replica(), restored)
        manifests = Manifests(AUTHORITY.public)
        services = ReplicaServices.build(store, model, manifests, limits, here_and_now)
        runtime = Runtime(core, me, store, manifests, log, services=services, limits=limits, run_sync=here_and_now)
        heard: dict[Lane, list[trio.abc.HalfCloseableStream]] = {Lane.CONTROL: [], Lane.BULK: []}

        async def accept(_: bytes, lane: Lane, stream: trio.abc.HalfCloseableStream) -> None:
            heard[lane].append(stream)
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            await nursery.start(peer.serve, accept)
            yield Bench(runtime, core, store, model, network, me, peer, nursery, heard)
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
        found = await read_message(ByteReader(stream), Patience(10))
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
