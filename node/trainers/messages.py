"""The messages between a trainer and the seed on its host, over the seed's Unix socket.

Each connection has one purpose, which its first message names, and the trainer sends first:

    Attach ---> Attached (replica, block hashes as descriptors)        a publisher's rank; then, for each version:
        PublishBegin (rank 0) ---> PublishOpened (to each rank)
        PublishShared... or PublishBlocks..., PublishEnd (each rank) ---> PublishSealed (to each rank)
    or, in the place of a version:
        GoBack (rank 0) ---> WentBack (to each rank)
    OpenRollouts ---> Room                                             one batch of prompts; then, in any order:
        Offer..., Taken..., Accuse..., Stale..., Abort..., Trained...   Room..., Sample..., OfferRefused...
    AskState ---> State
    OpenGateway ---> GatewayOpened                                     the seed serves until this connection ends
    Judge ---> Judged                                                  the operator quarantines or releases a node
    Evict ---> Evicted                                                 the operator removes a member or revokes a ticket
    AskAdapters ---> Adapters                                          which adapters there are
    RemoveAdapter ---> AdapterRemoved                                  the operator takes an adapter out of the swarm
    PublishFiles ---> FilesPublished                                   a command: see `node.trainers.file_messages`
    SaveState ---> StateSaved                                          a saved state: see `node.trainers.state_messages`

Instead of any answer the seed may send `Refusal`, whose text is for the person who runs the trainer. When a rank
disconnects in the middle of a version, the seed abandons that version.
"""

from typing import Annotated, Any, Final, Literal

import msgspec

from codec.chunk import MAX_BODY_BYTES, BlockDelta
from node.engines.base import SamplingParams
from node.ledger.terms import PLAIN, Terms
from node.status.schema import SeedReport
from node.trainers.adapter_messages import AdapterRemoved, Adapters, AskAdapters, RemoveAdapter
from node.trainers.file_messages import FileAnswers, PublishFiles, Refusal
from node.trainers.state_messages import SaveState, StateAnswers

__all__ = [
    "MAX_RANKS",
    "PROTOCOL",
    "ROLLOUTS",
    "Abort",
    "Accuse",
    "AskState",
    "Attach",
    "Attached",
    "Delta",
    "Evict",
    "Evicted",
    "FromSeed",
    "FromTrainer",
    "GatewayOpened",
    "GoBack",
    "Judge",
    "Judged",
    "Offer",
    "OfferRefused",
    "OpenGateway",
    "OpenRollouts",
    "PublishBegin",
    "PublishBlocks",
    "PublishEnd",
    "PublishFiles",
    "PublishOpened",
    "PublishSealed",
    "PublishShared",
    "Refusal",
    "Room",
    "Sample",
    "SaveState",
    "SharedDelta",
    "Stale",
    "State",
    "Taken",
    "Trained",
    "VersionRef",
    "VersionSeal",
    "WentBack",
]

PROTOCOL: Final = 3
"""Number of this protocol. It grows when old and new processes cannot understand each other."""
ROLLOUTS: Final = 2
"""What this release understands of rollouts. It grows with fields and messages that an older seed would ignore or
refuse. 1: `Offer.n` and `Offer.sampling`, `OpenRollouts.terms`, `Abort`, `Trained`. 2: rewards."""
MAX_RANKS: Final = 1024
"""Ranks of one trainer. Ranks share a host, so this is far above what exists; it bounds what the seed allocates."""

U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
SessionId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
GroupId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
PartText = Annotated[str, msgspec.Meta(min_length=1, max_length=80)]
Packed32 = Annotated[bytes, msgspec.Meta(max_length=4 << 16)]


class VersionSeal(msgspec.Struct, frozen=True, array_like=True):
    """What the seal of a version says. `root`: over all parts. `changed`: elements, over all ranks."""

    root: Hash
    payload_bytes: U63
    changed: U63


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """A rank asks to publish.

    `protocol`: the trainer's `PROTOCOL`; the seed refuses another. `session`: the same on all ranks of one trainer.
    `world`: the number of its ranks. `ring_bytes`: the message comes with the descriptor of a ring of this size
    (`node.ipc.ring`) for this rank's blocks; 0: without. `part`: the part of the model that it publishes, as
    `codec.parts.Part` writes it. `adapter`: instead of `part`, the name of an adapter, whose slot the seed finds, or
    takes for a new name. Only a trainer of one rank publishes an adapter. `unheard`: (epoch, version) that this rank
    sent over an earlier connection, which ended before the seed said that it was sealed.
    """

    protocol: int
    session: SessionId
    rank: Rank = 0
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    ring_bytes: U63 = 0
    part: PartText = "base"
    adapter: Annotated[str, msgspec.Meta(max_length=256)] = ""
    unheard: tuple[U32, U63] | None = None


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The rank is attached. Holds the head, and the root and the layout's bytes of the part that it publishes; blocks
    have their numbers in that layout. `swarm_root`: over all parts. `base`: for an adapter, the base's layout, and
    `base_sample` a sample of its weights, by `codec.base_sample`. `unheard`: the seal of the version that `Attach`
    named; None: it was not sealed, or was rolled back.

    Comes with two descriptors: the seed's replica, in which the part begins at byte `offset`, and which can be mapped
    for reading only; and the hashes of the part's blocks.
    """

    epoch: U32
    version: U63
    root: Hash
    layout: bytes
    swarm_root: Hash
    offset: U63 = 0
    base: bytes = b""
    unheard: VersionSeal | None = None
    base_sample: bytes = b""


class VersionRef(msgspec.Struct, frozen=True, array_like=True):
    """Names a sealed version by its root, or by its number in the history of the head."""

    root: Hash | None = None
    version: U63 | None = None


class PublishBegin(msgspec.Struct, frozen=True, tag="begin"):
    """Rank 0 begins a version. `step`: the trainer's own count, for people. `number`: of the publish, the same on all
    ranks.

    `again`: not a new version: the bits are those of this older one, and the swarm goes back to it, in a new epoch.
    `expected_bytes`: about what the version's payload will have, if the trainer knows; 0: it does not.
    """

    step: U63
    number: U63
    again: VersionRef | None = None
    expected_bytes: U63 = 0


class PublishOpened(msgspec.Struct, frozen=True, tag="opened"):
    """The version has a name, which is durable. `parent`: the root of the part in the seed's replica, which the blocks
    are compared with.

    `batch_bytes`: payload after which a rank sends its blocks, so that chunks leave as they fill. `coder`: of
    `codec.chunk`, to code the blocks with. `ring`: the seed reads the ring of each rank that gave it one, so these
    ranks send `PublishShared` and not `PublishBlocks`. `base_values`: see `codec.replica.Replica`.
    """

    number: U63
    epoch: U32
    version: U63
    attempt: U32
    parent: Hash
    batch_bytes: U63
    coder: Annotated[int, msgspec.Meta(ge=0, le=1)]
    ring: bool = False
    base_values: bool = False


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """A `codec.BlockDelta` as a message."""

    block: U63
    coder: Annotated[int, msgspec.Meta(ge=0, le=2)]
    new_hash: Hash
    payload: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_BODY_BYTES)]

    def unwrap(self) -> BlockDelta:
        """The delta that this message carries."""
        return BlockDelta(self.block, self.coder, self.new_hash, self.payload)


class PublishBlocks(msgspec.Struct, frozen=True, tag="blocks"):
    """Some of the changed blocks of the open version."""

    deltas: tuple[Delta, ...]


class SharedDelta(msgspec.Struct, frozen=True, array_like=True):
    """A changed block in the rank's ring: a record at place `at`.

    The record has the positions of `listed` changed elements (u32 each, ascending), their new bits, then `payload`
    bytes of payload. `listed` is 0 where the seed needs no list (a raw block's payload is its new bits), or would gain
    nothing by it.
    """

    block: U63
    coder: Annotated[int, msgspec.Meta(ge=0, le=2)]
    new_hash: Hash
    at: U63
    payload: Annotated[int, msgspec.Meta(ge=1, le=MAX_BODY_BYTES)]
    listed: U32 = 0


class PublishShared(msgspec.Struct, frozen=True, tag="shared"):
    """As `PublishBlocks`, with the blocks in the rank's ring, in ascending order of their places."""

    deltas: tuple[SharedDelta, ...]


class PublishEnd(msgspec.Struct, frozen=True, tag="end"):
    """This rank has sent all of its blocks. `changed`: elements whose bits differ. `blocks`: those that the rank
    encoded, changed or not, as (first, count). `root`: the root over the hashes of these blocks
    (`codec.state_root`)."""

    changed: U63
    blocks: tuple[tuple[U63, U63], ...]
    root: Hash


class PublishSealed(msgspec.Struct, frozen=True, tag="sealed"):
    """The version is durable, signed and on its way, and the replica holds it. `root`: of the part that was published.
    `changed`: elements, over all ranks. `swarm_root`: the version's, over all parts."""

    root: Hash
    payload_bytes: U63
    chunks: U63
    changed: U63
    swarm_root: Hash


class GoBack(msgspec.Struct, frozen=True, tag="back"):
    """Asks the seed to make this version the head again, in a new epoch, from the versions that it keeps."""

    number: U63
    wanted: VersionRef


class WentBack(msgspec.Struct, frozen=True, tag="went"):
    """The version is the head. The replica has changed: attach again. `payload_bytes`: 0 if it was the head."""

    number: U63
    epoch: U32
    version: U63
    root: Hash
    payload_bytes: U63


class OpenRollouts(msgspec.Struct, frozen=True, tag="rollouts"):
    """The trainer asks for `n` samples of each prompt that it will offer.

    `session` names the batch. `max_lag`: no token may be more than this many versions older than the newest sealed one
    when the trainer gets it; with 0, none older than the version that the trainer published last. `keep`: the results
    outlive this connection, and a trainer that opens the same session again continues it. `whole`: each group is
    generated by one node, in one batch. `total`: how many prompts the trainer will offer on this connection, if known.
    `prompts`, `count`: hash and number of all prompts of the session, if known; with `keep` the session is bound to
    these prompts, this `n` and this sampling. `refusals`: the trainer understands `OfferRefused`; without it, a refused
    prompt ends the connection. `terms`: what else it asks of the groups.
    """

    session: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    n: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    sampling: SamplingParams
    max_lag: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 1
    keep: bool = False
    whole: bool = False
    total: U63 | None = None
    prompts: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    count: U63 = 0
    refusals: bool = False
    terms: Terms = PLAIN


class Room(msgspec.Struct, frozen=True, tag="room"):
    """Flow control: the trainer may offer `allowed` groups in all, counted from the opening of this connection.
    `speaks`: the seed's `ROLLOUTS`; 0: a release before it had one."""

    allowed: U63
    speaks: U32 = 0


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """One prompt, as packed token ids. Offering a group twice does no harm. `skipped`: how many of the `total` prompts
    so far were refused by the trainer's own side, and will not be offered. `n`, `sampling`: None: as the session
    says."""

    group: GroupId
    prompt: Packed32
    skipped: U63 = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    sampling: SamplingParams | None = None


class OfferRefused(msgspec.Struct, frozen=True, tag="offer-refused"):
    """This prompt is refused, and why. `usage`: the whole batch is, because its key is bound to other work."""

    group: GroupId
    why: str
    usage: bool = False


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """One sample of a complete group. A group's samples come one after another, and `left` counts down to 0.

    `token_ids` (u32) and `logprobs` (f32) are packed little-endian. `spans`: (epoch, version, end) each. `node`: public
    key of the node that signed it. `own`: for each span, the own version of what drew it, an adapter or the base; empty
    where the swarm has no adapters. `counted`, `lag`: the version that the seed counts from, and how many versions that
    changed the adapter or the base its oldest token is behind that. `routes`, `prompt_routes`: see
    `node.ledger.messages.Rollout`. `reward`: what its node signed, if a reward was asked for; None: no number, for the
    reason `no_reward`. `reward_check`: what another node made of it.
    """

    group: GroupId
    sample: U32
    left: U32
    token_ids: Packed32
    logprobs: Packed32
    finish_reason: Literal["stop", "length"]
    spans: tuple[tuple[int, int, int], ...]
    node: Hash
    own: tuple[int, ...] = ()
    counted: tuple[U32, U63] | None = None
    lag: U63 = 0
    routes: bytes = b""
    prompt_routes: bytes = b""
    reward: float | None = None
    no_reward: str = ""
    reward_check: Literal["checked", "unchecked", "disputed"] = "unchecked"


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The trainer has used this group; the seed may forget it."""

    group: GroupId


class Accuse(msgspec.Struct, frozen=True, tag="accuse"):
    """The trainer's check found that this sample is not from the version it names. The trainer was sent its group, has
    not taken it, and wants another sample in its place."""

    group: GroupId
    sample: U32
    why: Annotated[str, msgspec.Meta(max_length=512)]


class Stale(msgspec.Struct, frozen=True, tag="stale"):
    """A group that the trainer was sent, and has not taken, may have tokens that are too old: this version, which lags
    are counted from, came while the group was on its way. The trainer wants the group again, with other samples in the
    place of those that are."""

    group: GroupId
    epoch: U32
    version: U63


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The trainer no longer wants these groups, which it has offered: their leases end, and nodes stop generating."""

    groups: Annotated[tuple[GroupId, ...], msgspec.Meta(min_length=1, max_length=1024)]


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    """The trainer's weights are at this version, which may be sealed, on its way, or not published yet. Lags of a
    session with `Terms.from_trained` are counted from it."""

    epoch: U32
    version: U63


class AskState(msgspec.Struct, frozen=True, tag="ask"):
    """Asks for the status of the seed and the swarm."""


class State(msgspec.Struct, frozen=True, tag="state"):
    """The state of the swarm and the ledger; `Swarm.state` is made of it."""

    info: SeedReport


class OpenGateway(msgspec.Struct, frozen=True, tag="gateway"):
    """Asks the seed to serve a gateway at this address until this connection ends.

    For the fields see `node.settings.config.GatewayConfig`. `requests`: the process that asks listens itself; the
    message comes with a local socket, as a descriptor, on which it sends the requests (`node.gateway.front.messages`).
    `listening`: the message comes with listening sockets of this address, and the seed accepts on them; processes of
    older releases ask for that.
    """

    host: str
    port: int
    model_name: str
    api_key: str
    max_lag: int
    in_flight: int
    inexact_seeds: bool = False
    listening: bool = False
    requests: bool = False
    images: int = 8


class GatewayOpened(msgspec.Struct, frozen=True, tag="serving"):
    """The gateway is served at `url`, which ends with /v1."""

    url: str


class Judge(msgspec.Struct, frozen=True, tag="judge"):
    """Asks the seed to quarantine `node` (public key), or to `release` it; without a node, for the record only."""

    node: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    release: bool = False
    why: Annotated[str, msgspec.Meta(max_length=512)] = ""


class Judged(msgspec.Struct, frozen=True, tag="judged"):
    """`changed`: the request made a difference. `record`: quarantines and releases, oldest first."""

    changed: bool
    record: list[dict[str, Any]]


class Evict(msgspec.Struct, frozen=True, tag="out"):
    """Asks the seed to end the lease of `peer` (public key), or to revoke the ticket with this id.

    `for_good`: the peer is also barred from joining again. `undo`: allow the peer, or the ticket, again.
    """

    peer: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    ticket: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    for_good: bool = False
    undo: bool = False


class Evicted(msgspec.Struct, frozen=True, tag="gone"):
    """The change is durable. `changed`: the request made a difference. `peers`: the members whose leases ended."""

    changed: bool
    peers: list[bytes]


FromTrainer = (
    Attach
    | PublishBegin
    | PublishBlocks
    | PublishShared
    | PublishEnd
    | GoBack
    | OpenRollouts
    | Offer
    | Taken
    | Accuse
    | Stale
    | Abort
    | Trained
    | AskState
    | OpenGateway
    | Judge
    | Evict
    | AskAdapters
    | RemoveAdapter
    | PublishFiles
    | SaveState
)
FromSeed = (
    Attached
    | PublishOpened
    | PublishSealed
    | WentBack
    | Room
    | OfferRefused
    | Sample
    | State
    | GatewayOpened
    | Judged
    | Evicted
    | Adapters
    | AdapterRemoved
    | FileAnswers
    | StateAnswers
    | Refusal
)
