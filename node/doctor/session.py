"""The sessions of a visit: one control stream to a peer, and the blocks that the peer sends on bulk streams."""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Final

import trio

from codec.errors import PeerError
from swarm.guard import Source, guarded
from swarm.protocol.core.wire import (
    FRAME_HEAD,
    FrameKind,
    Lacks,
    Message,
    Ping,
    Pong,
    WantBlob,
    WantBlock,
    unpack_frame_head,
)
from swarm.runtime.framing import ByteReader, Patience, frame_message, read_message
from swarm.runtime.sessions.requests import Requests
from swarm.transport.base import Lane, PeerKey, Stream, Transport

__all__ = ["Blocks", "Fetched", "VisitSession"]

_FRAME_S: Final = 10.0
"""For the rest of a message or frame that has begun."""
_SEND_S: Final = 5.0
"""For the peer to take a message: one that does not read must not hold up the visit."""
_UNREAD: Final = 256
"""Messages that wait to be looked at: a roster's changes, heartbeats, attaches of a few seconds."""
_LATE_BYTES: Final = 8 << 20
"""Bytes that may still come of requests that were given up."""


class VisitSession:
    """A control stream to one peer, read by a task of its own, which answers pings."""

    def __init__(self, peer: PeerKey, stream: Stream) -> None:
        self.peer = peer
        self._stream = stream
        self._sending = trio.Lock()
        """The reading task answers pings while the visit sends."""
        self._heard, self._messages = trio.open_memory_channel[Message](_UNREAD)

    @classmethod
    @asynccontextmanager
    async def open(cls, transport: Transport, peer: PeerKey) -> AsyncIterator["VisitSession"]:
        """Raises `Unreachable` unless the peer is connected; what the block raises, in a group."""
        session = cls(peer, await transport.open_stream(peer, Lane.CONTROL))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session._read)
                yield session
                nursery.cancel_scope.cancel()
        finally:
            await trio.aclose_forcefully(session._stream)

    async def _read(self) -> None:
        """Until the peer ends the stream, or breaks a rule; who waits for a message then hears that it is over."""
        with self._heard, guarded(Source.STREAM, self.peer):
            reader, patience = ByteReader(self._stream), Patience(_FRAME_S)
            while (read := await read_message(reader, patience)) is not None:
                message, _ = read
                if isinstance(message, Ping):
                    await self.send(Pong(message.nonce))
                else:
                    with suppress(trio.WouldBlock):  # nobody waits for so many
                        self._heard.send_nowait(message)

    async def send(self, message: Message) -> None:
        """Raises `trio.TooSlowError` when the peer does not read; the session is of no further use then."""
        with trio.fail_after(_SEND_S):
            async with self._sending:
                await self._stream.send_all(frame_message(message))

    async def receive(self, kinds: type[Any] | UnionType, within_s: float) -> Any:
        """The next message of these kinds; others are dropped. Raises `trio.TooSlowError`, and `PeerError` when the
        session is over."""
        with trio.fail_after(within_s):
            async for message in self._messages:
                if isinstance(message, kinds):
                    return message
        raise PeerError("the peer closed the session")

    async def round_trip_ms(self, times: int, within_s: float) -> float:
        """The shortest of `times` round trips, which together may take `within_s`. Raises as `receive` does."""
        found: list[float] = []
        with trio.fail_after(within_s):
            for nonce in range(times):
                began = trio.current_time()
                await self.send(Ping(nonce))
                while (await self.receive(Pong, within_s)).nonce != nonce:
                    pass
                found.append(1e3 * (trio.current_time() - began))
        return min(found)

    async def until_closed(self) -> None:
        """Wait until the peer has closed the stream; the deadline is the caller's."""
        async for _ in self._messages:
            pass


@dataclass
class Fetched:
    """What came of the requests to one peer: complete answers, and all bytes. `seconds`: from the first request."""

    answers: list[bytes] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0
    lacked: int = 0


class Blocks:
    """Takes what peers send on bulk streams: only what was requested, in order and within its bound."""

    def __init__(self) -> None:
        self._open: dict[PeerKey, tuple[Requests, Fetched]] = {}
        self._came = trio.Event()

    async def accept(self, peer: PeerKey, lane: Lane, stream: Stream) -> None:
        """As `swarm.transport.base.Accept`. Sessions that peers open are closed: the visit has its own."""
        if lane is Lane.CONTROL:
            return
        reader = ByteReader(stream)
        while not await reader.at_end():
            with trio.fail_after(_FRAME_S):
                frame = unpack_frame_head(bytes(await reader.exactly(FRAME_HEAD)))
                body = await reader.exactly(frame.length)
            if frame.kind != FrameKind.PART or peer not in self._open:
                continue  # a parent pushes a version: nothing here wants it
            requests, fetched = self._open[peer]
            answer = requests.add_part(frame, body)
            fetched.nbytes += len(body)
            if answer is not None:
                fetched.answers.append(answer.data)
            self._came.set()
            self._came = trio.Event()

    async def fetch(
        self,
        session: VisitSession,
        wants: Sequence[WantBlob | WantBlock],
        sizes: Sequence[int],
        within_s: float,
        *,
        exact: bool,
    ) -> Fetched:
        """Request `wants`, of at most `sizes` bytes each (`exact`: of that size), and wait until all have come, the
        peer lacks the rest, or `within_s` has passed."""
        requests, fetched = Requests(_LATE_BYTES), Fetched()
        self._open[session.peer] = requests, fetched
        began = trio.current_time()

        async def hear_refusals() -> None:
            while True:
                refused: Lacks = await session.receive(Lacks, math.inf)
                requests.give_up(refused.request)
                fetched.lacked += 1
                self._came.set()
                self._came = trio.Event()

        with trio.move_on_after(within_s):
            for want, size in zip(wants, sizes, strict=True):
                requests.note(want, size, exact=exact)
                await session.send(want)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hear_refusals)
                while len(requests):
                    await self._came.wait()
                nursery.cancel_scope.cancel()
        fetched.seconds = max(trio.current_time() - began, 1e-6)
        while len(requests):
            requests.give_up(requests.oldest())
        return fetched
