"""One session with one peer: a control stream both ways, and bulk streams out once there is something to send.

A session ends in one way: its scope is cancelled, or one of its tasks fails, and all of it goes down together.
"""

from collections import deque
from collections.abc import Awaitable, Callable

import trio

from swarm.protocol.events import Event, Heard
from swarm.protocol.wire import Lacks, Message
from swarm.shell.bulk import BulkStreams
from swarm.shell.counts import Counts
from swarm.shell.framing import ByteReader, Patience, frame_message, read_message
from swarm.shell.limits import Limits
from swarm.shell.outbound import Bulk
from swarm.shell.requests import Requests
from swarm.transport.base import Stream

__all__ = ["Session"]

OpenBulk = Callable[[], Awaitable[Stream]]


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
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._wake = trio.Event()
        self._closing = False

    # ------------------------------------------------------------ what the shell asks for

    def send(self, message: Message) -> None:
        """Send a control message, or queue it; a peer that does not drain its queue is closed."""
        if self._closing:
            return
        data = frame_message(message)
        if not self._queue and self._stream.send_now(data):
            self._counts.control_sent += len(data)
            return
        self._queue.append(data)
        self._queued_bytes += len(data)
        self._wake.set()
        if self._queued_bytes > self._limits.control_queue_bytes:
            self.end("does not read its control stream")

    def send_bulk(self, effect: Bulk) -> None:
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

    async def run(self, open_bulk: OpenBulk, ways: Callable[[], int], post: Callable[[Event], Awaitable[None]]) -> None:
        """Carry messages and frames until it ends; afterwards `why` says why, unless an error says so. `ways`: how many
        bulk streams the path is worth.

        Raises groups of `PeerError`, `trio.TooSlowError`, `trio.BrokenResourceError`, `Unreachable`.
        """
        with self._scope:
            async with trio.open_nursery() as nursery:
                reading, writing = Patience(self._limits.frame_deadline_s), Patience(self._limits.write_deadline_s)
                for patience in (reading, writing):
                    nursery.start_soon(patience.watch)
                nursery.start_soon(self._write, writing)
                nursery.start_soon(self.bulk.run, open_bulk, ways, self.send, post, self.peer)
                await self._read(post, reading)
                self._scope.cancel()

    async def _read(self, post: Callable[[Event], Awaitable[None]], patience: Patience) -> None:
        reader = ByteReader(self._stream)
        while (found := await read_message(reader, patience)) is not None:
            message, size = found
            self._counts.control_received += size
            if isinstance(message, Lacks):
                self.requests.give_up(message.request)
            await post(Heard(self.peer, message))

    async def _write(self, patience: Patience) -> None:
        while True:
            while self._queue:
                batch = self._batch()
                patience.begin()
                await self._stream.send_all(batch)
                patience.end()
                self._queued_bytes -= len(batch)
                self._counts.control_sent += len(batch)
            if self._closing:
                self._scope.cancel()
            self._wake = trio.Event()
            await self._wake.wait()

    def _batch(self) -> bytes:
        """Small messages go together; a large one alone, so that each write has its own deadline."""
        parts = [self._queue.popleft()]
        size = len(parts[0])
        while self._queue and size + len(self._queue[0]) <= self._limits.write_bytes:
            parts.append(self._queue.popleft())
            size += len(parts[-1])
        return b"".join(parts)
