"""What a swarm process says about itself: one schema for the socket, the terminal, `--json` and programs.

A seed answers with `SeedStatus`, a node with `NodeStatus`, a relay with `RelayStatus`; `role` tells them apart. The
seed's ledger adds `LedgerStatus`, and a node with an engine the fields of `OwnStatus` from `engine` on.

Users and their programs read the field names as JSON keys (`swarm-node status --json`, `Swarm.state`), so a field is
never renamed, and its unit never changes; units are in the names (`_s` seconds, `_bytes`, `_ms`), rates are a second.

Compatibility: a reader skips fields that it does not know, and every field has a default, so processes of different
releases understand each other. A field that only some processes have is `UNSET` elsewhere, and then not sent.
The structs are mutable, so that each part of a process can fill in what it knows.
"""

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field, msgpack

from node.status.work_schema import (
    CheckCounts,
    ClientStatus,
    CommitTimes,
    EvidenceStatus,
    LedgerNode,
    LedgerStatus,
    QuarantineStatus,
    RewardCounts,
    TimeSplit,
    Version,
    WorkerStatus,
)
from swarm.protocol.transfer.allowance import AllowanceStatus
from swarm.protocol.transfer.egress import EgressStatus

__all__ = [
    "AllowanceStatus",
    "CheckCounts",
    "ClientStatus",
    "CommitTimes",
    "EgressStatus",
    "EngineCommit",
    "EngineStatus",
    "EvidenceStatus",
    "LedgerNode",
    "LedgerStatus",
    "MemberStatus",
    "NodeStatus",
    "OwnStatus",
    "PieceMap",
    "QuarantineStatus",
    "RelayStatus",
    "RewardCounts",
    "SavedStateStatus",
    "SeedReport",
    "SeedStatus",
    "Status",
    "Step",
    "Stripes",
    "TicketStatus",
    "TimeSplit",
    "Version",
    "WorkerStatus",
    "to_plain",
    "versions_behind",
]

Stripes = list[dict[int, int | None]]
"""For each stripe, the parent's slot by the child's slot; None: the parent is the trainer."""


# ------------------------------------------------------------ of a version on its way


class PieceMap(Struct, kw_only=True):
    """How far the newest version has arrived here, chunk by chunk. The lists have one entry for each cell; a cell is
    one chunk, or several in a row where there are more than `MOST_CELLS`."""

    version: Version = (0, 0)
    sealed: bool = False
    """Its manifest is here, so that the number of chunks is known."""
    chunks: int = 0
    """Of the manifest; before the seal, up to the newest that was heard of."""
    have: list[float] = []
    """Share of the cell's bytes that are here, 0..1."""
    giver: list[int] = []
    """The member's slot that the newest of it came from, or at the seed the root child to which it goes; -1: the
    trainer; -2: none yet."""


# ------------------------------------------------------------ of the seed


class MemberStatus(Struct, kw_only=True):
    """One member, as the seed sees it. The fields from `held` to `saving` are what the member reported last."""

    slot: int = 0
    """Its place in the roster."""
    peer: str = ""
    """PeerId."""
    name: str = ""
    """As it was started (`--name`); not unique."""
    reached: str = ""
    """How the seed reaches it: "direct", "dialed us", "punched", "circuit" (through a relay); without a connection
    "can be dialed" or "cannot be dialed"; empty: not known."""
    standing: str = ""
    """Of its lease: "fresh", "soft" (a leaf in every tree), "dead" (no content, no work)."""
    lease_s: float | None = None
    """Until its lease ends if nothing is heard of it."""
    held: Version | None = None
    """Of its replica; None: it has reported none."""
    shard: str | UnsetType = UNSET
    """The ranks whose blocks it holds, as 3/8 (rank 3 of 8); UNSET: the whole model."""
    engine: Version | None = None
    """That its engine generates with; None: no engine, or not ready."""
    catching_up: float = 1.0
    """How much of the model it holds during a catch-up, 0..1; 1: it is not catching up."""
    sent_bytes: int = 0
    received_bytes: int = 0
    saving: bool = False
    """It has sent nearly all that it may send today, so nothing is relayed through it."""
    tokens_s: float = 0.0
    """Tokens/s, measured by the ledger."""
    accepted: int = 0
    """Samples."""
    refused: dict[str, int] = {}
    """Samples, by the reason."""
    useful: float | None = None
    """See `LedgerNode.useful`."""
    seconds: TimeSplit | None = None
    quarantine: QuarantineStatus | None = None
    evidence: EvidenceStatus | None = None
    """See `LedgerNode.evidence`."""
    outstanding: int = 0
    """Samples leased to it and still to come."""
    uplink_mbit: float = 0.0
    """Mbit/s that the plan of the trees assumes: what the member offers, or less by its receivers' measurements."""
    senders: dict[int, float] = {}
    """Mbit/s at which it received the last version that could be timed, by the sender's slot. A claim of the member."""


class Step(Struct, kw_only=True):
    """One published version: how large it was, what it cost, and how long it took."""

    version: Version = (0, 0)
    density: float | None = None
    """Changed elements by all elements of the model."""
    bits_per_change: float | None = None
    """Bits sent by changed elements; None: nothing changed."""
    experts: int | None = None
    """Experts of the model, in all layers; None: it has none that are known by their names."""
    experts_touched: int | None = None
    """Those of which the version changed anything; None as before. Where the trainer did not list the changes of a
    block with several experts, all of these count."""
    delta_bytes: int = 0
    """Payload of the version."""
    trainer_sent_bytes: int = 0
    """At the seed's sockets, from the publish until the last member held it."""
    trainer_control_bytes: int = 0
    """Of those, everything but payload."""
    trainer_copies: float | None = None
    """Payload that the seed sent by `delta_bytes`."""
    first_chunk_s: float | None = None
    """From the begin of the publish until the first chunk left."""
    extract_s: float | None = None
    """From the begin of the publish until all of it was encoded."""
    publish_to_first_s: float | None = None
    """From the begin of the publish until the first member held it; None: not yet."""
    publish_to_half_s: float | None = None
    """The same, until half of the members held it."""
    publish_to_all_s: float | None = None
    """The same, until the last member held it."""
    age_s: float = 0.0
    """Since the begin of the publish."""
    trainer_step: int | None = None
    """The step that the trainer named (`publish --step`); None: none, since the seed went back to an older version."""
    held: int = 0
    """Members that hold it."""
    waiting: int = 0
    """Members that are still to get it."""
    engines: int = 0
    """Engines that committed it."""
    wait_s: float | None = None
    """This field and the next three are of `CommitTimes`, each the longest of all engines."""
    stage_s: float | None = None
    pause_s: float | None = None
    resume_s: float | None = None


class TicketStatus(Struct, kw_only=True):
    """A ticket that was used or revoked."""

    id: str = ""
    """Hex."""
    expires: float = 0.0
    """Unix time, s; 0: not shown since the seed knows it."""
    nodes: int = 0
    """How many members it admits at a time; 0: not known."""
    nodes_ever: int = 0
    """How many different members it admits in all; 0: no limit."""
    here: int = 0
    """Members that have a lease by it now."""
    ever: int = 0
    """Different members that came in by it."""
    peers: list[str] = []
    """PeerIds of those; without a limit of members only the last ones."""
    quota_bytes: int = 0
    """What its members may fetch; 0: no limit."""
    fetched_bytes: int = 0
    revoked: bool = False


class MemoryStatus(Struct, kw_only=True):
    """Memory of the machine, in bytes."""

    needs_bytes: int = 0
    """What this process and its engine need at their peak, as reckoned (`docs/operations.md`); 0: not known yet."""
    parts: dict[str, int] = {}
    """What `needs_bytes` consists of."""
    used_bytes: int = 0
    """What this process uses now, without its engine's process."""
    free_bytes: int | None = None
    """What the machine or container has left; None: not known."""


class AdapterStatus(Struct, kw_only=True):
    """An adapter in one of the model's slots."""

    slot: int = 0
    name: str = ""
    rank: int = 0
    """The highest of its modules."""
    version: int = 0
    """Its own: how many versions of the swarm have changed it."""
    root: str = ""
    """Hash over the slot's bits, hex."""
    weights_bytes: int = 0
    """A full copy of the adapter."""


class PartsStatus(Struct, kw_only=True):
    """The parts of a model that has slots for adapters."""

    base_root: str = ""
    """Hash over the base's bits, hex: the root that the swarm would have without other parts."""
    slots: int = 0
    slots_free: int = 0
    slot_rank: int = 0
    """The highest rank that an adapter may have."""
    slot_bytes: int = 0
    """Of one slot in use; one that is free takes no memory."""
    adapters: list[AdapterStatus] = []
    """By slot."""


class DraftStatus(Struct, kw_only=True):
    """The draft model that a swarm carries with its base."""

    root: str = ""
    """Hash over its bits, hex."""
    versions: int = 0
    """Versions since this process started that changed it."""
    weights_bytes: int = 0
    """A full copy of it."""
    loaded: bool | UnsetType = UNSET
    """Of a node: whether its engines propose tokens by it."""
    acceptance: float | UnsetType | None = UNSET
    """Where it is loaded: tokens that a step of the policy gives on average, since the engines started, at least 1;
    None: not known yet."""


class SavedStateStatus(Struct, kw_only=True):
    """A state that the trainer saved into the swarm (`Swarm.save_state`), as encrypted fragments at nodes."""

    step: int = 0
    """The trainer's own count."""
    size_bytes: int = 0
    """Of its content."""
    age_s: float = 0.0
    """Since it was saved, by this machine's clock."""
    whole: bool = False
    """Every fragment of it was once durable at a node, so that it replaced the one before. False: it is on its way."""
    fragments: int = 0
    needed: int = 0
    """Fragments that give it back."""
    held: int = 0
    """Fragments that nodes have, as far as the seed has placed them and the nodes say so."""
    nodes: int = 0
    """Different nodes that have them."""


class SeedStatus(Struct, kw_only=True, tag_field="role", tag="seed"):
    """A seed and its swarm. Byte counts are since the seed started."""

    swarm: str = ""
    """PeerId of the seed, which names the swarm."""
    head: Version | None = None
    """The newest sealed version."""
    root: str = ""
    """Hash over the head's bits, hex."""
    model_bytes: int = 0
    """A full copy of the model, without other parts than the base."""
    parts: PartsStatus | UnsetType = UNSET
    """Of a model that has slots for adapters."""
    draft: DraftStatus | UnsetType = UNSET
    """Of a swarm that carries a draft model."""
    saved_states: list[SavedStateStatus] = []
    """The last whole one, and a newer one that is on its way."""
    addrs: list[str] = []
    """Where members reach the seed."""
    relays: dict[str, str] = {}
    """By the address of each relay of `--via`: why this machine has no reservation there now; empty: it has one."""
    sent_bytes: int = 0
    """At the seed's sockets."""
    control_bytes: int = 0
    """Of those, everything but payload."""
    memory: MemoryStatus = field(default_factory=MemoryStatus)
    egress: EgressStatus = field(default_factory=EgressStatus)
    nodes: list[MemberStatus] = []
    """All members with a lease, by slot."""
    stripes: Stripes = []
    steps: list[Step] = []
    """The last 256 versions, the newest last."""
    work: LedgerStatus = field(default_factory=LedgerStatus)
    tickets: list[TicketStatus] = []
    barred: list[str] = []
    """PeerIds of members that were revoked."""
    pieces: PieceMap = field(default_factory=PieceMap)


class SeedReport(Struct, kw_only=True):
    """The seed's answer to a trainer that asks for its state."""

    swarm: SeedStatus = field(default_factory=SeedStatus)
    work: LedgerStatus = field(default_factory=LedgerStatus)


# ------------------------------------------------------------ of a member


class EngineCommit(Struct, kw_only=True):
    """A version that the engine of this node committed."""

    version: Version = (0, 0)
    pause_ms: float = 0.0
    """Nothing was generated."""


class EngineStatus(Struct, kw_only=True):
    """One of a node's engines."""

    state: str = ""
    """"ready"; "behind" (it lacks the node's version, so it gets no work); "starting" (or loading its weights);
    "asleep"; "given up" (it cannot be started)."""
    version: Version | None = None
    """That it generates with; None: it is not ready."""
    sequences: int = 0
    """That it generates at the moment."""
    restarts: int = 0
    """How often its process ended after it had served, and was started again."""
    reloads: int = 0
    """How often it was reloaded from the replica."""
    devices: list[str] = []
    """Its GPUs, as `CUDA_VISIBLE_DEVICES` names them; empty: a CPU, or those that it chooses."""
    url: str = ""
    """Its OpenAI endpoint; empty: it has none."""
    why: str = ""
    """Why it was given up."""


class LiveReads(Struct, kw_only=True):
    """Blocks of the replica that were read back out of the engines' memory (`--replica engine`)."""

    right: int = 0
    """They had the bits that they must have, or an older version's that the chunks since then bring forward."""
    other: int = 0
    """They had others, and were read from disk."""


class OwnStatus(Struct, kw_only=True):
    """A member as it sees itself. Byte counts are since it started."""

    slot: int = -1
    """Its place in the roster; -1: it has none yet."""
    name: str = ""
    """As it was started (`--name`)."""
    peer: str = ""
    """PeerId."""
    standing: str = ""
    """Of its lease; see `MemberStatus.standing`."""
    dialable: bool = False
    """The roster says that other members can dial it."""
    held: Version | None = None
    """Of its replica; of a relay, the newest sealed version of which it has all chunks, or the head when it joined."""
    shard: str | UnsetType = UNSET
    """See `MemberStatus.shard`."""
    root: str | None = None
    """Hash over the bits of `held`, hex."""
    draft: DraftStatus | UnsetType = UNSET
    """Of a swarm that carries a draft model."""
    catching_up: float = 1.0
    """See `MemberStatus.catching_up`."""
    phase: str = ""
    """Of its catch-up; "idle": there is none."""
    sent_bytes: int = 0
    received_bytes: int = 0
    pushed_bytes: int = 0
    """Payload that it passed on down the stripes."""
    duplicate_bytes: int = 0
    """Payload that it received and had already."""
    memory: MemoryStatus = field(default_factory=MemoryStatus)
    uplink_today: AllowanceStatus | UnsetType = UNSET
    """What it may send a day (`--up-gb-day`); UNSET: no limit."""
    engine: Version | UnsetType | None = UNSET
    """That the engine generates with; None: it is not ready. UNSET, as are all fields below: there is no engine."""
    live_root: str | UnsetType | None = UNSET
    """Hash over the bits that the last `status --prove` read back out of the engines, hex; None: not proven yet."""
    live_proven: bool | UnsetType | None = UNSET
    """Whether those bits are the version's; None: not proven yet."""
    engine_restarts: int | UnsetType = UNSET
    """How often the engine's process ended after it had served, and was started again."""
    engine_reloads: int | UnsetType = UNSET
    """How often the engine was reloaded from the replica."""
    live_reads: LiveReads | UnsetType = UNSET
    """Where the engines' memory is the replica; UNSET elsewhere."""
    engine_urls: list[str] | UnsetType = UNSET
    """OpenAI endpoints of the engines."""
    engines: list[EngineStatus] | UnsetType = UNSET
    """Each engine; none while their devices are not planned yet."""
    asleep: bool | UnsetType = UNSET
    """The engines' memory is free (`swarm-node sleep`), and no work is taken."""
    tokens_s: float | UnsetType = UNSET
    """Tokens/s; see `WorkerStatus.tokens_per_s`."""
    commits: list[EngineCommit] | UnsetType = UNSET
    """The last 256, the newest last."""
    work: WorkerStatus | UnsetType = UNSET


class _MemberProcess(Struct, kw_only=True):
    """What a node and a relay have in common."""

    swarm: str = ""
    """PeerId of the seed."""
    head: Version | None = None
    """The newest sealed version, by the last heartbeat; None: there was none."""
    nodes: list[OwnStatus] = []
    """Exactly one: this member."""
    stripes: Stripes = []
    pieces: PieceMap = field(default_factory=PieceMap)
    message: str = ""
    """A sentence about what is wrong; empty: nothing is."""
    seed_reached: str = ""
    """How it reaches the seed; see `MemberStatus.reached`."""
    relays: dict[str, str] = {}
    """See `SeedStatus.relays`."""


class NodeStatus(_MemberProcess, kw_only=True, tag_field="role", tag="node"):
    """A member that holds the model."""


class RelayStatus(_MemberProcess, kw_only=True, tag_field="role", tag="relay"):
    """A member that passes chunks on and leads to machines that cannot be dialed."""

    places: int = 0
    """Reservations: machines that are reached through it."""
    circuits: int = 0
    """Connections through it that are open."""
    relayed_bytes: int = 0
    """That crossed those connections."""


Status = SeedStatus | NodeStatus | RelayStatus


def versions_behind(held: Version, head: Version) -> int:
    """How many versions `held` is behind `head`; in an older epoch it is behind by the whole epoch of `head`."""
    return head[1] - held[1] if held[0] == head[0] else head[1] + 1


def to_plain(status: Struct) -> Any:
    """`status` as dicts, lists and numbers: what `--json` prints and `Swarm.state` returns. Versions are lists."""
    return msgpack.decode(msgpack.encode(status))
