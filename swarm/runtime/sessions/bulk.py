"""The bulk streams towards one peer: one as a rule; as many as the transport finds the path worth when that is slow.

All frames of a chunk go over one stream, for its header must come before its pieces; the next chunk goes over the
stream with the shortest queue. So a stream that is slow for a while gets less, and nothing needs to be measured. What
ranks below the step waits while any stream has something of the step. A further stream that carried nothing for long is
closed, and its connection with it; the first one stays.
"""

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from codec import ChunkKey
from swarm.protocol.core.events import Event, SendBlob, SendBlock
from swarm.protocol.core.wire import Message
from swarm.runtime.limits import Limits
from swarm.runtime.sessions.outbound import Bulk, Outbound
from swarm.runtime.sessions.pacing import Paced, Pacer
from swarm.transport.base import Stream, Unreachable

__all__ = ["BulkStreams"]

_CROWDED_S: Final = 0.05
"""How often we look whether the streams are too slow for what there is to send, while there is something."""
_ENOUGH_S: Final = 0.25
"""And whether the path is worth more of them now, while there are as many as it is worth."""
_HOMES: Final = 4096
"""Chunks whose stream is remembered: more than are ever under way to one peer."""


class BulkStreams:
    """What is to be sent to one peer, and the tasks that send it."""

    def __init__(
        self, make_queue: Callable[[Callable[[], bool]], Outbound], limits: Limits, pacer: Pacer | None = None
    ) -> None:
        """`make_queue`: an `Outbound`; it is given what says whether anything urgent waits on any stream. `pacer`: of
        this machine's uplink (None: as fast as the streams take it)."""
        self._pacer = pacer or Pacer()
        self._make_queue = lambda: make_queue(lambda: any(queue.urgent for queue in self._queues))
        self._limits = limits
        self._queues = [self._make_queue()]  # the one used longest ago first
        self._first = self._queues[0]
        self._homes: OrderedDict[ChunkKey, Outbound] = OrderedDict()
        self._opening = 0
        self._no_more_until_s = -math.inf
        self._busy = trio.Event()
        self._wanted = trio.Event()

    def __len__(self) -> int:
        """How many streams are in use."""
        return len(self._queues)

    def put(self, effect: Bulk) -> bool:
        """Queue it; False when the peer has let too much gather."""
        queue = self._queue_for(effect)
        queue.put(effect)
        self._busy.set()
        self.be_ready()
        return sum(each.load for each in self._queues) <= self._limits.bulk_queue_items

    @property
    def blobs(self) -> int:
        """Blobs and blocks that wait on all streams."""
        return sum(queue.blobs for queue in self._queues)

    def be_ready(self) -> None:
        """Have the first stream open, even if there is nothing to send yet."""
        self._wanted.set()

    def _queue_for(self, effect: Bulk) -> Outbound:
        if not isinstance(effect, SendBlob | SendBlock):
            home = self._homes.get(effect.key)
            if home is not None:
                self._homes.move_to_end(effect.key)
                return home
        queue = min(self._queues, key=lambda queue: queue.load)
        self._queues.remove(queue)
        self._queues.append(queue)
        if not isinstance(effect, SendBlob | SendBlock):
            self._homes[effect.key] = queue
            if len(self._homes) > _HOMES:
                self._homes.popitem(last=False)
        return queue

    async def run(
        self,
        open_stream: Callable[[], Awaitable[Stream]],
        target_connections: Callable[[], int],
        answer: Callable[[Message], object],
        post: Callable[[Event], Awaitable[None]],
        peer: bytes,
    ) -> None:
        """Write for ever. `target_connections`: how many streams are worth having now, asked when there is more to send
        than the present ones take; for the others see `Outbound.run`, which also says what is raised."""

        async def carry(queue: Outbound, stream: Stream, idle_s: float) -> None:
            async with stream:
                await queue.run(Paced(stream, self._pacer), answer, post, peer, idle_s=idle_s)
                self._retire(queue)  # with nothing in it, and before anybody else runs

        async def open_another() -> None:
            try:
                with trio.fail_after(self._limits.dial_deadline_s):
                    stream = await open_stream()
            except (Unreachable, trio.TooSlowError):  # what there is must do
                self._no_more_until_s = trio.current_time() + self._limits.bulk_retry_s
                return
            finally:
                self._opening -= 1
            queue = self._make_queue()
            self._queues.insert(0, queue)
            await carry(queue, stream, self._limits.bulk_idle_s)

        await self._wanted.wait()
        with trio.fail_after(self._limits.dial_deadline_s):
            stream = await open_stream()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(carry, self._first, stream, math.inf)
            while True:
                await self._busy.wait()
                lacking = target_connections() - len(self._queues) - self._opening
                await trio.sleep(_CROWDED_S if lacking > 0 else _ENOUGH_S)
                if not any(queue.crowded for queue in self._queues):
                    self._busy = trio.Event()
                elif trio.current_time() >= self._no_more_until_s:
                    for _ in range(lacking):
                        self._opening += 1
                        nursery.start_soon(open_another)

    def _retire(self, queue: Outbound) -> None:
        self._queues.remove(queue)
        for key in [key for key, home in self._homes.items() if home is queue]:
            del self._homes[key]
