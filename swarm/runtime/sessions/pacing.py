"""The machine's own uplink as one queue: all bulk streams together leave no faster than it was said to carry.

A version begins on many connections at once. Each finds its own pace, none knows of the others, and together they
overflow the router in a few milliseconds: what is dropped there is sent again a round trip later, when all the rest has
arrived. So who says what the uplink carries has what leaves spread over it: first what the plan has us push to our
children, then the rest (late joiners, pulls, catching up), which is always left a fifth. Within each, in the order in
which it was given. Else whoever asks for much, on many connections, would take the uplink of those who are to pass a
version on.

What else leaves takes its time, too: packets' headers, control, what is sent again, and the acknowledgements of what
comes in, which for a slow uplink beside a fast downlink are several percent. Not counted, they would gather in the
router's queue until that is full, and every acknowledgement waits in it, so whatever comes in is held up as well. The
kernel says how much it was.
"""

import math
import sys
from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from swarm.transport.base import Stream

__all__ = ["Paced", "Pacer"]

BURST_S: Final = 0.01
"""So much of the uplink's time may leave at once: less than any router's queue."""
MISSED_S: Final = 0.01
"""So much more may leave at once where a busy machine missed its turns: with what waits in the router as a rule, still
less than any holds. More would overflow it."""
_PART_S: Final = 0.0125
"""And no more goes in one part, which leaves at once too: at 200 Mbit/s a piece of 256 KiB, and its headers."""
_LOOK_S: Final = 0.05
"""How often we look what else has left."""
_PAUSE_S: Final = 0.5
"""What left in so long without a look had room enough."""
_LEAST_SHARE: Final = 0.5
"""Of the uplink, whatever else leaves: we may be a relay of others' bytes."""
_REST_SHARE: Final = 0.2
"""Of the uplink, for what may wait: a version that is pushed meanwhile takes a quarter longer at most, and nobody who
catches up stands still."""
_LEAST_PART_BYTES: Final = 16 << 10
"""One TLS record: less would only cost turns."""


class Pacer:
    """When the next bytes may leave. `mbit`: what the uplink carries; infinite: nobody said. `departed()`: bytes of
    packets that have left this machine so far, those of what was admitted included; None: nobody knows."""

    def __init__(self, mbit: float = math.inf, departed: Callable[[], int | None] = lambda: None) -> None:
        self._bytes_s = mbit * 125_000
        self._departed = departed
        self._admitted = 0
        self._beside = 0
        """What had left that was not admitted, at the last look."""
        self._looked_at_s = -math.inf
        self._free_at_s = -math.inf
        self._turns: tuple[deque[trio.CancelScope], deque[trio.CancelScope]] = (deque(), deque())
        """Of those who wait, in order: with what the plan asks of us, and with the rest."""
        self._next: trio.CancelScope | None = None
        """Whose turn comes next: it alone has a deadline."""
        self._due = 0.0
        """Bytes of its share that the rest has not had, while it waits."""
        self.part_bytes = sys.maxsize if math.isinf(mbit) else max(_LEAST_PART_BYTES, int(_PART_S * self._bytes_s))
        """As much as may be admitted at once."""

    async def admit(self, size: int, *, rest: bool = False) -> None:
        """Wait for the turn of so many bytes. `rest`: they may wait for what the plan asks of us. One at a time: of
        those whose turns came while a busy machine did not get to them, no more than a router can hold must leave
        together."""
        if math.isinf(self._bytes_s):
            return
        if not (self._turns[0] or (rest and self._turns[1])) and self._is_free():
            self._book(size, rest)
            return
        turn = trio.CancelScope()
        self._turns[rest].append(turn)
        try:
            self._wake_next()
            with turn:
                await trio.sleep_forever()
            while not self._is_free():  # noqa: ASYNC110 - a point in time, which moves
                await trio.sleep_until(self._free_at_s - BURST_S)
            self._book(size, rest)
        finally:
            self._turns[rest].remove(turn)
            self._wake_next()

    def _is_free(self) -> bool:
        self._count_the_rest(trio.current_time())
        return self._free_at_s - BURST_S <= trio.current_time()

    def _book(self, size: int, rest: bool) -> None:
        self._free_at_s = max(self._free_at_s, trio.current_time() - MISSED_S) + size / self._bytes_s
        self._admitted += size
        if rest:
            self._due = max(0.0, self._due - size)
        elif self._turns[1]:
            self._due += size * _REST_SHARE / (1 - _REST_SHARE)

    def _wake_next(self) -> None:
        planned, rest = self._turns
        turns = rest if rest and (not planned or self._due >= self.part_bytes) else planned
        next_ = turns[0] if turns else None
        if self._next is not None and self._next is not next_:
            self._next.deadline = math.inf  # another goes before it
        self._next = next_
        if next_ is not None:
            next_.deadline = self._free_at_s - BURST_S

    def _count_the_rest(self, now: float) -> None:
        """What else has left since the last look took its time of the uplink. Less than nothing, where parts that were
        admitted wait for their connection."""
        since_s = now - self._looked_at_s
        departed = self._departed() if since_s >= _LOOK_S else None
        if departed is None:
            return
        beside = departed - self._admitted
        if since_s < _PAUSE_S:
            self._free_at_s += min((beside - self._beside) / self._bytes_s, (1 - _LEAST_SHARE) * since_s)
        self._beside, self._looked_at_s = beside, now


class Paced(trio.abc.SendStream):
    """A stream whose bytes wait for their turn."""

    def __init__(self, stream: Stream, pacer: Pacer) -> None:
        self._stream, self._pacer = stream, pacer

    @property
    def part_bytes(self) -> int:
        """As much as leaves at once."""
        return self._pacer.part_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.send(data)

    async def send(self, data: bytes | bytearray | memoryview, *, rest: bool = False) -> None:
        """`rest`: as for `Pacer.admit`."""
        most = self._pacer.part_bytes
        for at in range(0, len(data), most):
            part = data if len(data) <= most else bytes(data[at : at + most])
            await self._pacer.admit(len(part), rest=rest)
            if not self._stream.send_now(part):
                await self._stream.send_all(part)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()
