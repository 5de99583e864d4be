"""A simulated host: a core, the contents of its disk and replica, and its connection."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from codec import ChunkKey
from codec.sign import Key
from scenarios.sim.virtual.cpu import Cpu
from scenarios.sim.virtual.flow import PACKET_OVERHEAD, Flow, Frame, Link
from swarm.protocol.authority import Authority
from swarm.protocol.core.events import HeaderStored, VersionId
from swarm.protocol.core.notices import Notice
from swarm.protocol.member import Peer

__all__ = ["LAYOUT", "Faults", "Node", "Published", "facts", "root_of"]

LAYOUT = blake3(b"simulated layout").digest()


def root_of(id_: VersionId) -> bytes:
    """Return the root hash that stands for a version's bits."""
    return blake3(f"root {id_.epoch}.{id_.version}".encode()).digest()


def facts(header: HeaderStored) -> tuple[Any, ...]:
    """Return the fields of a stored header that do not depend on its sender."""
    return header.key, header.chunk_id, header.parent_root, header.piece_bytes, header.header_bytes


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities of faults of control messages that a real stream does not have. A delayed message is overtaken."""

    drop: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    delay_s: float = 1.0
    """The longest delay."""


@dataclass(slots=True)
class Published:
    """One published version: its chunks and its seal."""

    id: VersionId
    headers: list[HeaderStored]
    manifest: bytes
    payload_bytes: int
    at: float = 0.0


@dataclass(slots=True, eq=False)
class Node:
    """A simulated host."""

    key: Key
    core: Peer | Authority
    link: Link
    cpu: Cpu
    workers: Cpu
    """The threads in which the node decodes chunks."""
    number: int = 0
    """Position in the order of creation."""
    alive: bool = True
    frozen: bool = False
    sessions: dict[bytes, int] = field(default_factory=dict)
    """Number of the session with each peer. What is sent in one session never arrives in the next."""
    flows: dict[bytes, Flow] = field(default_factory=dict)
    """Bulk data to each peer."""
    banned: dict[bytes, float] = field(default_factory=dict)
    """Time until which sessions with a peer are refused."""
    disk: dict[str, bytes] = field(default_factory=dict)
    """Records that `Persist` made durable."""
    headers: dict[ChunkKey, HeaderStored] = field(default_factory=dict)
    pieces: dict[ChunkKey, int] = field(default_factory=dict)
    """The stored pieces of each chunk, as a bit set."""
    root: bytes = b""
    labels: dict[int, VersionId] = field(default_factory=dict)
    """While catching up: the version of each block that was fetched."""
    lists: set[bytes] = field(default_factory=set)
    """Roots whose block hashes the node has."""
    uplink: deque[tuple[Flow, Frame]] = field(default_factory=deque)
    """Frames in the uplink's queue, in order."""
    queued_bytes: int = 0
    waiting: deque[Flow] = field(default_factory=deque)
    """Flows that found the uplink's queue full."""
    down_free_at: float = 0.0
    sent_bytes: int = 0
    """Bulk payload: headers, pieces, parts."""
    socket_bytes: int = 0
    """All bytes that went into its sockets."""
    duplicate_bytes: int = 0
    received_bytes: int = 0
    crossed_bytes: int = 0
    """Bulk data received from another region."""
    timers: dict[str, float] = field(default_factory=dict)
    asked: dict[int, tuple[bytes, int, Any]] = field(default_factory=dict)
    held_at: dict[VersionId, float] = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)
    applied: VersionId | None = None
    """The newest version that the core has declared applied since the node's start, as `AppliedVersions.newest`."""
    dropped: set[tuple[VersionId, int]] = field(default_factory=set)
    """Attempts that the core dropped."""
    later: list[tuple[Callable[..., object], tuple[Any, ...]]] = field(default_factory=list)
    """Calls that wait while the node is frozen."""
    up_s_byte: float = field(init=False)
    """Seconds per byte on the uplink, packet headers included."""
    down_s_byte: float = field(init=False)
    queue_limit: float = field(init=False)
    """Size of the uplink's queue in bytes."""

    def __post_init__(self) -> None:
        self.reshape(self.link)

    def reshape(self, link: Link) -> None:
        """Replace the node's connection."""
        self.link = link
        self.up_s_byte = 8e-6 * PACKET_OVERHEAD / link.up_mbit if link.up_mbit else 1e9
        self.down_s_byte = 8e-6 * PACKET_OVERHEAD / link.down_mbit
        self.queue_limit = link.queue_s * link.up_mbit * 125_000
