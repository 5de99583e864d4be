"""Hostile peers that speak the protocol: a stranger, and a member that has joined with a valid ticket."""

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
    """A peer whose messages the test writes. It has no grant."""

    def __init__(self, key: Key, listen: str = "/ip4/127.0.0.1/tcp/0") -> None:
        self.key = key
        self.transport = Libp2pTransport(key, [listen])
        self.bulk_bytes = 0
        self.bulk = b""
        """The bytes of the bulk stream that brought most, kept if `keeps_bulk` is set."""
        self.keeps_bulk = False
        self.reader: ByteReader | None = None
        """Reads the stream on which it sent `Join`."""

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
        """Open a control stream to `peer`, at a port of this machine or at these addresses."""
        with trio.fail_after(15):
            await self.transport.connect(peer, [f"/ip4/127.0.0.1/tcp/{where}"] if isinstance(where, int) else where)
            return await self.transport.open_stream(peer, Lane.CONTROL)

    async def say(self, stream: Any, *messages: Message) -> None:
        await stream.send_all(b"".join(map(frame_message, messages)))

    async def refused(self, victim: bytes, port: int) -> bool:
        """Whether the victim refuses a new session, or does not answer in it."""
        try:
            stream = await self.dial(victim, port)
            await self.say(stream, WantBlock(9, 0))
            with trio.fail_after(3):
                return not await stream.receive_some(1)
        except (*GONE, trio.TooSlowError):
            return True

    async def answers(self, stream: Any, within_s: float = 20.0) -> list[Message]:
        """The messages until the victim closes the session. Raises `TooSlowError` if it does not."""
        reader, heard = ByteReader(stream), []
        with trio.fail_after(within_s):
            try:
                while (found := await read_message(reader, Patience(10.0))) is not None:
                    heard.append(found[0])
            except GONE:
                pass
        return heard

    async def welcomed(self, stream: Any, join: Join, within_s: float = 20.0) -> Welcome | Refused | None:
        """Send `join`; returns the seed's answer, or None if it closes the session or does not answer."""
        reader = self.reader = ByteReader(stream)
        with trio.move_on_after(within_s), suppress(*GONE):
            await self.say(stream, join)
            while (found := await read_message(reader, Patience(10.0))) is not None:
                if isinstance(found[0], Welcome | Refused):
                    return found[0]
        return None


class Member(HostilePeer):
    """A hostile peer with a grant. While `live` runs it listens to the seed and, unless told otherwise, renews its
    lease."""

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
        """The time at which each heartbeat arrived (the loop's clock, s)."""
        self.manifests: list[tuple[float, bytes]] = []
        self.heard: Counter[str] = Counter()
        self.counter = 0

    async def enter(self) -> bool:
        """Join on a new control stream; returns whether the seed gave a grant. May be called again."""
        with suppress(*GONE, trio.TooSlowError):
            self.stream = await self.dial(self.seed, self.where)
            welcome = await self.welcomed(self.stream, self.join)
            if isinstance(welcome, Welcome):
                self.sealed_grant, self.heartbeat = welcome.grant, welcome.heartbeat
                self.grant = open_grant(welcome.grant, self.seed)
                return True
        return False

    async def attach(self, *stripes: int, credit: int = PLENTY) -> None:
        """Attach to the seed in these stripes; it also sends heartbeats then (credit 0: only heartbeats)."""
        await self.say(self.stream, *(Attach(stripe, 0, 0, credit, ()) for stripe in stripes))

    def report(self, **changes: Any) -> bytes:
        """Its next renewal, signed, with some fields changed."""
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
        """Answer heartbeats and pings until the seed closes the session; `renews`: also renew the lease."""
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
        """Open a control stream to another member and send `Hello` with the grant."""
        stream = await self.dial(peer, port)
        await self.say(stream, Hello(self.sealed_grant, 0, 0, 0, 0))
        return stream

    async def hung_up(self, stream: Any, within_s: float = 10.0) -> bool:
        """Whether the other end closes this session in time; messages until then are discarded."""
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
    """`count` members that joined with one ticket."""
    joined = [
        Member(Key(bytes([first + i]) + b"\x99" * 31), ticket, name=f"sybil-{i}", **options) for i in range(count)
    ]
    async with trio.open_nursery() as nursery:
        for member in joined:
            await nursery.start(member.transport.serve, member._accept)
        for member in joined:
            assert await member.enter()
        yield joined
        nursery.cancel_scope.cancel()
