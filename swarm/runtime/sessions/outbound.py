"""The queue of one bulk stream, and the task that writes it.

Order: first what the plan has this member push, then what late joiners and pulls get, then blobs and blocks. The first
class also has priority on the machine's uplink (see `pacing`). A blob leaves one part at a time, so that a version that
begins meanwhile overtakes it.

The core bounds the queue, because a push needs the child's credit. The bounds here are against peers that request
without reading.
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from codec import ChunkKey
from codec.errors import PeerError
from swarm.protocol.core.events import Event, Gave, SendBlob, SendBlock, SendDone, SendHeader, SendPiece
from swarm.protocol.core.wire import NO_STRIPE, Frame, FrameKind, Lacks, Message, pack_frame
from swarm.runtime.counts import Counts
from swarm.runtime.framing import Patience
from swarm.runtime.limits import RuntimeLimits
from swarm.runtime.sessions.pacing import Paced
from swarm.store import ChunkStore

__all__ = ["Blob", "Bulk", "FindBlob", "Outbound"]

_YIELD_S: Final = 0.02
"""How often blobs that must wait for another stream look whether they still must."""

_AT_ONCE_BYTES: Final = 64 << 10
"""A piece of this size is sent in the turn in which the core decides it."""

Bulk = SendHeader | SendPiece | SendBlob | SendBlock
"""Effects that are carried out on bulk streams."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes to give. `read(offset, size)` may be called from a worker thread. `label` names their version."""

    label: ChunkKey
    total: int
    read: Callable[[int, int], bytes]


@dataclass(slots=True)
class _OpenBlob:
    """A blob or block of which some parts have left."""

    request: int
    blob: Blob
    offset: int


FindBlob = Callable[[SendBlob | SendBlock], Awaitable[Blob | None]]
"""What a request names; None when this member does not have it."""


class Outbound:
    """The queue of one bulk stream."""

    def __init__(
        self,
        chunks: ChunkStore,
        find_blob: FindBlob,
        counts: Counts,
        limits: RuntimeLimits,
        must_wait: Callable[[], bool],
        follow: Callable[[Event], bool] = lambda event: False,
    ) -> None:
        """`must_wait`: whether another stream to the same peer has something more urgent than blobs and blocks.
        `follow`: has an event applied right after the present one, if that is possible (`CoreLoop.follow`)."""
        self._chunks = chunks
        self._find_blob = find_blob
        self._counts = counts
        self._limits = limits
        self._must_wait = must_wait
        self._follow = follow
        self._idle: tuple[Paced, bytes] | None = None
        """The stream and the peer, while the stream's task waits for something to send."""
        self._pushes: deque[SendHeader | SendPiece] = deque()
        self._later: deque[SendHeader | SendPiece] = deque()
        """Headers and pieces for late joiners and pulls."""
        self._blobs: deque[SendBlob | SendBlock | _OpenBlob] = deque()
        self._unposted: list[SendDone | Gave] = []
        """Of pieces that were sent at once."""
        self._used_at_s = 0.0
        """When the stream's task began to wait, or something was sent at once since then."""
        self._wake = trio.Event()
        self._writing = False

    def put(self, effect: Bulk) -> None:
        """Queue an effect in its class. A large piece is sent in this turn if nothing is before it."""
        if self._idle is not None and isinstance(effect, SendPiece) and self._send_at_once(effect, *self._idle):
            return
        if isinstance(effect, SendBlob | SendBlock):
            self._blobs.append(effect)
        elif _may_wait(effect):
            self._later.append(effect)
        else:
            self._pushes.append(effect)
        self._wake.set()

    def __len__(self) -> int:
        return len(self._pushes) + len(self._later) + len(self._blobs)

    @property
    def blobs(self) -> int:
        """Blobs and blocks that wait, or have partly left."""
        return len(self._blobs)

    @property
    def load(self) -> int:
        """Items that wait; a write in progress counts as one."""
        return len(self) + self._writing

    @property
    def crowded(self) -> bool:
        """Whether something waits for a write in progress."""
        return self._writing and len(self) > 0

    @property
    def urgent(self) -> bool:
        """Whether headers or pieces wait."""
        return bool(self._pushes or self._later)

    async def wait(self, idle_s: float = math.inf) -> bool:
        """Wait until there is something to send or to post: True; False when nothing was sent for `idle_s`."""
        self._used_at_s = trio.current_time()
        while not len(self) and not self._unposted:
            self._wake = trio.Event()
            if idle_s == math.inf:  # a scope whose deadline never comes costs as much as any
                await self._wake.wait()
            elif trio.current_time() >= self._used_at_s + idle_s:
                return False
            else:
                with trio.move_on_at(self._used_at_s + idle_s):
                    await self._wake.wait()
        return True

    async def write_to(
        self,
        stream: Paced,
        send_message: Callable[[Message], object],
        post: Callable[[Event], Awaitable[None]],
        peer: bytes,
        *,
        idle_s: float,
    ) -> None:
        """Write to `stream` until there was nothing to send for `idle_s`.

        `send_message` queues a control message; `post` takes the `SendDone`s and `Gave`s. Raises groups of
        `trio.TooSlowError`, when the peer does not read, and of `trio.BrokenResourceError`.
        """
        patience = Patience(self._limits.write_deadline_s)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(patience.watch)
            await self._write_batches(stream, send_message, post, peer, patience, idle_s)
            nursery.cancel_scope.cancel()

    async def _write_batches(
        self,
        stream: Paced,
        send_message: Callable[[Message], object],
        post: Callable[[Event], Awaitable[None]],
        peer: bytes,
        patience: Patience,
        idle_s: float,
    ) -> None:
        while True:
            if not len(self):
                self._idle = stream, peer
                try:
                    if not await self.wait(idle_s):
                        return
                finally:
                    self._idle = None
            if self._unposted:
                done, self._unposted = self._unposted, []
                for event in done:
                    await post(event)
                continue
            if not self.urgent and self._must_wait():
                await trio.sleep(_YIELD_S)
                continue
            frames: list[bytes | memoryview] = []
            done: list[SendDone | Gave] = []
            size, deferrable = 0, not self._pushes
            limits = self._limits
            batch_bytes = min(limits.write_bytes, stream.part_bytes) if deferrable else limits.write_bytes
            # What is pushed while a part is read from the disk goes first: it may be the header of a piece in `_later`.
            while size < batch_bytes and (self._later or self._blobs if deferrable else self._pushes):
                if deferrable and self._pushes:
                    break
                queue = self._later if deferrable else self._pushes
                if queue:
                    effect = queue.popleft()
                    gathered = self._chunk_frames(effect)
                    if gathered is not None:
                        frames += gathered
                        size += self._count(effect, gathered)
                    done.append(_done(effect, peer))
                else:
                    part_bytes = min(stream.part_bytes, limits.part_bytes)
                    given = await self._gather_part(frames, part_bytes, send_message)
                    size += given
                    done += [Gave(peer, given)] if given else []
            if frames:
                self._writing = True
                patience.begin()
                await stream.send(frames, deferrable=deferrable)
                patience.end()
                self._writing = False
            for event in done:
                await post(event)

    def _send_at_once(self, effect: SendPiece, stream: Paced, peer: bytes) -> bool:
        """Send a large piece in this turn, which saves waking the stream's task; False if that has to do it. Of small
        ones the task joins several in a write."""
        if len(self) or _may_wait(effect):
            return False
        frames = self._chunk_frames(effect)
        if frames is None or len(frames[1]) < _AT_ONCE_BYTES or not stream.send_now(frames):
            return False
        self._count(effect, frames)
        self._used_at_s = trio.current_time()
        event = _done(effect, peer)
        if not self._follow(event):
            self._unposted.append(event)
            self._wake.set()
        return True

    def _chunk_frames(self, effect: SendHeader | SendPiece) -> list[bytes | memoryview] | None:
        """The frame of a header or piece: its head and its body. None if its chunk was dropped meanwhile."""
        if isinstance(effect, SendPiece):
            kind, index = FrameKind.PIECE, effect.index
            body = self._chunks.piece(effect.key, effect.index)
        else:
            kind, index = FrameKind.HEADER, 0
            chunk = self._chunks.chunk(effect.key)
            body = None if chunk is None else chunk.sealed_header
        if body is None:
            return None
        stripe = NO_STRIPE if effect.stripe is None else effect.stripe
        return [pack_frame(Frame(kind, stripe, effect.key, index, 0, len(body), len(body))), body]

    def _count(self, effect: SendHeader | SendPiece, frames: Sequence[bytes | memoryview]) -> int:
        """Count the body of a frame that is sent. Returns its bytes."""
        size = len(frames[1])
        if effect.pull:
            self._counts.pulled += size
        else:
            self._counts.pushed += size
        return size

    async def _gather_part(
        self, frames: list[bytes | memoryview], max_bytes: int, send_message: Callable[[Message], object]
    ) -> int:
        """Append the next part of the first blob in the queue, of at most `max_bytes`. Returns its payload bytes.

        Only that blob is open, so a peer that requests many costs the memory of one.
        """
        item = self._blobs.popleft()
        if not isinstance(item, _OpenBlob):
            blob = await self._find_blob(item)
            if blob is None:
                send_message(Lacks(item.request))
                return 0
            offset = item.offset if isinstance(item, SendBlob) else 0
            if offset > blob.total:
                raise PeerError(f"request.offset: {offset} of {blob.total}")
            item = _OpenBlob(item.request, blob, offset)
        blob = item.blob
        size = min(max_bytes, blob.total - item.offset)
        body = blob.read(item.offset, size) if size else b""
        if len(body) != size:  # the file was replaced meanwhile; the peer requests it from another member
            send_message(Lacks(item.request))
            return 0
        frame = Frame(FrameKind.PART, NO_STRIPE, blob.label, item.request, item.offset, blob.total, size)
        frames.append(pack_frame(frame))
        frames.append(body)
        self._counts.blobs += size
        item.offset += size
        if item.offset < blob.total:
            self._blobs.appendleft(item)
        return size


def _may_wait(effect: SendHeader | SendPiece) -> bool:
    """Whether an effect is for a late joiner or a pull, and so comes after what the plan has this member push."""
    return effect.pull or effect.stripe is None or (isinstance(effect, SendPiece) and effect.late_joiner)


def _done(effect: SendHeader | SendPiece, peer: bytes) -> SendDone:
    index = effect.index if isinstance(effect, SendPiece) else -1
    return SendDone(peer, effect.stripe, effect.key, index, effect.pull)
