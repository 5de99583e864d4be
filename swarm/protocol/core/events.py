"""The core's vocabulary: what can happen to a peer (events) and what it may ask for (effects).

`Peer.apply(event, now)` and `Authority.apply(event, now)` take one event and return the list of its effects. They never
do IO, never read a clock, never hold payload bytes: a piece is named by (chunk key, index) and stays in the store. Two
runtimes carry the effects out: `swarm.runtime` on trio, and the simulator in one process under a virtual clock. The
result of a job, a fetch or a write comes back as another event.

Inside a core effects have one way out: each machine is given the core's `Outbox` when it is built, and puts its effects
there. Machines return facts about their own state, never effects.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from codec import ChunkKey, Manifest
from swarm.protocol.core.notices import Notice
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import Message

__all__ = [
    "Announce",
    "Close",
    "Damaged",
    "Dial",
    "Drop",
    "Effect",
    "Event",
    "Gave",
    "HeaderStored",
    "Heard",
    "Job",
    "JobDone",
    "JobKind",
    "LocalAbandon",
    "LocalBudget",
    "LocalChunk",
    "LocalLeave",
    "LocalSeal",
    "ManifestSeen",
    "Notify",
    "Opened",
    "PartsDone",
    "PeerDown",
    "PeerUp",
    "Persist",
    "Persisted",
    "PieceBad",
    "PieceStored",
    "Probe",
    "Probed",
    "Ready",
    "Run",
    "Send",
    "SendBlob",
    "SendBlock",
    "SendDone",
    "SendHeader",
    "SendPiece",
    "SetTimer",
    "Stray",
    "Timer",
    "UnknownLabel",
    "VersionApplied",
    "VersionId",
]


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Event:
    """Root of all events."""


@dataclass(frozen=True, slots=True)
class PeerUp(Event):
    """A control session with `peer` is open; the transport has proven its key. `dialed`: we opened the connection."""

    peer: bytes
    dialed: bool
    address: str | None = None
    """The peer's address as the transport sees it, as multiaddr text; None: the transport does not say."""


@dataclass(frozen=True, slots=True)
class PeerDown(Event):
    """The session with `peer` ended, or a dial to it failed (`dial_failed`). `why`: the reason, for people."""

    peer: bytes
    dial_failed: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Probed(Event):
    """A `Probe` (a dial-back) has ended. `addrs`: the probed addresses at which `peer` itself answered."""

    peer: bytes
    addrs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Heard(Event):
    """A well-formed control message from `peer`."""

    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class HeaderStored(Event):
    """A chunk header that the authority signed is in the store. `peer` None: the store had it before a restart.

    Occurs for a duplicate too: its bytes used up credit, which the core returns.
    """

    peer: bytes | None
    stripe: int | None
    key: ChunkKey
    chunk_id: bytes
    parent_root: bytes
    piece_bytes: tuple[int, ...]
    """Size of each piece."""
    header_bytes: int
    wanted: bool = True
    """Whether the chunk changes a block that this member holds. If not, its header is all that the member needs: it has
    the hashes that the chunk's blocks get."""


@dataclass(frozen=True, slots=True)
class PieceStored(Event):
    """A piece whose hash the header of its chunk names is in the store. Occurs for a duplicate too, as
    `HeaderStored`."""

    peer: bytes | None
    stripe: int | None
    key: ChunkKey
    index: int
    size_bytes: int = 0
    """Bytes received, which count against credit even when the core ignores the chunk."""


@dataclass(frozen=True, slots=True)
class Stray(Event):
    """`size` bytes of a stripe arrived and were thrown away, because their attempt was dropped or their version is
    applied. `peer` is not to blame, and the core returns the credit that they used up."""

    peer: bytes
    stripe: int | None
    size: int


@dataclass(frozen=True, slots=True)
class PieceBad(Event):
    """`peer` sent a header, piece or part that does not verify (`what`). The core closes the session and bans the
    peer."""

    peer: bytes
    what: str


@dataclass(frozen=True, slots=True)
class PartsDone(Event):
    """A blob or block that was requested as `request` is complete, verified and stored. `label`: its version.

    For `Blob.HASHES`, `differs` lists the blocks of our replica that do not match. For `Blob.LAYOUT`, `needs` lists the
    hashes of the files that it names and we lack.
    """

    peer: bytes
    request: int
    label: VersionId
    differs: tuple[int, ...] = ()
    needs: tuple[bytes, ...] = ()
    size_bytes: int = 0
    """Bytes received."""


@dataclass(frozen=True, slots=True)
class UnknownLabel(Event):
    """A block that was requested as `request` is labelled with a version whose hash list we lack: it was thrown
    away."""

    peer: bytes
    request: int
    label: VersionId


@dataclass(frozen=True, slots=True)
class SendDone(Event):
    """A `SendHeader` or `SendPiece` with these fields is done: the socket to `peer` took the bytes."""

    peer: bytes
    stripe: int | None
    key: ChunkKey
    index: int
    """Of the piece; -1: the header."""
    pull: bool = False


@dataclass(frozen=True, slots=True)
class Gave(Event):
    """`size_bytes` of a blob or block that `peer` requested have left."""

    peer: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ManifestSeen(Event):
    """A sealed manifest, its signature not yet checked, arrived by gossip or from our own disk, and not by a tree."""

    manifest: bytes


@dataclass(frozen=True, slots=True)
class Damaged(Event):
    """So many blocks of the replica do not match the version that we hold: the disk lost them."""

    blocks: int


@dataclass(frozen=True, slots=True)
class JobDone(Event):
    """A `Run` effect has ended. `result` depends on the job; see `JobKind`."""

    job: "Job"
    ok: bool
    result: Any = None


@dataclass(frozen=True, slots=True)
class Persisted(Event):
    """The record of the `Persist` effect with this token is durable."""

    token: str


@dataclass(frozen=True, slots=True)
class Timer(Event):
    """The timer of this name is due."""

    name: str


@dataclass(frozen=True, slots=True)
class LocalChunk(Event):
    """Authority: a chunk of the open attempt is signed and in the store, ready to be assigned to a stripe."""

    header: HeaderStored


@dataclass(frozen=True, slots=True)
class LocalSeal(Event):
    """Authority: this sealed manifest is durable. All of its chunks were given as `LocalChunk` before."""

    manifest: bytes


@dataclass(frozen=True, slots=True)
class LocalAbandon(Event):
    """Authority: this attempt at `version` will not be sealed."""

    version: VersionId
    attempt: int


@dataclass(frozen=True, slots=True)
class LocalBudget(Event):
    """How much this machine may still send today. `saving`: little, so the plan should make it a leaf in every tree;
    `spent`: nothing, so it sends no content."""

    saving: bool
    spent: bool


@dataclass(frozen=True, slots=True)
class LocalLeave(Event):
    """The user or SIGTERM ends this process: release the lease and tell the neighbours."""


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Effect:
    """Root of all effects."""


@dataclass(frozen=True, slots=True)
class Send(Effect):
    """Send `message` on the control stream to `peer`. The runtime closes a peer that does not drain its control
    queue."""

    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class SendHeader(Effect):
    """Send the stored header of `key` on the bulk lane; answered by `SendDone` with index -1."""

    peer: bytes
    stripe: int | None
    key: ChunkKey
    pull: bool = False
    """The peer asked for it by `WantChunk`; pushes go first."""


@dataclass(frozen=True, slots=True)
class SendPiece(Effect):
    """Send a stored piece on the bulk lane; answered by `SendDone`."""

    peer: bytes
    stripe: int | None
    key: ChunkKey
    index: int
    pull: bool = False
    late_joiner: bool = False
    """The child waits for the others; their pushes go first."""


@dataclass(frozen=True, slots=True)
class Ready(Effect):
    """Open a bulk stream to `peer`, which has become our child, before there is anything to send: the first piece of
    the next version should not wait for handshakes."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class SendBlob(Effect):
    """Answer a `WantBlob`. The runtime looks the blob up, and sends `Lacks` if it is not there. Pushes go first."""

    peer: bytes
    request: int
    kind: int
    name: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class SendBlock(Effect):
    """Answer a `WantBlock` with the block as it is now, labelled with its version. Pushes go first."""

    peer: bytes
    request: int
    block: int


@dataclass(frozen=True, slots=True)
class Dial(Effect):
    """Connect to `peer` and open a control session. Answered by `PeerUp`, or by `PeerDown` with `dial_failed`."""

    peer: bytes
    addrs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Probe(Effect):
    """A dial-back: dial each of these addresses, whatever connections are open, to see whether `peer` answers. Answered
    by `Probed`."""

    peer: bytes
    addrs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Close(Effect):
    """End the session with `peer`, and refuse new ones for `ban_s` seconds."""

    peer: bytes
    why: str
    ban_s: float = 0.0


class JobKind:
    """What `Run` may ask for. Each is answered by exactly one `JobDone` with the same job.

    STAGE: decode the chunk at `key` against the replica into scratch. Fails with the tuple of torn blocks.
    APPLY: all chunks of `version` are staged: compare the root with the manifest's, make the seal durable, write the
        replica. Fails with a text that says what did not match.
    OPEN: make the replica of the layout named by `name`, from the node's own model folder where there is one, else
        empty. The result is an `Opened`, or a text that says why it failed.
    REPLAY: during a catch-up, apply the stored chunks of `version` to the blocks whose label is older, then check the
        root. Fails with the tuple of blocks that do not match.
    """

    STAGE = "stage"
    APPLY = "apply"
    OPEN = "open"
    REPLAY = "replay"


class Opened(NamedTuple):
    """What an OPEN job found: the root of the bits, and whether the replica is empty (no folder, nothing fetched)."""

    root: bytes
    empty: bool


@dataclass(frozen=True, slots=True)
class Job:
    """One job for a worker thread. `generation` rises when its version is dropped, so that stale results are
    ignored."""

    kind: str
    version: VersionId
    key: ChunkKey | None = None
    name: bytes = b""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Run(Effect):
    """Do this job in a worker thread. Answered by `JobDone`."""

    job: Job


@dataclass(frozen=True, slots=True)
class Persist(Effect):
    """Make `record` durable under `name`; a newer record of that name replaces it. Answered by `Persisted(token)`."""

    token: str
    name: str
    record: bytes


@dataclass(frozen=True, slots=True)
class Drop(Effect):
    """Delete the chunks of this version, or of one attempt at it only."""

    version: VersionId
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class VersionApplied(Effect):
    """The replica is `version` now: the runtime tells the application, and engines may switch to it."""

    version: VersionId
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Announce(Effect):
    """Publish these sealed manifest bytes over GossipSub."""

    manifest: bytes


@dataclass(frozen=True, slots=True)
class SetTimer(Effect):
    """Apply `Timer(name)` at local monotonic time `at`, in seconds; replaces an earlier timer of this name."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class Notify(Effect):
    """Tell the application something; see `notices`."""

    notice: Notice
