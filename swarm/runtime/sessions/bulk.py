"""The bulk streams towards one peer: normally one; on a slow path as many as the transport finds worthwhile.

All frames of a chunk go over one stream, because its header must arrive before its pieces. The next chunk goes over the
stream with the shortest queue. So a stream that is slow for a while gets less, and nothing needs to be measured. Blobs
and blocks wait while any stream has headers or pieces. A further stream that carried nothing for long is closed, with
its connection; the first one stays.
"""

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from codec import ChunkKey
from swarm.protocol.core.events import Event, SendBlob, SendBlock
from swarm.protocol.core.wire import Message
from swarm.runtime.limits import RuntimeLimits
from swarm.runtime.sessions.outbound import Bulk, Outbound
from swarm.runtime.sessions.pacing import Paced, Pacer
from swarm.transport.base import Stream, Unreachable

__all__ = ["BulkStreams", "MakeQueue"]

_CROWDED_S: Final = 0.05
"""While something is queued and streams are lacking: how often to look whether the streams are too slow for it."""
_ENOUGH_S: Final = 0.25
"""While there are as many streams as the path is worth: how often to look whether it is worth more."""
_CHUNKS_KEPT: Final = 4096
"""Chunks whose stream is remembered: more than are ever on their way to one peer."""

MakeQueue = Callable[[Callable[[], bool]], Outbound]
"""`make_queue(must_wait)`: a queue for one more stream; see `Outbound`."""


class BulkStreams:
    """The queues towards one peer, and the tasks that write them to its streams."""

    def __init__(self, make_queue: MakeQueue, limits: RuntimeLimits, pacer: Pacer | None = None) -> None:
        """`pacer`: of this machine's uplink; None: streams are not slowed."""
        self._pacer = pacer or Pacer()
        self._make_queue = lambda: make_queue(lambda: any(queue.urgent for queue in self._queues))
        self._limits = limits
        self._queues = [self._make_queue()]  # the least recently used one first
        self._first = self._queues[0]
        self._queue_of: OrderedDict[ChunkKey, Outbound] = OrderedDict()
        self._opening = 0
        self._no_more_until_s = -math.inf
        self._busy = trio.Event()
        self._wanted = trio.Event()

    def __len__(self) -> int:
        """How many streams are in use."""
        return len(self._queues)

    def put(self, effect: Bulk) -> bool:
        """Queue an effect. False when the peer has let too much gather."""
        queue = self._queue_for(effect)
        queue.put(effect)
        self._busy.set()
        self.be_ready()
        return sum(queue.load for queue in self._queues) <= self._limits.bulk_queue_items

    @property
    def blobs(self) -> int:
        """Blobs and blocks that wait on all streams."""
        return sum(queue.blobs for queue in self._queues)

    def be_ready(self) -> None:
        """Have the first stream opened, even when there is nothing to send yet."""
        self._wanted.set()

    def _queue_for(self, effect: Bulk) -> Outbound:
        if not isinstance(effect, SendBlob | SendBlock):
            known = self._queue_of.get(effect.key)
            if known is not None:
                self._queue_of.move_to_end(effect.key)
                return known
        queue = min(self._queues, key=lambda queue: queue.load)
        self._queues.remove(queue)
        self._queues.append(queue)
        if not isinstance(effect, SendBlob | SendBlock):
            self._queue_of[effect.key] = queue
            if len(self._queue_of) > _CHUNKS_KEPT:
                self._queue_of.popitem(last=False)
        return queue

    async def write_streams(
        self,
        open_stream: Callable[[], Awaitable[Stream]],
        target_connections: Callable[[], int],
        send_message: Callable[[Message], object],
        post: Callable[[Event], Awaitable[None]],
        peer: bytes,
    ) -> None:
        """Write until cancelled.

        `target_connections`: how many streams the path is worth now, asked when more is queued than the present streams
        take. For the other arguments, and for what is raised, see `Outbound.write_to`.
        """

        async def write_stream(queue: Outbound, stream: Stream, idle_s: float) -> None:
            async with stream:
                await queue.write_to(Paced(stream, self._pacer), send_message, post, peer, idle_s=idle_s)
                self._retire(queue)  # it is empty, and no other task runs before this

        async def open_another() -> None:
            try:
                with trio.fail_after(self._limits.dial_deadline_s):
                    stream = await open_stream()
            except (Unreachable, trio.TooSlowError):  # the present streams must do
                self._no_more_until_s = trio.current_time() + self._limits.bulk_retry_s
                return
            finally:
                self._opening -= 1
            queue = self._make_queue()
            self._queues.insert(0, queue)
            await write_stream(queue, stream, self._limits.bulk_idle_s)

        await self._wanted.wait()
        with trio.fail_after(self._limits.dial_deadline_s):
            stream = await open_stream()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write_stream, self._first, stream, math.inf)
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
        for key in [key for key, known in self._queue_of.items() if known is queue]:
            del self._queue_of[key]
