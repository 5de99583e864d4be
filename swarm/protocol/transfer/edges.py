"""The two ends of one edge of a tree: what we push to a child on one stripe, and what a parent pushes to us."""

from collections import deque
from dataclasses import dataclass, field

from codec import ChunkKey
from swarm.protocol.core.version import VersionId
from swarm.protocol.transfer.chunks import Chunk

__all__ = ["BEHIND_BYTES", "ChildEdge", "ParentEdge"]

BEHIND_BYTES = 512 << 10
"""A child's children may be this far behind before it counts."""


@dataclass(slots=True)
class ChildEdge:
    """What we push to one child on one stripe."""

    peer: bytes
    after: VersionId
    allowed: int
    """Bytes that it lets us send, in all."""
    sent: int = 0
    waiting: deque[tuple[Chunk, int, int]] = field(default_factory=deque)
    """(chunk, index, bytes) in order; bounded by what the versions in flight hold."""
    waiting_bytes: int = 0
    flying: dict[tuple[ChunkKey, int], int] = field(default_factory=dict)
    """Handed to the shell, not yet taken by the socket: (chunk, index) -> bytes."""
    flying_bytes: int = 0
    moved_at: float = 0.0
    pace_s: float = 0.0
    """How long something takes from being next to being taken, smoothed."""
    behind: int = 0
    """What waits at the child for its own children, each, as it says."""
    lagging: bool = False
    late_joiner: bool = False
    """It came while the newest version was on its way, or the plan hangs it on another: it waits for the others."""
    current: ChunkKey | None = None
    """The chunk whose pieces go now."""
    skipped: set[ChunkKey] = field(default_factory=set)
    """Chunks that it gets elsewhere."""
    unpaid: set[ChunkKey] = field(default_factory=set)
    """Chunks that there was no egress left for: it may pull them when there is."""

    @property
    def backlog(self) -> int:
        return self.waiting_bytes + self.flying_bytes

    @property
    def spare(self) -> int:
        """Bytes that the child would take beyond what waits for it already."""
        return self.allowed - self.sent - self.waiting_bytes - max(0, self.behind - BEHIND_BYTES)


@dataclass(slots=True)
class ParentEdge:
    """What one parent pushes to us on one stripe."""

    peer: bytes
    received: int = 0
    allowed: int = 0
    since: float = 0.0
    """Local time at which we hung on it: before that it had no reason to say anything."""
    behind: int = 0
    """What we last told it."""
