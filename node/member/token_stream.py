"""Tells the seed the tokens of followed leases as the engine draws them.

The first tokens go at once. While more come, a message is sent every `EVERY_S` with all that came since the last one,
so that a node with many streams sends few messages. What waits is bounded by the samples that are being generated.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import trio

from node.engines.base import DrawnTokens
from node.engines.link import Draws
from node.ledger.fields import MAX_BODY_BYTES, MAX_CAPACITY
from node.ledger.messages import encode
from node.ledger.token_messages import MAX_DRAWN, Drawn, DrawnPart
from node.member.lease_inventory import Held, Job

__all__ = ["TokenStream"]

EVERY_S: Final = 0.01
"""Between two messages: half of the 20 ms that a token may take beyond the round trip."""
FOLLOWED: Final = 2 * MAX_CAPACITY
"""Leases that are remembered as followed: those that a node may hold, and those that are on their way."""
PART_BYTES: Final = 64
"""An upper estimate of a part without its tokens, which have eight bytes each, and as many for each likeliest token."""
MESSAGE_BYTES: Final = MAX_BODY_BYTES - (4 << 10)
"""Of the parts of one message."""


class TokenStream:
    """The tokens of one node's followed leases. `send(body)` hands a message to the seed, and may lose it."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._followed: OrderedDict[int, None] = OrderedDict()
        self._parts: list[DrawnPart] = []
        self._news = trio.Event()

    def follow(self, leases: Iterable[int]) -> None:
        """The seed wants the tokens of these leases, which may come later."""
        for lease in leases:
            self._followed[lease] = None
        while len(self._followed) > FOLLOWED:
            self._followed.popitem(last=False)

    def draws(self, jobs: Sequence[Job]) -> Draws | None:
        """The callback for an engine that generates `jobs`; None if nobody follows one of them."""
        if not any(held.id in self._followed for held, _ in jobs):
            return None
        return lambda index, drawn: self._add(*jobs[index], drawn)

    def _add(self, held: Held, sample: int, drawn: DrawnTokens) -> None:
        if held.id in self._followed and sample in held.drawing:
            self._parts.append(DrawnPart.of(held.id, held.message.token, sample, drawn))
            self._news.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            parts, self._parts = self._parts, []
            for message in _messages(parts):
                await self._send(encode(message))
            await trio.sleep(EVERY_S)


def _messages(parts: Sequence[DrawnPart]) -> list[Drawn]:
    """`parts` in order, in as few messages as they fit into."""
    found: list[list[DrawnPart]] = []
    room = 0
    for part in parts:
        size = PART_BYTES + len(part.token_ids) + len(part.logprobs) + len(part.top)
        if size > room or len(found[-1]) >= MAX_DRAWN:
            found.append([])
            room = MESSAGE_BYTES
        found[-1].append(part)
        room -= size
    return [Drawn(tuple(some)) for some in found]
