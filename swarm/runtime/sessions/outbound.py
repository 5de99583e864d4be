"""What waits for one bulk stream, and the task that writes it: first what the plan has us push, then what late joiners
and pulls get, then blobs and blocks. Of the machine's uplink, too, the first has the right of way (see `pacing`).

The core bounds the queue (a push needs the child's credit); here it is only bounded against peers that ask without
reading. A blob goes out a part at a time, so that a step that begins meanwhile overtakes it.
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from codec import ChunkKey
from codec.errors import PeerError
from swarm.protocol.core.events import Event, Gave, SendBlob, SendBlock, SendDone, SendHeader, SendPiece
from swarm.protocol.core.wire import NO_STRIPE, Frame, FrameKind, Lacks, Message, pack_frame
from swarm.runtime.counts import Counts
from swarm.runtime.framing import Patience
from swarm.runtime.limits import Limits
from swarm.runtime.sessions.pacing import Paced
from swarm.store import ChunkStore

__all__ = ["Blob", "Bulk", "Outbound"]

_HOLD_S: Final = 0.02
"""How often blobs that must wait look whether they still must."""

Bulk = SendHeader | SendPiece | SendBlob | SendBlock


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes to give: `read(offset, size)` may be called from a worker thread. `label` names their version."""

    label: ChunkKey
    total: int
    read: Callable[[int, int], bytes]


@dataclass(slots=True)
class _Sending:
    """A blob or block on its way out."""

    request: int
    blob: Blob
    offset: int


FindBlob = Callable[[SendBlob | SendBlock], Awaitable[Blob | None]]


class Outbound:
    """The queue of one bulk stream."""

    def __init__(
        self, chunks: ChunkStore, find: FindBlob, counts: Counts, limits: Limits, hold: Callable[[], bool]
    ) -> None:
        """`find`: what a request names, or None when we lack it. `hold`: whether blobs and blocks must wait, because
        another stream to the same peer has something more urgent.
        """
        self._chunks = chunks
        self._find = find
        self._counts = counts
        self._limits = limits
        self._hold = hold
        self._pushes: deque[SendHeader | SendPiece] = deque()
        self._later: deque[SendHeader | SendPiece] = deque()
        self._blobs: deque[SendBlob | SendBlock | _Sending] = deque()
        self._wake = trio.Event()
        self._writing = False

    def put(self, effect: Bulk) -> None:
        if isinstance(effect, SendBlob | SendBlock):
            self._blobs.append(effect)
        elif effect.pull or effect.stripe is None or (isinstance(effect, SendPiece) and effect.late_joiner):
            self._later.append(effect)
        else:
            self._pushes.append(effect)
        self._wake.set()

    def __len__(self) -> int:
        return len(self._pushes) + len(self._later) + len(self._blobs)

    @property
    def blobs(self) -> int:
        """Blobs and blocks that wait, or are on their way."""
        return len(self._blobs)

    @property
    def load(self) -> int:
        """How much waits, in items; what is being written counts as one."""
        return len(self) + self._writing

    @property
    def crowded(self) -> bool:
        """Whether something waits for the stream to take what came before."""
        return self._writing and len(self) > 0

    @property
    def urgent(self) -> bool:
        return bool(self._pushes or self._later)

    async def wait(self, idle_s: float = math.inf) -> bool:
        """Wait until there is something to send: True; False when there was nothing for `idle_s`."""
        if idle_s == math.inf:  # a deadline that never comes costs as much as any
            while not len(self):
                self._wake = trio.Event()
                await self._wake.wait()
        else:
            with trio.move_on_after(idle_s):
                await self.wait()
        return len(self) > 0

    async def run(
        self,
        stream: Paced,
        answer: Callable[[Message], object],
        post: Callable[[Event], Awaitable[None]],
        peer: bytes,
        *,
        idle_s: float,
    ) -> None:
        """Write until there was nothing to send for `idle_s`. `answer` queues a control message; `post` takes the
        `SendDone`s and `Gave`s.

        Raises groups of `trio.TooSlowError`, when the peer takes nothing, and of `trio.BrokenResourceError`.
        """
        patience = Patience(self._limits.write_deadline_s)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(patience.watch)
            await self._write_all(stream, answer, post, peer, patience, idle_s)
            nursery.cancel_scope.cancel()

    async def _write_all(
        self,
        stream: Paced,
        answer: Callable[[Message], object],
        post: Callable[[Event], Awaitable[None]],
        peer: bytes,
        patience: Patience,
        idle_s: float,
    ) -> None:
        while True:
            if not len(self) and not await self.wait(idle_s):
                return
            if not self.urgent and self._hold():
                await trio.sleep(_HOLD_S)
                continue
            parts: list[bytes] = []
            done: list[SendDone | Gave] = []
            size, rest = 0, not self._pushes
            most = min(self._limits.write_bytes, stream.part_bytes) if rest else self._limits.write_bytes
            while size < most and (len(self) if rest else self._pushes):
                queue = self._later if rest else self._pushes
                if queue:
                    effect = queue.popleft()
                    size += self._gather(effect, parts)
                    index = effect.index if isinstance(effect, SendPiece) else -1
                    done.append(SendDone(peer, effect.stripe, effect.key, index, effect.pull))
                else:
                    given = await self._gather_part(parts, min(stream.part_bytes, self._limits.part_bytes), answer)
                    size += given
                    done += [Gave(peer, given)] if given else []
            if parts:
                self._writing = True
                patience.begin()
                await stream.send(b"".join(parts), rest=rest)
                patience.end()
                self._writing = False
            for event in done:
                await post(event)

    def _gather(self, effect: SendHeader | SendPiece, parts: list[bytes]) -> int:
        """The frame of a header or piece; nothing when it has been dropped meanwhile."""
        if isinstance(effect, SendPiece):
            kind, index = FrameKind.PIECE, effect.index
            body = self._chunks.piece(effect.key, effect.index)
        else:
            kind, index = FrameKind.HEADER, 0
            chunk = self._chunks.chunk(effect.key)
            body = None if chunk is None else chunk.sealed_header
        if body is None:
            return 0
        stripe = NO_STRIPE if effect.stripe is None else effect.stripe
        parts.append(pack_frame(Frame(kind, stripe, effect.key, index, 0, len(body), len(body))))
        parts.append(body)
        if effect.pull:
            self._counts.pulled += len(body)
        else:
            self._counts.pushed += len(body)
        return len(body)

    async def _gather_part(self, parts: list[bytes], most: int, answer: Callable[[Message], object]) -> int:
        """The next part of the first blob in the queue, of `most` bytes. Only that one is open: a peer that asks a lot
        costs one blob."""
        item = self._blobs.popleft()
        if not isinstance(item, _Sending):
            blob = await self._find(item)
            if blob is None:
                answer(Lacks(item.request))
                return 0
            offset = item.offset if isinstance(item, SendBlob) else 0
            if offset > blob.total:
                raise PeerError(f"request.offset: {offset} of {blob.total}")
            item = _Sending(item.request, blob, offset)
        blob = item.blob
        size = min(most, blob.total - item.offset)
        body = blob.read(item.offset, size) if size else b""
        if len(body) != size:  # the file was replaced under us: the asker's deadline sends it elsewhere
            answer(Lacks(item.request))
            return 0
        frame = Frame(FrameKind.PART, NO_STRIPE, blob.label, item.request, item.offset, blob.total, size)
        parts.append(pack_frame(frame))
        parts.append(body)
        self._counts.blobs += size
        item.offset += size
        if item.offset < blob.total:
            self._blobs.appendleft(item)
        return size
