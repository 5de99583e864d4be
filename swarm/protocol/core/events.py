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
    "Commit",
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
    "VersionId",
]


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Event:
    """Root of all events."""


@dataclass(frozen=True, slots=True)
class PeerUp(Event):
    """A control session with `peer` (its key proven by the transport) is open; `dialed`: by us."""

    peer: bytes
    dialed: bool
    address: str | None = None
    """Where the transport sees it: an address of this shape is what the world can dial."""


@dataclass(frozen=True, slots=True)
class PeerDown(Event):
    """The session with `peer` ended, or a dial failed (`dial_failed`, with a reason for people)."""

    peer: bytes
    dial_failed: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Probed(Event):
    """A `Probe` has ended: `peer` itself answered at `addrs` of those that were asked for."""

    peer: bytes
    addrs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Heard(Event):
    """A well-formed control message from `peer`."""

    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class HeaderStored(Event):
    """A chunk header that the authority signed is in the store. `peer` None: it was there before (restart).

    Given for a duplicate too: its bytes used up credit, which the core returns.
    """

    peer: bytes | None
    stripe: int | None
    key: ChunkKey
    chunk_id: bytes
    parent_root: bytes
    piece_bytes: tuple[int, ...]
    """Size of each piece."""
    header_bytes: int


@dataclass(frozen=True, slots=True)
class PieceStored(Event):
    """A piece whose hash its chunk's header names is in the store. Given for a duplicate too, as above."""

    peer: bytes | None
    stripe: int | None
    key: ChunkKey
    index: int
    size_bytes: int = 0
    """As it came: what is counted against credit, of chunks too that the core wants to know nothing of (any more)."""


@dataclass(frozen=True, slots=True)
class Stray(Event):
    """`size` bytes of a stripe that came for nothing: of a dropped attempt, or of a version that is settled. Nobody is
    to blame, and the credit that they used up goes back."""

    peer: bytes
    stripe: int | None
    size: int


@dataclass(frozen=True, slots=True)
class PieceBad(Event):
    """`peer` sent a header, piece or part that does not verify: local evidence, so it is dropped."""

    peer: bytes
    what: str


@dataclass(frozen=True, slots=True)
class PartsDone(Event):
    """A blob or block asked for as `request` is complete, verified and stored. `label`: the version it belongs to.

    For HASHES, `differs` lists the blocks of our replica that do not match. For a LAYOUT, `needs` lists the hashes of
    the files that it names and we lack.
    """

    peer: bytes
    request: int
    label: VersionId
    differs: tuple[int, ...] = ()
    needs: tuple[bytes, ...] = ()
    size_bytes: int = 0
    """As it came."""


@dataclass(frozen=True, slots=True)
class UnknownLabel(Event):
    """A block asked for as `request` came labelled with a version whose hash list we lack: it was thrown away."""

    peer: bytes
    request: int
    label: VersionId


@dataclass(frozen=True, slots=True)
class SendDone(Event):
    """A header or piece has left for `peer` (`what`: as in the effect); frees its place in the queue."""

    peer: bytes
    stripe: int | None
    key: ChunkKey
    index: int
    """-1: the header."""
    pull: bool = False


@dataclass(frozen=True, slots=True)
class Gave(Event):
    """So much of a blob or block has left for `peer`, which had asked for it."""

    peer: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ManifestSeen(Event):
    """A manifest (sealed bytes, signature not yet checked) arrived off the tree: by gossip, or from our own disk."""

    manifest: bytes


@dataclass(frozen=True, slots=True)
class Damaged(Event):
    """So many blocks of the replica turned out not to be what the version that we hold says: a disk lost them."""

    blocks: int


@dataclass(frozen=True, slots=True)
class JobDone(Event):
    """A `Run` effect has ended. `result` depends on the job; see `JobKind`."""

    job: "Job"
    ok: bool
    result: Any = None


@dataclass(frozen=True, slots=True)
class Persisted(Event):
    """What `Persist` named is durable."""

    token: str


@dataclass(frozen=True, slots=True)
class Timer(Event):
    """The timer of this name is due."""

    name: str


@dataclass(frozen=True, slots=True)
class LocalChunk(Event):
    """Authority: a chunk of the open attempt is sealed and in the store, ready to be dealt."""

    header: HeaderStored


@dataclass(frozen=True, slots=True)
class LocalSeal(Event):
    """Authority: this manifest (sealed bytes) is durable; all its chunks have been given."""

    manifest: bytes


@dataclass(frozen=True, slots=True)
class LocalAbandon(Event):
    """Authority: this attempt at `version` will not be sealed."""

    version: VersionId
    attempt: int


@dataclass(frozen=True, slots=True)
class LocalBudget(Event):
    """How much this machine may still send today. `saving`: little, so that it should stand inside no tree; `spent`:
    nothing, so that it gives nobody anything."""

    saving: bool
    spent: bool


@dataclass(frozen=True, slots=True)
class LocalLeave(Event):
    """The person, or SIGTERM, says go: release the lease, tell the neighbours."""


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Effect:
    """Root of all effects."""


@dataclass(frozen=True, slots=True)
class Send(Effect):
    """Put `message` on the control stream to `peer`. A peer that does not drain its control queue is closed."""

    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class SendHeader(Effect):
    """Send the stored header of `key` on the bulk lane; answered by `SendDone` with index -1."""

    peer: bytes
    stripe: int | None
    key: ChunkKey
    pull: bool = False
    """Asked for by `WantChunk`: below pushes in rank."""


@dataclass(frozen=True, slots=True)
class SendPiece(Effect):
    """Send a stored piece on the bulk lane; answered by `SendDone`."""

    peer: bytes
    stripe: int | None
    key: ChunkKey
    index: int
    pull: bool = False
    late_joiner: bool = False
    """To a child that waits for the others: below pushes in rank, too."""


@dataclass(frozen=True, slots=True)
class Ready(Effect):
    """Have a bulk stream to `peer` open, without anything to send yet: it hangs on us, and the next version's first
    piece should not wait for handshakes."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class SendBlob(Effect):
    """Answer a `WantBlob` (the shell looks it up, and sends `Lacks` if it is not there). Below pushes in rank."""

    peer: bytes
    request: int
    kind: int
    name: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class SendBlock(Effect):
    """Answer a `WantBlock` with the block as it is now, labelled. Below pushes in rank."""

    peer: bytes
    request: int
    block: int


@dataclass(frozen=True, slots=True)
class Dial(Effect):
    """Connect to `peer` and open its control session: `PeerUp`, or `PeerDown(dial_failed=True)`."""

    peer: bytes
    addrs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Probe(Effect):
    """Dial each of these addresses anew, whatever connections there are, and see whether `peer` answers: `Probed`."""

    peer: bytes
    addrs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Close(Effect):
    """End the session with `peer`. `ban_s`: refuse it for so long."""

    peer: bytes
    why: str
    ban_s: float = 0.0


class JobKind:
    """What `Run` may ask for; each is answered by exactly one `JobDone` bearing the same job.

    STAGE: decode the chunk at `key` against the replica into scratch. ok; or not ok with result = tuple of torn blocks.
    COMMIT: all chunks of `version` are staged: compare the root with the manifest's, make the seal durable, scatter.
        ok; or not ok with result = what did not match (text).
    OPEN: make the replica of the layout named by `name` (from the node's own model folder where there is one, else
        empty). result = an `Opened`.
    REPLAY: while catching up: apply the stored chunks of `version` to those blocks whose label is older, then check the
        root. ok; or not ok with result = tuple of blocks that do not match.
    """

    STAGE = "stage"
    COMMIT = "commit"
    OPEN = "open"
    REPLAY = "replay"


class Opened(NamedTuple):
    """What an OPEN found: the root of the bits, and whether they are nobody's yet (no folder, nothing fetched)."""

    root: bytes
    empty: bool


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of work for a worker thread. `generation` rises when what it works on is dropped: stale results are."""

    kind: str
    version: VersionId
    key: ChunkKey | None = None
    name: bytes = b""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Run(Effect):
    """Do this job off the loop."""

    job: Job


@dataclass(frozen=True, slots=True)
class Persist(Effect):
    """Make `record` durable under `name` (the newest one wins); answered by `Persisted(token)`."""

    token: str
    name: str
    record: bytes


@dataclass(frozen=True, slots=True)
class Drop(Effect):
    """Forget every chunk of this version, or only of one attempt of it."""

    version: VersionId
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class Commit(Effect):
    """The replica now is `version` with this root: engines may take it, the face is told."""

    version: VersionId
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Announce(Effect):
    """Publish these sealed manifest bytes over GossipSub."""

    manifest: bytes


@dataclass(frozen=True, slots=True)
class SetTimer(Effect):
    """Give `Timer(name)` at local monotonic time `at`; replaces an earlier one of this name."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class Notify(Effect):
    """Tell the application something; see `notices`."""

    notice: Notice
