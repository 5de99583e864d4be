"""Pieces down the trees: edges to children, credit, cut-through, and what is given back to parents.

A child attaches to a parent for one stripe and says what it has. From then on the parent pushes every piece of that
stripe as soon as it holds it, as far as the child's *credit* reaches: the total that the child allows, which grows as
the child itself passes pieces on. So a slow branch is given less without anybody measuring it, and the authority deals
the next chunk to the stripe that drains fastest. A socket's acceptance is not progress; credit is.

A child that takes nothing for `lag_after_s` while something waits for it is *lagging*: it no longer holds back what we
grant our own parent, and it pulls what it lacks.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from codec import ChunkKey
from swarm.protocol.chunks import Chunk, Chunks, mask_of
from swarm.protocol.events import Effect, Send, SendHeader, SendPiece, VersionId
from swarm.protocol.tuning import Tuning
from swarm.protocol.wire import Attach, Credit, Detach

__all__ = ["Exchange"]

HEADER = -1
"""The index under which a chunk's header queues."""
MAX_AHEAD_BYTES = 64 << 20
"""No child is sent more than this ahead of what its socket took, whatever credit it gives: the shell's queue stays
bounded. Far above any window."""


@dataclass(slots=True)
class ChildEdge:
    """What we push to one child on one stripe."""

    after: VersionId
    allowed: int
    """Bytes that it lets us send, in all."""
    sent: int = 0
    waiting: deque[tuple[ChunkKey, int, int]] = field(default_factory=deque)
    """(chunk, index, bytes) in order; bounded by what the versions in flight hold."""
    waiting_bytes: int = 0
    flying: dict[tuple[ChunkKey, int], int] = field(default_factory=dict)
    """Handed to the shell, not yet taken by the socket: (chunk, index) -> bytes."""
    flying_bytes: int = 0
    moved_at: float = 0.0
    lagging: bool = False

    @property
    def backlog(self) -> int:
        return self.waiting_bytes + self.flying_bytes

    @property
    def spare(self) -> int:
        """Bytes that the child would take beyond what waits for it already."""
        return self.allowed - self.sent - self.waiting_bytes


@dataclass(slots=True)
class ParentEdge:
    """What one parent pushes to us on one stripe."""

    peer: bytes
    received: int = 0
    allowed: int = 0


class Exchange:
    """The edges of one peer. Every method appends its effects to the list it is given."""

    def __init__(self, chunks: Chunks, tuning: Tuning) -> None:
        self._chunks = chunks
        self._tuning = tuning
        self.children: dict[int, dict[bytes, ChildEdge]] = {}
        self.parents: dict[int, ParentEdge] = {}
        self.progress_at: dict[int, float] = {}
        """Local time at which each stripe last brought something."""

    # ------------------------------------------------------------ as a child

    def attach_to(self, stripe: int, peer: bytes, after: VersionId, now: float, effects: list[Effect]) -> None:
        """Hang on `peer` for this stripe, and on nobody else."""
        old = self.parents.get(stripe)
        if old is not None and old.peer != peer:
            effects.append(Send(old.peer, Detach(stripe)))
        window = self._tuning.window_bytes
        self.parents[stripe] = ParentEdge(peer, 0, window)
        self.progress_at[stripe] = now
        effects.append(Send(peer, Attach(stripe, after.epoch, after.version, window, self._chunks.haves(after))))

    def lost_parent(self, peer: bytes) -> list[int]:
        """The stripes that hung on `peer`, which is gone."""
        stripes = [s for s, edge in self.parents.items() if edge.peer == peer]
        for stripe in stripes:
            del self.parents[stripe]
        return stripes

    def arrived(self, peer: bytes | None, stripe: int | None, size: int, now: float, effects: list[Effect]) -> None:
        """`size` bytes of a stripe came in from `peer` (a duplicate counts too: its credit is used up)."""
        if stripe is None:
            return
        self.progress_at[stripe] = now
        edge = self.parents.get(stripe)
        if edge is not None and edge.peer == peer:
            edge.received += size
            self.give_credit(stripe, effects)

    def give_credit(self, stripe: int, effects: list[Effect]) -> None:
        """Allow our parent as much again as we have passed on; in steps of a quarter window."""
        edge = self.parents.get(stripe)
        if edge is None:
            return
        window = self._tuning.window_bytes
        backlog = max((c.backlog for c in self.children.get(stripe, {}).values() if not c.lagging), default=0)
        allowed = edge.received + window - min(window, backlog)
        if allowed >= edge.allowed + window // 4:
            edge.allowed = allowed
            effects.append(Send(edge.peer, Credit(stripe, allowed)))

    # ------------------------------------------------------------ as a parent

    def attached(self, peer: bytes, message: Attach, now: float, effects: list[Effect]) -> None:
        """A child hangs on us: queue what it lacks of what we hold, and push from now on."""
        after = VersionId(message.epoch, message.version)
        edge = ChildEdge(after, message.credit, moved_at=now)
        old = self.children.setdefault(message.stripe, {}).get(peer)
        if old is not None:  # what is under way to it still is, however often it attaches
            edge.flying, edge.flying_bytes = old.flying, old.flying_bytes
        self.children[message.stripe][peer] = edge
        has = {ChunkKey(h.epoch, h.version, h.attempt, h.seq): h.pieces for h in message.have}
        for id_ in sorted(self._chunks.versions):
            if id_ <= after:
                continue
            for _, chunk in sorted(self._chunks.versions[id_].chunks.items()):
                if chunk.stripe != message.stripe:
                    continue
                given = mask_of(has[chunk.key], chunk.full) if chunk.key in has else 0
                if chunk.key not in has:
                    self._enqueue(edge, chunk, HEADER, now)
                for index in chunk.held():
                    if not given >> index & 1:
                        self._enqueue(edge, chunk, index, now)
        self._pump(peer, message.stripe, edge, now, effects)

    def detached(self, peer: bytes, stripe: int | None, effects: list[Effect]) -> None:
        """A child left one stripe, or (None) all of them."""
        for k in [stripe] if stripe is not None else list(self.children):
            if self.children.get(k, {}).pop(peer, None) is not None:
                self.give_credit(k, effects)

    def credited(self, peer: bytes, message: Credit, now: float, effects: list[Effect]) -> None:
        """A child allows more. A total that shrinks is ignored: credit once given stands."""
        edge = self.children.get(message.stripe, {}).get(peer)
        if edge is not None and message.total > edge.allowed:
            edge.allowed = message.total
            if edge.flying_bytes == 0:
                edge.moved_at = now
            self._pump(peer, message.stripe, edge, now, effects)

    def push(self, chunk: Chunk, index: int, source: bytes | None, now: float, effects: list[Effect]) -> None:
        """We hold this header (index -1) or piece now: on to every child of its stripe but the one it came from."""
        if chunk.stripe is None:
            return
        id_ = VersionId(chunk.key.epoch, chunk.key.version)
        for peer, edge in self.children.get(chunk.stripe, {}).items():
            if peer != source and id_ > edge.after:
                self._enqueue(edge, chunk, index, now)
                self._pump(peer, chunk.stripe, edge, now, effects)

    def sent(self, peer: bytes, stripe: int, key: ChunkKey, index: int, now: float, effects: list[Effect]) -> None:
        """The socket to a child took this: it no longer counts as backlog."""
        edge = self.children.get(stripe, {}).get(peer)
        size = edge.flying.pop((key, index), None) if edge is not None else None
        if edge is None or size is None:
            return
        edge.flying_bytes -= size
        edge.moved_at = now
        edge.lagging = False
        self._pump(peer, stripe, edge, now, effects)
        self.give_credit(stripe, effects)

    def gave(self, peer: bytes, chunk: Chunk, pieces: Iterable[int]) -> None:
        """We answer a pull of `peer`. A child counts these bytes as the stripe's, so we do too."""
        edge = self.children.get(chunk.stripe, {}).get(peer) if chunk.stripe is not None else None
        if edge is not None:
            edge.sent += chunk.header_bytes + sum(chunk.sizes[index] for index in pieces)

    def spare(self, stripe: int, peer: bytes) -> int:
        """Bytes that this child would take at once; negative when it is not attached."""
        edge = self.children.get(stripe, {}).get(peer)
        return -1 if edge is None else edge.spare

    def tick(self, now: float, effects: list[Effect]) -> None:
        """Find children that lag."""
        for stripe, edges in self.children.items():
            for edge in edges.values():
                stuck = edge.backlog > 0 and now - edge.moved_at > self._tuning.lag_after_s
                if stuck and not edge.lagging:
                    edge.lagging = True
                    self.give_credit(stripe, effects)

    def forget(self, id_: VersionId) -> None:
        """A version was dropped: nothing of it needs sending any more."""
        for edges in self.children.values():
            for edge in edges.values():
                kept = deque(item for item in edge.waiting if (item[0].epoch, item[0].version) != id_)
                edge.waiting = kept
                edge.waiting_bytes = sum(size for _, _, size in kept)

    def _enqueue(self, edge: ChildEdge, chunk: Chunk, index: int, now: float) -> None:
        if edge.backlog == 0:
            edge.moved_at = now  # the clock of its lag starts here
        size = _size(chunk, index)
        edge.waiting.append((chunk.key, index, size))
        edge.waiting_bytes += size

    def _pump(self, peer: bytes, stripe: int, edge: ChildEdge, now: float, effects: list[Effect]) -> None:
        while edge.waiting and edge.sent + edge.waiting[0][2] <= edge.allowed:
            if edge.flying_bytes >= MAX_AHEAD_BYTES:
                return
            key, index, size = edge.waiting.popleft()
            edge.sent += size
            edge.waiting_bytes -= size
            edge.flying_bytes += size - edge.flying.get((key, index), 0)
            edge.flying[key, index] = size
            effects.append(SendHeader(peer, stripe, key) if index == HEADER else SendPiece(peer, stripe, key, index))


def _size(chunk: Chunk, index: int) -> int:
    return chunk.header_bytes if index == HEADER else chunk.sizes[index]
