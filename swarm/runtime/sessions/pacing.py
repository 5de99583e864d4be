"""One queue for the machine's uplink: all bulk streams together send no faster than the rate that the user gave.

A version begins on many connections at once. Each finds its own rate, none knows of the others, and together they
overflow the router's queue in a few milliseconds. What is dropped there is sent again a round trip later, when
everything else has arrived. So when the user says what the uplink carries, what leaves is spread over it: first what
the plan has this member push to its children, then the rest (late joiners, pulls, catch-up), which always keeps a fifth
of the uplink. Each class is served in order, so a peer that requests much, on many connections, cannot take the uplink
from those that pass a version on.

Other traffic takes its time, too: packet headers, control messages, retransmissions, and the acknowledgements of what
arrives, which are several percent of a slow uplink beside a fast downlink. Without counting it, it would fill the
router's queue, where acknowledgements would wait, and incoming data would slow down as well. The kernel reports its
bytes.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import trio

from swarm.transport.base import Stream

__all__ = ["Paced", "Pacer"]

BURST_S: Final = 0.01
"""This much of the uplink's time may leave at once: less than any router's queue holds."""
MISSED_S: Final = 0.01
"""This much more may leave at once after a busy machine ran late. Together with what usually waits in the router it is
still less than any router's queue holds; more would overflow it."""
_PART_S: Final = 0.0125
"""The most that one part takes of the uplink, since a part leaves at once: at 200 Mbit/s, a piece of 256 KiB with its
headers."""
_LOOK_S: Final = 0.05
"""How often the departed bytes are read."""
_PAUSE_S: Final = 0.5
"""Other traffic that left during a longer time without a look is ignored: the uplink had room for it."""
_MIN_SHARE: Final = 0.5
"""Of the uplink, kept for paced traffic beside any other traffic: this machine may be a relay of others' bytes."""
_DEFERRABLE_SHARE: Final = 0.2
"""Of the uplink, kept for deferrable traffic: a version that is pushed meanwhile takes at most a quarter longer, and
members that catch up always make progress."""
_MIN_PART_BYTES: Final = 16 << 10
"""One TLS record: smaller parts would only cost turns of the scheduler."""


class Pacer:
    """Decides when the next bytes may leave.

    `mbit`: what the uplink carries, in Mbit/s; infinite when it is unknown. `departed()`: bytes of packets that have
    left this machine so far, admitted ones included; None when the kernel does not say.
    """

    def __init__(self, mbit: float = math.inf, departed: Callable[[], int | None] = lambda: None) -> None:
        self._bytes_s = mbit * 125_000
        self._departed = departed
        self._admitted = 0
        self._unpaced = 0
        """Departed bytes minus admitted bytes at the last look."""
        self._looked_at_s = -math.inf
        self._free_at_s = -math.inf
        """When the uplink has sent everything that was admitted."""
        self._waiting: tuple[deque[trio.CancelScope], deque[trio.CancelScope]] = (deque(), deque())
        """The tasks that wait, in order: planned traffic, deferrable traffic."""
        self._next: trio.CancelScope | None = None
        """The waiting task whose turn is next; it alone has a deadline."""
        self._owed_bytes = 0.0
        """What deferrable traffic has not had of its share while it waited."""
        self.part_bytes = sys.maxsize if math.isinf(mbit) else max(_MIN_PART_BYTES, int(_PART_S * self._bytes_s))
        """The most that may be admitted at once."""

    async def admit(self, size: int, *, deferrable: bool = False) -> None:
        """Wait until `size` bytes may leave. `deferrable`: they may wait for planned traffic.

        Tasks are admitted one at a time. When a busy machine reaches several of them late, no more may leave together
        than a router's queue holds.
        """
        if math.isinf(self._bytes_s):
            return
        if not (self._waiting[0] or (deferrable and self._waiting[1])) and self._is_free():
            self._book(size, deferrable)
            return
        turn = trio.CancelScope()
        self._waiting[deferrable].append(turn)
        try:
            self._wake_next()
            with turn:
                await trio.sleep_forever()
            while not self._is_free():  # noqa: ASYNC110 - waits for a point in time that moves
                await trio.sleep_until(self._free_at_s - BURST_S)
            self._book(size, deferrable)
        finally:
            self._waiting[deferrable].remove(turn)
            self._wake_next()

    def is_free_for(self, size: int) -> bool:
        """Whether `size` bytes of planned traffic may leave now; if they do, call `note_sent`."""
        return math.isinf(self._bytes_s) or (not self._waiting[0] and size <= self.part_bytes and self._is_free())

    def note_sent(self, size: int) -> None:
        """`size` bytes of planned traffic have left that did not wait."""
        if not math.isinf(self._bytes_s):
            self._book(size, deferrable=False)

    def _is_free(self) -> bool:
        self._count_unpaced(trio.current_time())
        return self._free_at_s - BURST_S <= trio.current_time()

    def _book(self, size: int, deferrable: bool) -> None:
        self._free_at_s = max(self._free_at_s, trio.current_time() - MISSED_S) + size / self._bytes_s
        self._admitted += size
        if deferrable:
            self._owed_bytes = max(0.0, self._owed_bytes - size)
        elif self._waiting[1]:
            self._owed_bytes += size * _DEFERRABLE_SHARE / (1 - _DEFERRABLE_SHARE)

    def _wake_next(self) -> None:
        planned, deferrable = self._waiting
        chosen = deferrable if deferrable and (not planned or self._owed_bytes >= self.part_bytes) else planned
        next_ = chosen[0] if chosen else None
        if self._next is not None and self._next is not next_:
            self._next.deadline = math.inf  # another task goes before it
        self._next = next_
        if next_ is not None:
            next_.deadline = self._free_at_s - BURST_S

    def _count_unpaced(self, now: float) -> None:
        """Charge the uplink for other traffic that left since the last look. The difference is negative while admitted
        bytes still wait for their connection."""
        since_s = now - self._looked_at_s
        departed = self._departed() if since_s >= _LOOK_S else None
        if departed is None:
            return
        unpaced = departed - self._admitted
        if since_s < _PAUSE_S:
            self._free_at_s += min((unpaced - self._unpaced) / self._bytes_s, (1 - _MIN_SHARE) * since_s)
        self._unpaced, self._looked_at_s = unpaced, now


class Paced(trio.abc.SendStream):
    """A stream whose bytes wait for their turn on the uplink."""

    def __init__(self, stream: Stream, pacer: Pacer) -> None:
        self._stream, self._pacer = stream, pacer

    @property
    def part_bytes(self) -> int:
        """The most that leaves at once."""
        return self._pacer.part_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send as planned traffic."""
        await self.send([data])

    async def send(self, frames: Sequence[bytes | bytearray | memoryview], *, deferrable: bool = False) -> None:
        """Send `frames`, one after the other, in parts of `part_bytes`. `deferrable`: see `Pacer.admit`."""
        part_bytes = self._pacer.part_bytes
        size = sum(map(len, frames))
        if size <= part_bytes:
            await self._pacer.admit(size, deferrable=deferrable)
            if not self._stream.send_now(*frames):
                await self._stream.send_all(b"".join(frames))
            return
        data = memoryview(b"".join(frames))
        for at in range(0, size, part_bytes):
            part = data[at : at + part_bytes]
            await self._pacer.admit(len(part), deferrable=deferrable)
            if not self._stream.send_now(part):
                await self._stream.send_all(part)

    def send_now(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Send `frames` as planned traffic if that needs no waiting, and return True. False: nothing was sent."""
        size = sum(map(len, frames))
        if not self._pacer.is_free_for(size) or not self._stream.send_now(*frames):
            return False
        self._pacer.note_sent(size)
        return True

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()
