"""One session with one peer: a control stream in both directions, and bulk streams once there is something to send.

A session ends in one way: its scope is cancelled or one of its tasks fails, and all tasks end together.
"""

import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from swarm.protocol.core.bucket import Bucket
from swarm.protocol.core.events import Heard, SendBlob, SendBlock
from swarm.protocol.core.wire import MAX_MESSAGE_BYTES, Lacks, Message, decode
from swarm.runtime.core_loop import PostEvent
from swarm.runtime.counts import Counts
from swarm.runtime.framing import ByteReader, Patience, frame_message, read_frame
from swarm.runtime.limits import RuntimeLimits
from swarm.runtime.sessions.bulk import BulkStreams
from swarm.runtime.sessions.outbound import Bulk
from swarm.runtime.sessions.requests import Requests
from swarm.transport.base import Stream

__all__ = ["Reading", "Session"]

OpenBulk = Callable[[], Awaitable[Stream]]


@dataclass(frozen=True, slots=True)
class Reading:
    """How the messages of a peer are read and handed to the core."""

    post: PostEvent
    large: trio.CapacityLimiter
    """Large messages, of all sessions together, that are decoded and wait for the core at a time."""
    max_bytes: Callable[[], int] = lambda: MAX_MESSAGE_BYTES
    """How long a message of this peer may be now."""
    charge: Callable[[bytes, float], None] = lambda peer, seconds: None
    """Called with the peer and the seconds that decoding took."""


@dataclass(slots=True)
class _Batch:
    """What one write takes: consecutive messages of `write_bytes` in all, or one that is longer."""

    data: bytearray
    messages: int


class Session:
    """A connected peer. `dialed`: this member opened the session. `since_s`: when, on the loop's clock."""

    def __init__(
        self,
        peer: bytes,
        stream: Stream,
        *,
        dialed: bool,
        bulk: BulkStreams,
        counts: Counts,
        limits: RuntimeLimits,
    ) -> None:
        self.peer = peer
        self.dialed = dialed
        self.since_s = trio.current_time()
        self.bulk = bulk
        self.requests = Requests(limits.request_late_bytes)
        self.why = ""
        """Why this member ended it; empty while it has not."""
        self.known = False
        """The core has been told of it; what the core sends before is for the session that this one replaces."""
        self.crossed = False
        """Another session with the same peer replaces this one."""
        self.gone = trio.Event()
        """Set when none of its tasks runs, and the core knows."""
        self._stream = stream
        self._counts = counts
        self._limits = limits
        self._scope = trio.CancelScope()
        self._queue: deque[_Batch] = deque()
        self._queued_bytes = 0
        self._queued_messages = 0
        self._wake = trio.Event()
        self._drained: trio.Event | None = None
        """Set when the peer has read enough of the queue; None when no task waits for that."""
        self._messages_read = Bucket(limits.messages_s, limits.messages_at_once)
        self._closing = False

    # ------------------------------------------------------------ called by the runtime

    def send(self, message: Message) -> int:
        """Send a control message, or queue it. Returns its bytes. A peer that does not read its queue is
        disconnected."""
        if self._closing:
            return 0
        data = frame_message(message)
        if not self._queue and self._stream.send_now(data):
            self._counts.control_sent += len(data)
            return len(data)
        if self._queue and len(self._queue[-1].data) + len(data) <= self._limits.write_bytes:
            # An object for each message would take five times the memory of the shortest answers.
            self._queue[-1].data += data
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
        """Queue an effect for the bulk streams. A peer that does not read them is disconnected."""
        if isinstance(effect, SendBlob | SendBlock) and self.bulk.blobs >= self._limits.blobs_waiting:
            self.end("asks for more blocks than it takes")  # an honest peer requests a sixteenth of that at a time
            return
        if not self._closing and not self.bulk.put(effect):
            self.end("does not read its bulk stream")

    def close(self, why: str) -> None:
        """End the session once the queued control messages have left, after at most `flush_deadline_s`."""
        if not self._closing:
            self._closing = True
            self.why = why
            self._scope.deadline = trio.current_time() + self._limits.flush_deadline_s
            self._wake.set()

    def end(self, why: str) -> None:
        """End the session now."""
        if not self._scope.cancel_called:
            self.why = why
            self._closing = True
            self._scope.cancel()

    # ------------------------------------------------------------ tasks

    async def run_streams(self, open_bulk: OpenBulk, target_connections: Callable[[], int], reading: Reading) -> None:
        """Carry messages and frames until the session ends. Afterwards `why` has the reason, unless an error has it.

        `target_connections`: how many bulk streams the path is worth. Raises groups of `PeerError`,
        `trio.TooSlowError`, `trio.BrokenResourceError`, `Unreachable`.
        """
        with self._scope:
            async with trio.open_nursery() as nursery:
                read_patience = Patience(self._limits.frame_deadline_s)
                write_patience = Patience(self._limits.write_deadline_s)
                for patience in (read_patience, write_patience):
                    nursery.start_soon(patience.watch)
                nursery.start_soon(self._write_messages, write_patience)
                nursery.start_soon(
                    self.bulk.write_streams, open_bulk, target_connections, self.send, reading.post, self.peer
                )
                await self._read_messages(reading, read_patience)
                self._scope.cancel()

    async def _read_messages(self, reading: Reading, patience: Patience) -> None:
        reader = ByteReader(self._stream)
        try:
            while await self._read_message(reader, reading, patience):
                if (debt_s := self._messages_read.spend(1, trio.current_time())) > 0:
                    await trio.sleep(debt_s)
                while self._has_much_unread():  # a peer that requests without reading gathers no more answers
                    self._drained = trio.Event()
                    await self._drained.wait()
        finally:
            reader.forget()

    async def _read_message(self, reader: ByteReader, reading: Reading, patience: Patience) -> bool:
        """Hand one message to the core; False at the end of the stream. Its bytes are not kept until the next one."""
        data = await read_frame(reader, patience, reading.max_bytes)
        if data is None:
            return False
        size = len(data)
        if size <= self._limits.large_message_bytes:
            await reading.post(self._decode(data, reading), size)
        else:
            async with reading.large:
                heard = self._decode(data, reading)
                del data
                await reading.post(heard, size, until_applied=True)
        return True

    def _has_much_unread(self) -> bool:
        limits = self._limits
        return self._queued_bytes > limits.unread_bytes or self._queued_messages > limits.unread_messages

    def _decode(self, data: bytes, reading: Reading) -> Heard:
        """Raises `PeerError`."""
        began = time.perf_counter()
        message = decode(data)
        reading.charge(self.peer, time.perf_counter() - began)
        if isinstance(message, Lacks):
            self.requests.give_up(message.request)
        return Heard(self.peer, message)

    async def _write_messages(self, patience: Patience) -> None:
        while True:
            while self._queue:
                batch = self._queue.popleft()
                patience.begin()
                await self._stream.send_all(batch.data)
                patience.end()
                self._queued_bytes -= len(batch.data)
                self._queued_messages -= batch.messages
                if self._drained is not None and not self._has_much_unread():
                    self._drained.set()
                    self._drained = None
                self._counts.control_sent += len(batch.data)
            if self._closing:
                self._scope.cancel()
            self._wake = trio.Event()
            await self._wake.wait()
