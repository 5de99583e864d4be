"""The two ends of one edge of a tree: the state of a child that we push to, and of a parent that pushes to us."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from codec import ChunkKey
from swarm.protocol.core.version import VersionId
from swarm.protocol.transfer.chunks import Chunk

__all__ = ["BEHIND_BYTES", "ChildEdge", "ParentEdge", "Part"]

BEHIND_BYTES = 512 << 10
"""A child whose own children are at most this far behind does not count as behind."""


Part = tuple[Chunk, int, int]
"""(chunk, index of the piece or `HEADER`, bytes)."""


@dataclass(slots=True)
class ChildEdge:
    """What we push to one child in one stripe."""

    peer: bytes
    after: VersionId
    allowed: int
    """The child's credit: the total of bytes that it lets us send."""
    sent: int = 0
    waiting: deque[Part] = field(default_factory=deque)
    """Queued parts, of the versions in flight only. Changed by the methods below."""
    waiting_bytes: int = 0
    flying: dict[tuple[ChunkKey, int], int] = field(default_factory=dict)
    """Parts handed to the runtime and not yet accepted by the socket: (chunk, index) -> bytes."""
    flying_bytes: int = 0
    moved_at: float = 0.0
    """Local time at which the child last took something, or from which its lag counts."""
    pace_s: float = 0.0
    """Smoothed time from when a piece is next to when the socket accepts it."""
    behind: int = 0
    """Bytes queued at the child for each of its own children, on average, as it reports."""
    lagging: bool = False
    """The child has taken nothing for too long: see `Exchange.tick`."""
    late_joiner: bool = False
    """It joined during the newest version, or the plan gives it another parent: it is served after the others."""
    chooses: bool = False
    """It gets headers, and pieces only of chunks that it asks for: all others count as skipped."""
    current: ChunkKey | None = None
    """The chunk whose pieces are being sent."""
    skipped: set[ChunkKey] = field(default_factory=set)
    """Chunks that the child gets from another peer, or has not asked for (`chooses`)."""
    unpaid: set[ChunkKey] = field(default_factory=set)
    """Chunks for which the egress budget was used up: the child may pull them later."""

    @property
    def backlog(self) -> int:
        return self.waiting_bytes + self.flying_bytes

    @property
    def spare(self) -> int:
        """Bytes of credit beyond those queued, less those that the child's own children are behind."""
        return self.allowed - self.sent - self.waiting_bytes - max(0, self.behind - BEHIND_BYTES)

    def append_waiting(self, chunk: Chunk, index: int, size: int) -> None:
        """Queue a part."""
        self.waiting.append((chunk, index, size))
        self.waiting_bytes += size

    def pop_first_waiting(self) -> tuple[Chunk, int]:
        """Take the next part, (chunk, index), from the queue."""
        chunk, index, size = self.waiting.popleft()
        self.waiting_bytes -= size
        return chunk, index

    def pop_last_waiting(self) -> None:
        """Take the part that was queued last from the queue."""
        _, _, size = self.waiting.pop()
        self.waiting_bytes -= size

    def remove_waiting(self, matches: Callable[[Chunk, int], bool]) -> list[Part]:
        """Remove the queued parts for which `matches(chunk, index)` is true, and return them."""
        removed = [part for part in self.waiting if matches(part[0], part[1])]
        self.waiting = deque(part for part in self.waiting if not matches(part[0], part[1]))
        self.waiting_bytes -= sum(size for _, _, size in removed)
        return removed

    def move_to_front(self, key: ChunkKey) -> None:
        """Move the queued parts of a chunk before all others."""
        first = [part for part in self.waiting if part[0].key == key]
        self.waiting = deque([*first, *(part for part in self.waiting if part[0].key != key)])

    def forget(self, id_: VersionId) -> None:
        """A version was dropped: remove its chunks."""
        self.skipped = {key for key in self.skipped if (key.epoch, key.version) != id_}
        self.unpaid = {key for key in self.unpaid if (key.epoch, key.version) != id_}
        self.remove_waiting(lambda chunk, index: (chunk.key.epoch, chunk.key.version) == id_)


@dataclass(slots=True)
class ParentEdge:
    """What one parent pushes to us in one stripe."""

    peer: bytes
    received: int = 0
    """Bytes of the stripe that came from it."""
    allowed: int = 0
    """Our credit: the total of bytes that we let it send."""
    since: float = 0.0
    """Local time at which we attached to it. Before that it had no reason to send anything."""
    behind: int = 0
    """How far behind our own children are, as we last reported it."""
