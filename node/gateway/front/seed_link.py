"""The connection of a front to one seed: sends requests, and hands out what comes back by the number of the request."""

import contextlib
import math
import socket
from collections.abc import Callable

import trio

from codec.errors import PeerError
from node.gateway.front.messages import Answer, Ask, Delivered, End, Over, Part, Taken, ToFront, ToSeed
from node.gateway.front.outbox import Outbox
from node.ipc.async_channel import AsyncChannel
from node.ipc.channel import ChannelClosed, close_fds

__all__ = ["SeedLink"]


class SeedLink:
    """One seed, until it ends."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes ownership of `sock`, whose other end the seed has."""
        self._channel = AsyncChannel.adopt(sock, ToFront)
        self._outbox = Outbox(ToSeed)
        self._answers: dict[int, trio.MemorySendChannel[Answer | Part | End]] = {}
        self._untaken: dict[int, tuple[Ask, Callable[[], None]]] = {}
        """The requests whose bodies wait to be sent or are in the seed's memory, and whom to tell when they are not."""
        self._last = 0

    async def run(self) -> None:
        """Carry messages until the seed ends, or this is cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                await self._receive()
                nursery.cancel_scope.cancel()
        finally:
            self._channel.close()
            for answer in self._answers.values():
                answer.close()
            self._answers.clear()
            self._untaken.clear()

    async def _send(self) -> None:
        with contextlib.suppress(ChannelClosed):  # the task that receives sees it, too
            await self._outbox.run(self._channel)

    async def _receive(self) -> None:
        while True:
            try:
                frame, fds = await self._channel.recv()
            except (ChannelClosed, PeerError):
                return
            close_fds(fds)
            for message in frame.messages:
                if (untaken := self._untaken.pop(message.id, None)) is not None:
                    untaken[1]()
                if not isinstance(message, Taken) and (answer := self._answers.get(message.id)) is not None:
                    answer.send_nowait(message)

    def ask(
        self, request: Callable[[int], Ask], taken: Callable[[], None]
    ) -> tuple[int, "trio.MemoryReceiveChannel[Answer | Part | End]"]:
        """Send `request(number)`. Returns the number, and what comes back for it until the seed ends; windows bound
        how much that is. `taken` is called when the body has left the seed's memory."""
        self._last += 1
        answer, found = trio.open_memory_channel[Answer | Part | End](math.inf)
        self._answers[self._last] = answer
        asked = request(self._last)
        self._untaken[self._last] = asked, taken
        self._outbox.post(asked, len(asked.body) + sum(map(len, asked.before or ())))
        return self._last, found

    def delivered(self, number: int, count: int) -> None:
        """The client has read `count` bytes of this answer."""
        self._outbox.post(Delivered(number, count))

    def forget(self, number: int) -> None:
        """Nothing more of this answer is needed. Safe to call twice."""
        if (answer := self._answers.pop(number, None)) is None:
            return
        answer.close()
        untaken = self._untaken.pop(number, None)
        if untaken is None or not self._outbox.withdraw(untaken[0]):
            self._outbox.post(Over(number))
