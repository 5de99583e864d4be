"""A peer that speaks the wire and means ill: a stranger at first, a member once it has joined by a real ticket."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import trio

from codec.errors import PeerError
from codec.sign import Key
from node.settings.ticket import Ticket
from swarm.protocol.core.documents import Grant, Report, heartbeat_hash, open_grant, seal
from swarm.protocol.core.wire import (
    Attach,
    HeartbeatNews,
    Hello,
    Join,
    ManifestNews,
    Message,
    Ping,
    Pong,
    Refused,
    Reports,
    WantBlock,
    Welcome,
)
from swarm.runtime.framing import ByteReader, Patience, frame_message, read_message
from swarm.transport.base import Lane, Unreachable
from swarm.transport.libp2p import Libp2pTransport

GONE = (PeerError, trio.BrokenResourceError, trio.ClosedResourceError, Unreachable)
PLENTY = 1 << 40
"""Credit for more than any test sends."""


class HostilePeer:
    """One end of the wire, driven by hand."""

    def __init__(self, key: Key, listen: str = "/ip4/127.0.0.1/tcp/0") -> None:
        self.key = key
        self.transport = Libp2pTransport(key, [listen])
        self.bulk_bytes = 0
        self.bulk = b""
        """What came by the bulk stream that brought most, if it is kept."""
        self.keeps_bulk = False
        self.reader: ByteReader | None = None
        """Of the stream on which it asked to come in."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["HostilePeer"]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.transport.serve, self._accept)
            yield self
            nursery.cancel_scope.cancel()

    async def _accept(self, peer: bytes, lane: Lane, stream: Any) -> None:
        kept: list[bytes] = []
        try:
            while data := await stream.receive_some(65536):
                if lane is Lane.BULK:
                    self.bulk_bytes += len(data)
                    if self.keeps_bulk:
                        kept.append(bytes(data))
                        self.bulk = max(self.bulk, b"".join(kept), key=len)
        except GONE:
            pass

    async def dial(self, peer: bytes, where: int | list[str]) -> Any:
        """A control stream to a victim, at a port of this machine or at these addresses."""
        with trio.fail_after(15):
            await self.transport.connect(peer, [f"/ip4/127.0.0.1/tcp/{where}"] if isinstance(where, int) else where)
            return await self.transport.open_stream(peer, Lane.CONTROL)

    async def say(self, stream: Any, *messages: Message) -> None:
        await stream.send_all(b"".join(map(frame_message, messages)))

    async def refused(self, victim: bytes, port: int) -> bool:
        """Whether the victim listens to it no more."""
        try:
            stream = await self.dial(victim, port)
            await self.say(stream, WantBlock(9, 0))
            with trio.fail_after(3):
                return not await stream.receive_some(1)
        except (*GONE, trio.TooSlowError):
            return True

    async def answers(self, stream: Any, within_s: float = 20.0) -> list[Message]:
        """What comes until the victim closes the session, which it must."""
        reader, heard = ByteReader(stream), []
        with trio.fail_after(within_s):
            try:
                while (found := await read_message(reader, Patience(10.0))) is not None:
                    heard.append(found[0])
            except GONE:
                pass
        return heard

    async def welcomed(self, stream: Any, join: Join, within_s: float = 20.0) -> Welcome | Refused | None:
        """Ask to come in: what the seed says to that; None when it hangs up or says nothing."""
        reader = self.reader = ByteReader(stream)
        with trio.move_on_after(within_s), suppress(*GONE):
            await self.say(stream, join)
            while (found := await read_message(reader, Patience(10.0))) is not None:
                if isinstance(found[0], Welcome | Refused):
                    return found[0]
        return None


class Member(HostilePeer):
    """A hostile with a grant. While `live` runs it listens to the seed; it renews its lease if it is told to."""

    def __init__(self, key: Key, ticket: str, *, name: str = "hostile", addrs: tuple[str, ...] = ()) -> None:
        super().__init__(key)
        self.ticket = Ticket.parse(ticket)
        self.seed = self.ticket.authority
        self.where = list(self.ticket.addrs)
        self.join = Join(self.ticket.capability, addrs, name, "", 0.0, 100.0, False)
        self.stream: Any = None
        self.sealed_grant = b""
        self.grant: Grant | None = None
        self.heartbeat = b""
        self.beats: list[float] = []
        """When each heartbeat arrived (the loop's clock)."""
        self.manifests: list[tuple[float, bytes]] = []
        self.heard: Counter[str] = Counter()
        self.counter = 0

    async def enter(self) -> bool:
        """Join, on a new control stream; whether the seed gave a grant. May be called again after a hang-up."""
        with suppress(*GONE, trio.TooSlowError):
            self.stream = await self.dial(self.seed, self.where)
            welcome = await self.welcomed(self.stream, self.join)
            if isinstance(welcome, Welcome):
                self.sealed_grant, self.heartbeat = welcome.grant, welcome.heartbeat
                self.grant = open_grant(welcome.grant, self.seed)
                return True
        return False

    async def attach(self, *stripes: int, credit: int = PLENTY) -> None:
        """Have the seed push these stripes, and all heartbeats with them (credit 0: heartbeats alone)."""
        await self.say(self.stream, *(Attach(stripe, 0, 0, credit, ()) for stripe in stripes))

    def report(self, **changes: Any) -> bytes:
        """Its next renewal, signed, with some fields made other than they should be."""
        assert self.grant is not None
        self.counter += 1
        seen = heartbeat_hash(self.heartbeat)
        honest = Report(
            self.seed, self.key.public, self.grant.slot, self.grant.serial, self.counter, seen,
            0, 0, 0, 0, "", 0, 0, 0.0, False, 1.0,
        )  # fmt: skip
        return seal(msgspec.structs.replace(honest, **changes), self.key)

    async def renew(self, **changes: Any) -> None:
        await self.say(self.stream, Reports(0, (self.report(**changes),)))

    async def live(self, *, renews: bool = True, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until the seed hangs up."""
        assert self.reader is not None
        task_status.started()
        with suppress(*GONE):
            while (found := await read_message(self.reader, Patience(60.0))) is not None:
                message = found[0]
                self.heard[type(message).__name__] += 1
                if isinstance(message, HeartbeatNews):
                    self.heartbeat = message.heartbeat
                    self.beats.append(trio.current_time())
                    if renews:
                        await self.renew()
                elif isinstance(message, ManifestNews):
                    self.manifests.append((trio.current_time(), message.manifest))
                elif isinstance(message, Ping):
                    await self.say(self.stream, Pong(message.nonce))

    async def greet(self, peer: bytes, port: int) -> Any:
        """Its control stream to another member, with its grant shown."""
        stream = await self.dial(peer, port)
        await self.say(stream, Hello(self.sealed_grant, 0, 0, 0, 0))
        return stream

    async def hung_up(self, stream: Any, within_s: float = 10.0) -> bool:
        """Whether the other end closes this session in time; what it says until then is read and forgotten."""
        with trio.move_on_after(within_s):
            try:
                while await stream.receive_some(1 << 16):
                    pass
            except GONE:
                pass
            return True
        return False


@asynccontextmanager
async def members(ticket: str, count: int, first: int = 1, **options: Any) -> AsyncIterator[list[Member]]:
    """So many, all in by one ticket."""
    made = [Member(Key(bytes([first + i]) + b"\x99" * 31), ticket, name=f"sybil-{i}", **options) for i in range(count)]
    async with trio.open_nursery() as nursery:
        for each in made:
            await nursery.start(each.transport.serve, each._accept)
        for each in made:
            assert await each.enter()
        yield made
        nursery.cancel_scope.cancel()
