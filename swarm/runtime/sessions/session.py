"""One session with one peer: a control stream both ways, and bulk streams out once there is something to send.

A session ends in one way: its scope is cancelled, or one of its tasks fails, and all of it goes down together.
"""

import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from swarm.protocol.core.bucket import Bucket
from swarm.protocol.core.events import Heard, SendBlob, SendBlock
from swarm.protocol.core.wire import MAX_MESSAGE_BYTES, Lacks, Message, decode
from swarm.runtime.counts import Counts
from swarm.runtime.framing import ByteReader, Patience, frame_message, read_frame
from swarm.runtime.limits import Limits
from swarm.runtime.sessions.bulk import BulkStreams
from swarm.runtime.sessions.outbound import Bulk
from swarm.runtime.sessions.requests import Requests
from swarm.transport.base import Stream

__all__ = ["Session"]

OpenBulk = Callable[[], Awaitable[Stream]]
Post = Callable[..., Awaitable[None]]
"""`post(event, size=0)`: give the core an event of so many bytes."""


@dataclass(slots=True)
class _Batch:
    """What one write takes: messages one after another, `write_bytes` in all, or one that is longer."""

    data: bytearray
    messages: int


class Session:
    """`dialed`: by us. `since_s`: the loop's clock when it began."""

    def __init__(
        self,
        peer: bytes,
        stream: Stream,
        *,
        dialed: bool,
        bulk: BulkStreams,
        counts: Counts,
        limits: Limits,
    ) -> None:
        self.peer = peer
        self.dialed = dialed
        self.since_s = trio.current_time()
        self.bulk = bulk
        self.requests = Requests(limits.request_late_bytes)
        self.why = ""
        """Why we ended it; empty as long as we did not."""
        self.crossed = False
        """Another session with the same peer takes its place."""
        self.gone = trio.Event()
        """Set when nothing of it runs any more, and the core knows."""
        self._stream = stream
        self._counts = counts
        self._limits = limits
        self._scope = trio.CancelScope()
        self._queue: deque[_Batch] = deque()
        self._queued_bytes = 0
        self._queued_messages = 0
        self._wake = trio.Event()
        self._drained: trio.Event | None = None
        """Set when little enough waits for the peer, if somebody waits for that."""
        self._turns = Bucket(limits.messages_s, limits.messages_at_once)
        self._closing = False

    # ------------------------------------------------------------ what the shell asks for

    def send(self, message: Message) -> int:
        """Send a control message, or queue it; how many bytes it has. A peer that does not drain its queue is
        closed."""
        if self._closing:
            return 0
        data = frame_message(message)
        if not self._queue and self._stream.send_now(data):
            self._counts.control_sent += len(data)
            return len(data)
        if self._queue and len(self._queue[-1].data) + len(data) <= self._limits.write_bytes:
            self._queue[-1].data += data  # an object each would take five times the memory of the shortest answers
            self._queue[-1].messages += 1
        else:
            self._queue.append(_Batch(bytearray(data), 1))
        self._queued_bytes += len(data)
        self._queued_messages += 1
        self._wake.set()
        limits = self._limits
        if self._queued_bytes > limits.control_queue_bytes or self._queued_messages > limits.control_queue_messages:
            self.end("does not read its control stream")
        return len(data)

    def send_bulk(self, effect: Bulk) -> None:
        if isinstance(effect, SendBlob | SendBlock) and self.bulk.blobs >= self._limits.blobs_waiting:
            self.end("asks for more blocks than it takes")  # an honest peer asks for a sixteenth of that at a time
            return
        if not self._closing and not self.bulk.put(effect):
            self.end("does not read its bulk stream")

    def close(self, why: str) -> None:
        """End it as soon as what is queued on the control stream has left, in `flush_deadline_s` at the latest."""
        if not self._closing:
            self._closing = True
            self.why = why
            self._scope.deadline = trio.current_time() + self._limits.flush_deadline_s
            self._wake.set()

    def end(self, why: str) -> None:
        """End it now."""
        if not self._scope.cancel_called:
            self.why = why
            self._closing = True
            self._scope.cancel()

    # ------------------------------------------------------------ its life

    async def run(
        self,
        open_bulk: OpenBulk,
        target_connections: Callable[[], int],
        post: Post,
        *,
        large: trio.CapacityLimiter,
        most: Callable[[], int] = lambda: MAX_MESSAGE_BYTES,
        charge: Callable[[bytes, float], None] = lambda peer, seconds: None,
    ) -> None:
        """Carry messages and frames until it ends; afterwards `why` says why, unless an error says so.
        `target_connections`: how many bulk streams the path is worth. `large`: how many large messages of all sessions
        are decoded and wait for the core at a time. `most`: how long a message of the peer may be now. `charge`: told
        what it took to decode what came.

        Raises groups of `PeerError`, `trio.TooSlowError`, `trio.BrokenResourceError`, `Unreachable`.
        """
        with self._scope:
            async with trio.open_nursery() as nursery:
                reading, writing = Patience(self._limits.frame_deadline_s), Patience(self._limits.write_deadline_s)
                for patience in (reading, writing):
                    nursery.start_soon(patience.watch)
                nursery.start_soon(self._write, writing)
                nursery.start_soon(self.bulk.run, open_bulk, target_connections, self.send, post, self.peer)
                await self._read(post, reading, large, most, charge)
                self._scope.cancel()

    async def _read(
        self,
        post: Post,
        patience: Patience,
        large: trio.CapacityLimiter,
        most: Callable[[], int],
        charge: Callable[[bytes, float], None],
    ) -> None:
        reader = ByteReader(self._stream)
        try:
            while await self._read_one(reader, post, patience, large, most, charge):
                if (debt_s := self._turns.spend(1, trio.current_time())) > 0:
                    await trio.sleep(debt_s)
                while self._owes_much():  # a peer that asks without reading gathers no more answers
                    self._drained = trio.Event()
                    await self._drained.wait()
        finally:
            reader.forget()

    async def _read_one(
        self,
        reader: ByteReader,
        post: Post,
        patience: Patience,
        large: trio.CapacityLimiter,
        most: Callable[[], int],
        charge: Callable[[bytes, float], None],
    ) -> bool:
        """Hand one message to the core; False at the end of the stream. Its bytes are not kept until the next one."""
        data = await read_frame(reader, patience, most)
        if data is None:
            return False
        size = len(data)
        self._counts.control_received += 4 + size
        if size <= self._limits.large_message_bytes:
            await post(self._heard(data, charge), size)
        else:
            async with large:
                heard = self._heard(data, charge)
                del data
                await post(heard, size, until_applied=True)
        return True

    def _owes_much(self) -> bool:
        limits = self._limits
        return self._queued_bytes > limits.unread_bytes or self._queued_messages > limits.unread_messages

    def _heard(self, data: bytes, charge: Callable[[bytes, float], None]) -> Heard:
        """Raises `PeerError`."""
        began = time.perf_counter()
        message = decode(data)
        charge(self.peer, time.perf_counter() - began)
        if isinstance(message, Lacks):
            self.requests.give_up(message.request)
        return Heard(self.peer, message)

    async def _write(self, patience: Patience) -> None:
        while True:
            while self._queue:
                batch = self._queue.popleft()
                patience.begin()
                await self._stream.send_all(batch.data)
                patience.end()
                self._queued_bytes -= len(batch.data)
                self._queued_messages -= batch.messages
                if self._drained is not None and not self._owes_much():
                    self._drained.set()
                    self._drained = None
                self._counts.control_sent += len(batch.data)
            if self._closing:
                self._scope.cancel()
            self._wake = trio.Event()
            await self._wake.wait()
