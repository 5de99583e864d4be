"""A simulated host: a core, what its disk and replica would hold, and its connection."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from codec import ChunkKey
from codec.sign import Key
from scenarios.sim.virtual.cpu import Cpu
from scenarios.sim.virtual.links import PACKET_OVERHEAD, Flow, Frame, Link
from swarm.protocol.authority import Authority
from swarm.protocol.core.events import HeaderStored, VersionId
from swarm.protocol.core.notices import Notice
from swarm.protocol.member import Peer

__all__ = ["LAYOUT", "Faults", "Node", "Published", "facts", "root_of"]

LAYOUT = blake3(b"simulated layout").digest()


def root_of(id_: VersionId) -> bytes:
    """The root that stands for a version's bits."""
    return blake3(f"root {id_.epoch}.{id_.version}".encode()).digest()


def facts(header: HeaderStored) -> tuple[Any, ...]:
    """What a stored header says, whoever it came from."""
    return header.key, header.chunk_id, header.parent_root, header.piece_bytes, header.header_bytes


@dataclass(frozen=True, slots=True)
class Faults:
    """What may befall a control message, beyond what streams allow. Probabilities; a delay lets others overtake."""

    drop: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    delay_s: float = 1.0
    """At most."""


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
    """The threads in which it decodes."""
    number: int = 0
    """The order in which nodes were made."""
    alive: bool = True
    frozen: bool = False
    sessions: dict[bytes, int] = field(default_factory=dict)
    """Peers, and the number of the session with each: what was sent in one never arrives in the next."""
    flows: dict[bytes, Flow] = field(default_factory=dict)
    """Bulk to each of them."""
    banned: dict[bytes, float] = field(default_factory=dict)
    """Peers whose sessions are refused, and until when."""
    disk: dict[str, bytes] = field(default_factory=dict)
    """What `Persist` made durable."""
    headers: dict[ChunkKey, HeaderStored] = field(default_factory=dict)
    pieces: dict[ChunkKey, int] = field(default_factory=dict)
    """Of each chunk, the pieces that are here, as a bit set."""
    root: bytes = b""
    labels: dict[int, VersionId] = field(default_factory=dict)
    """While catching up: the version of each block that was fetched."""
    lists: set[bytes] = field(default_factory=set)
    """Roots whose block hashes it holds."""
    uplink: deque[tuple[Flow, Frame]] = field(default_factory=deque)
    """What leaves next, in order."""
    queued_bytes: int = 0
    waiting: deque[Flow] = field(default_factory=deque)
    """Flows that found the uplink's queue full."""
    down_free_at: float = 0.0
    sent_bytes: int = 0
    """Bulk payload: headers, pieces, parts."""
    socket_bytes: int = 0
    """All that went into its sockets."""
    duplicate_bytes: int = 0
    received_bytes: int = 0
    crossed_bytes: int = 0
    """Bulk that came from another region."""
    timers: dict[str, float] = field(default_factory=dict)
    asked: dict[int, tuple[bytes, int, Any]] = field(default_factory=dict)
    held_at: dict[VersionId, float] = field(default_factory=dict)
    told: list[Notice] = field(default_factory=list)
    dropped: set[tuple[VersionId, int]] = field(default_factory=set)
    """Attempts that it was told to forget."""
    later: list[tuple[Callable[..., object], tuple[Any, ...]]] = field(default_factory=list)
    """What waits while it is frozen."""
    up_s_byte: float = field(init=False)
    """Seconds that a byte on the socket takes on the uplink, packet headers included."""
    down_s_byte: float = field(init=False)
    queue_limit: float = field(init=False)
    """Bytes that the uplink's queue holds."""

    def __post_init__(self) -> None:
        self.reshape(self.link)

    def reshape(self, link: Link) -> None:
        """Give it another connection."""
        self.link = link
        self.up_s_byte = 8e-6 * PACKET_OVERHEAD / link.up_mbit if link.up_mbit else 1e9
        self.down_s_byte = 8e-6 * PACKET_OVERHEAD / link.down_mbit
        self.queue_limit = link.queue_s * link.up_mbit * 125_000
