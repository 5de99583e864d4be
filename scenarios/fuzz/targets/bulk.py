"""The bulk lane: frames of a hostile member go to the real reader, chunk store and request table."""

import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final, cast

from codec import ChunkKey, seal_chunk
from codec.chunk import BlockDelta, Chunk
from codec.errors import PeerError
from scenarios.fuzz.inputs.binary import fields_of_values
from scenarios.fuzz.inputs.fields import Kind
from scenarios.fuzz.inputs.scene import AUTHORITY, LAYOUT, root_of
from scenarios.fuzz.tables import sizes_of
from scenarios.fuzz.target import Broken, Target, World
from scenarios.fuzz.targets.decoders import _HEAD_NAMES, _head
from swarm.protocol.core.events import Event, HeaderStored, PieceStored, VersionId
from swarm.protocol.core.wire import Blob, Frame, FrameKind, WantBlob, WantBlock
from swarm.runtime.counts import Counts
from swarm.runtime.framing import ByteReader
from swarm.runtime.limits import RuntimeLimits
from swarm.runtime.sessions.inbound import Inbound
from swarm.runtime.sessions.requests import Requests
from swarm.store import ChunkStore, StoredChunk
from swarm.store.disk import Disk

__all__ = ["BulkTarget"]

VERSION: Final = 5


def _chunks() -> list[Chunk]:
    deltas = [BlockDelta(block, 2, bytes(32), random.Random(block).randbytes(20_000)) for block in range(2)]
    return [seal_chunk(ChunkKey(0, VERSION, 0, seq), root_of(0, 4), LAYOUT.hash, deltas, AUTHORITY) for seq in range(3)]


class _Stream:
    """A stream that delivers the given bytes and ends."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def receive_at_least(self, least: int, most: int) -> bytes:
        received, self._data = self._data[:most], self._data[most:]
        return received

    async def receive_exactly(self, size: int, first: bytes) -> memoryview:
        return memoryview(bytearray(first + await self.receive_at_least(0, size - len(first))))


class _NoPatience:
    """Replaces the deadline of the reader, which needs a running clock."""

    def begin(self) -> None:
        return

    def end(self) -> None:
        return


class _World(World):
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="swarm-fuzz-")
        self.chunks = _chunks()
        self.store = ChunkStore(Path(self._folder.name), AUTHORITY.public, Disk())
        self.counts = Counts()
        self.events: list[Event] = []
        parts, writer = cast("Any", self), cast("Any", self)
        applied = cast("Any", SimpleNamespace(newest=VersionId(0, 3)))
        self.inbound = Inbound(
            AUTHORITY.public, self.store, writer, parts, applied, self._post, self.counts, RuntimeLimits()
        )  # fmt: skip
        self.requests = Requests(1 << 20)
        self.asked = 0
        self.sender = b"h" * 32
        self.rng = random.Random(0)

    async def _post(self, event: Event) -> None:
        self.events.append(event)

    def queue_chunk(self, chunk: StoredChunk) -> None:
        """Stand in for `ChunkWriter`."""

    async def free_memory(self, most_bytes: int) -> None:
        """Stand in for `ChunkWriter`."""
        self.store.spill_all()

    async def take_part(self, peer: bytes, requests: Requests, frame: Frame, body: bytes) -> None:
        """Stand in for `PartReceiver`."""
        requests.add_part(frame, body)

    def turn(self, rng: random.Random) -> None:
        self.rng = rng
        if len(self.requests) < 4:
            self.asked += 1
            layout = WantBlob(self.asked, Blob.LAYOUT, bytes(32), 0)
            self.requests.note(layout if self.asked % 2 else WantBlock(self.asked, 0), 1000, exact=self.asked % 2 == 0)
        if rng.randrange(50) == 0:
            self.requests.give_up(self.requests.oldest())

    def give(self, kind: Kind, data: bytes) -> str:
        self.events.clear()
        reader: Any = ByteReader(cast("Any", _Stream(data)))
        task = self.inbound._take_frames(reader, cast("Any", _NoPatience()), self.sender, lambda _: self.requests)
        try:
            task.send(None)
        except StopIteration:
            pass
        except PeerError as error:
            return str(error)
        else:
            raise AssertionError("the reader waits though the stream has ended")
        return " ".join(type(event).__name__ for event in self.events) or "taken"

    def check(self) -> None:
        known = {chunk.header: chunk for chunk in self.chunks}
        for stored in self.store.all():
            chunk = known.get(stored.sealed_header)
            if chunk is None:
                raise Broken("a header is stored that the authority did not sign")
            if (body := self.store.body(stored.key)) is not None and body != chunk.body:
                raise Broken("a body is stored that is not what was signed")
        for event in self.events:
            if isinstance(event, HeaderStored | PieceStored) and event.peer != self.sender:
                raise Broken("an event names another sender")
        if self.rng.randrange(10) == 0:  # let the same chunks be stored again
            self.store.drop(VersionId(0, VERSION))

    def sizes(self) -> dict[str, int]:
        return sizes_of(self.store, "store") | sizes_of(self.requests, "requests")

    def close(self) -> None:
        self._folder.cleanup()


def _values(world: Any, what: int) -> list[Any]:
    """Return the values of a frame's head, and its body."""
    chunk = world.chunks[world.rng.randrange(3)] if world is not None else _chunks()[0]
    seq = world.chunks.index(chunk) if world is not None else 0
    if what == FrameKind.HEADER:
        return [what, 1, 0, VERSION, 0, seq, 0, 0, len(chunk.header), len(chunk.header), chunk.header]
    if what == FrameKind.PIECE:
        index = world.rng.randrange(3) if world is not None else 0
        body = chunk.body[index << 14 : (index + 1) << 14]
        return [what, 1, 0, VERSION, 0, seq, index, 0, len(body), len(body), body]
    number = world.requests.oldest() if world is not None and len(world.requests) else 1
    return [what, 255, 0, VERSION, 0, 0, number, 0, 1000, 1000, bytes(1000)]


def _write(values: list[Any]) -> bytes:
    if len(values) != len(_HEAD_NAMES) + 1:
        return b"\xff" * 60
    body = values[-1]
    return _head(values[:-1]) + (body if isinstance(body, bytes) else b"")


class BulkTarget(Target):
    """The target of this module."""

    name: ClassVar[str] = "bulk"
    about: ClassVar[str] = "frames of the bulk lane, into the store and our requests"
    episode: ClassVar[int] = 20_000

    def __init__(self) -> None:
        kinds = {"HEADER": FrameKind.HEADER, "PIECE": FrameKind.PIECE, "PART": FrameKind.PART}
        self.kinds = [
            Kind(
                name,
                fields_of_values(f"Frame {name}", _values(None, what), [*_HEAD_NAMES, "body"]),
                lambda world, what=what: _values(world, what),
                lambda world, body: body,
                _write,
            )
            for name, what in kinds.items()
        ]

    def world(self, rng: random.Random) -> World:
        return _World()
