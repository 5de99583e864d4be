"""Answers the requests of a front, in the seed."""

import contextlib
from typing import Final

import trio

from codec.errors import PeerError
from node.gateway.front.messages import WINDOW_BYTES, Answer, Ask, Delivered, End, Over, Part, Taken, ToFront
from node.gateway.front.outbox import Outbox
from node.http.memory_budget import BudgetFull, MemoryBudget
from node.http.messages import RETRY, Check, CutShort, Handler, Request, RequestHead, Response, Streaming, failure
from node.ipc.async_channel import AsyncChannel
from node.ipc.channel import ChannelClosed, close_fds
from swarm.guard import Source, guarded

__all__ = ["Backend"]

PART_BYTES: Final = 8 << 20
"""Of an answer in one message."""
MOST: Final = 1 << 14
"""Requests of a front at a time. It bounds its connections itself."""


class _Answering:
    """One request that is being answered."""

    def __init__(self, number: int, outbox: Outbox) -> None:
        self.scope = trio.CancelScope()
        self._number, self._outbox = number, outbox
        self._unread = 0
        """Bytes of parts that the client has not read, as far as the front has said."""
        self._room = trio.Event()
        self._note: bytes | None = None

    def note(self, note: bytes) -> None:
        """See `Request.note`."""
        self._note = note

    async def send(self, data: bytes) -> None:
        """Send a part. One that is too large for a message is cut, and no other seed can go on in it."""
        for at in range(0, len(data) - PART_BYTES, PART_BYTES):
            await self._send(data[at : at + PART_BYTES], None)
        note, self._note = self._note, None
        await self._send(data[(len(data) - 1) // PART_BYTES * PART_BYTES :], note)

    async def _send(self, data: bytes, note: bytes | None) -> None:
        """Send as soon as the client has read enough of what came before."""
        while self._unread >= WINDOW_BYTES:
            await self._room.wait()
        await trio.lowlevel.checkpoint()
        self._unread += len(data)
        self._outbox.post(Part(self._number, data, note), len(data))

    def delivered(self, count: int) -> None:
        self._unread -= count
        self._room.set()
        self._room = trio.Event()

    async def send_response(self, response: Response) -> None:
        body = response.body
        whole = body if isinstance(body, bytes) and len(body) <= PART_BYTES else None
        head = Answer(self._number, response.status, response.content_type, list(response.headers), whole)
        self._outbox.post(head, len(whole or b""))
        if whole is None:
            parts = body if not isinstance(body, bytes) else lambda send: send(body)
            self._outbox.post(End(self._number, whole=await self._send_parts(parts)))

    async def _send_parts(self, body: Streaming) -> bool:
        with guarded(Source.HTTP):
            try:
                await body(self.send)
            except CutShort:
                return False
            return True
        return False


class Backend:
    """The requests of one front."""

    def __init__(self, channel: AsyncChannel, handler: Handler, check: Check) -> None:
        """`channel`: to the front, which receives `ToSeed`. `check`: judges a request by its head, as the front does;
        a key may have been removed meanwhile."""
        self._channel, self._handler, self._check = channel, handler, check
        self._outbox = Outbox(ToFront)
        self._bodies = MemoryBudget()
        self._answering: dict[int, _Answering] = {}

    async def run(self) -> None:
        """Answer until the front ends, or this is cancelled. Raises `PeerError`, in a group, for an invalid message."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send)
            try:
                while True:
                    frame, fds = await self._channel.recv()
                    close_fds(fds)
                    for message in frame.messages:
                        self._take(message, nursery)
            except ChannelClosed:
                nursery.cancel_scope.cancel()

    async def _send(self) -> None:
        with contextlib.suppress(ChannelClosed):  # the task that receives sees it, too
            await self._outbox.run(self._channel)

    def _take(self, message: Ask | Delivered | Over, nursery: trio.Nursery) -> None:
        found = self._answering.get(message.id)
        match message:
            case Ask():
                if found is not None or len(self._answering) >= MOST:
                    raise PeerError("front: a request's number is taken, or there are too many")
                self._answering[message.id] = answering = _Answering(message.id, self._outbox)
                nursery.start_soon(self._answer, message, answering)
            case Delivered(count=count) if found is not None:
                found.delivered(count)
            case Over() if found is not None:
                found.scope.cancel()
            case _:
                pass  # it was answered meanwhile

    async def _answer(self, asked: Ask, answering: _Answering) -> None:
        try:
            with answering.scope:
                await self._answer_request(asked, answering)
        finally:
            del self._answering[asked.id]

    async def _answer_request(self, asked: Ask, answering: _Answering) -> None:
        head = RequestHead(asked.method, asked.path, asked.query, asked.headers, len(asked.body))
        if (refusal := self._check(head)) is not None:
            await answering.send_response(refusal)
            return
        try:
            await self._bodies.reserve(head.length)
        except BudgetFull:
            why = "Too much is being sent at the moment. Try again."
            await answering.send_response(failure(429, why, headers=RETRY))
            return
        request = Request(head, asked.body, self._bodies)
        request.note, request.before = answering.note, asked.before
        request.on_release = lambda: self._outbox.post(Taken(asked.id))
        try:
            response = await self._handler(request)
            request.release_body()
            await answering.send_response(response)
            await trio.sleep_forever()  # until the client has it, and this is cancelled: it holds memory until then
        finally:
            request.release_body()
            request.until_sent.close()
