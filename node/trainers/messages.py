"""What a trainer and the seed on its host say over the seed's Unix socket.

Each connection has one purpose, which its first message names, and the trainer speaks first:

    Attach ---> Attached (replica, block hashes as descriptors)        a publisher's rank; then, for each version:
        PublishBegin (rank 0) ---> PublishOpened (to each rank)
        PublishBlocks... PublishEnd (each rank) ---> PublishSealed (to each rank)
    or, in the place of a version:
        GoBack (rank 0) ---> WentBack (to each rank)
    OpenRollouts ---> Room                                             one batch of prompts; then, in any order:
        Offer..., Taken..., Accuse..., Stale...   Room..., Sample..., OfferRefused...
    AskState ---> State
    OpenGateway ---> GatewayOpened                                     it serves until this connection ends
    Judge ---> Judged                                                  a person's word about a node
    PutOut ---> WentOut                                                and about who may be in the swarm

Instead of any answer the seed may send `Refusal`, whose text is for the person who runs the trainer. A publisher of
which a rank hangs up in the middle of a version abandons it.
"""

from typing import Annotated, Any, Final, Literal

import msgspec

from codec.chunk import MAX_BODY_BYTES, BlockDelta
from node.engines.base import SamplingParams
from node.status.schema import SeedReport

__all__ = [
    "MAX_RANKS",
    "PROTOCOL",
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
    "PublishOpened",
    "PublishSealed",
    "Refusal",
    "Room",
    "Sample",
    "Stale",
    "State",
    "Taken",
    "VersionRef",
    "WentBack",
]

PROTOCOL: Final = 2
MAX_RANKS: Final = 1024

U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
SessionId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
GroupId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Packed32 = Annotated[bytes, msgspec.Meta(max_length=4 << 16)]


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """I shall publish. `protocol`: ours; the seed refuses another. `session`: one trainer, whose ranks are `world`."""

    protocol: int
    session: SessionId
    rank: Rank = 0
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The head, the layout, and two descriptors: the truth replica, sealed against writing, and its block hashes."""

    epoch: U32
    version: U63
    root: Hash
    layout: bytes


class VersionRef(msgspec.Struct, frozen=True, array_like=True):
    """A sealed version, by its root, or by its number in the history of the head."""

    root: Hash | None = None
    version: U63 | None = None


class PublishBegin(msgspec.Struct, frozen=True, tag="begin"):
    """A new version comes. `step`: the trainer's own count, for people. `number`: of the publish, alike on all ranks.

    `again`: no new one; these are the very bits of this older version, and the swarm goes back to it, in a new epoch.
    """

    step: U63
    number: U63
    again: VersionRef | None = None


class PublishOpened(msgspec.Struct, frozen=True, tag="opened"):
    """Durable: this is what the version will be called. `parent`: the root that the replica has, to be compared with.

    `batch_bytes`: blocks are to be sent when they are so many, so that chunks leave as they fill. `coder`: how they are
    to be coded.
    """

    number: U63
    epoch: U32
    version: U63
    attempt: U32
    parent: Hash
    batch_bytes: U63
    coder: Annotated[int, msgspec.Meta(ge=0, le=1)]


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """A `codec.BlockDelta` on its way."""

    block: U63
    coder: Annotated[int, msgspec.Meta(ge=0, le=2)]
    new_hash: Hash
    payload: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_BODY_BYTES)]

    def unwrap(self) -> BlockDelta:
        return BlockDelta(self.block, self.coder, self.new_hash, self.payload)


class PublishBlocks(msgspec.Struct, frozen=True, tag="blocks"):
    """Some changed blocks of the version that is open."""

    deltas: tuple[Delta, ...]


class PublishEnd(msgspec.Struct, frozen=True, tag="end"):
    """That was all from this rank. `changed`: elements whose bits differ; `blocks`: those that it encoded, changed or
    not, as (first, number); `root`: what the hashes of just these add up to (`codec.state_root`)."""

    changed: U63
    blocks: tuple[tuple[U63, U63], ...]
    root: Hash


class PublishSealed(msgspec.Struct, frozen=True, tag="sealed"):
    """The version is durable, signed and on its way, and the replica holds it. `changed`: of all ranks together."""

    root: Hash
    payload_bytes: U63
    chunks: U63
    changed: U63


class GoBack(msgspec.Struct, frozen=True, tag="back"):
    """Make this version the head again, in a new epoch, from what you keep."""

    number: U63
    wanted: VersionRef


class WentBack(msgspec.Struct, frozen=True, tag="went"):
    """That is the head now. The replica has changed: attach again. `payload_bytes`: 0 where it was the head anyway."""

    number: U63
    epoch: U32
    version: U63
    root: Hash
    payload_bytes: U63


class OpenRollouts(msgspec.Struct, frozen=True, tag="rollouts"):
    """I want `n` samples of each prompt that I shall offer, none more than `max_lag` versions older than the newest
    sealed one when I get it; with 0, none older than the version that I published last.

    `session` names the batch. With `keep`, what was done for it outlives this connection: whoever opens the same
    session again goes on with it. `whole`: each group is drawn by one node, in one batch. `total`: how many prompts I
    shall offer on this connection, if I know. `prompts`, `count`: hash and number of all the prompts of the session, if
    I know them: with `keep` the session stands for these prompts, this `n` and this sampling, and for no others.
    `refusals`: I know `OfferRefused`; without it a prompt that is refused ends the connection.
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


class Room(msgspec.Struct, frozen=True, tag="room"):
    """In all you may have offered `allowed` groups since you opened this session."""

    allowed: U63


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """One prompt (packed token ids). Offering a group twice does no harm. `skipped`: so many of the `total` prompts so
    far are none, and will not be offered."""

    group: GroupId
    prompt: Packed32
    skipped: U63 = 0


class OfferRefused(msgspec.Struct, frozen=True, tag="offer-refused"):
    """This prompt is not drawn, and why; the others go on. `usage`: they do not: the key stands for other work."""

    group: GroupId
    why: str
    usage: bool = False


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """One sample of a complete group; a group's samples come one after another, `left` counts down to 0.

    `token_ids` (u32) and `logprobs` (f32) are packed little-endian; `spans`: (epoch, version, end) each.
    """

    group: GroupId
    sample: U32
    left: U32
    token_ids: Packed32
    logprobs: Packed32
    finish_reason: Literal["stop", "length"]
    spans: tuple[tuple[int, int, int], ...]
    node: Hash


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """I have this group; forget it."""

    group: GroupId


class Accuse(msgspec.Struct, frozen=True, tag="accuse"):
    """This sample of a group that I was sent, and have not taken, is not from the version it names. I want it anew."""

    group: GroupId
    sample: U32
    why: Annotated[str, msgspec.Meta(max_length=512)]


class Stale(msgspec.Struct, frozen=True, tag="stale"):
    """A group that I was sent, and have not taken, has tokens that are too old: this version, from which I count, came
    while the group was on its way. I want those anew."""

    group: GroupId
    epoch: U32
    version: U63


class AskState(msgspec.Struct, frozen=True, tag="ask"):
    """How are things?"""


class State(msgspec.Struct, frozen=True, tag="state"):
    """How the swarm and the ledger stand; `Swarm.state` is made of it."""

    info: SeedReport


class OpenGateway(msgspec.Struct, frozen=True, tag="gateway"):
    """Serve OpenAI's clients at this address until I hang up; see `node.settings.config.GatewayConfig`.

    `listening`: accept on the listening sockets that come as descriptors, which are of this address.
    """

    host: str
    port: int
    model_name: str
    api_key: str
    max_lag: int
    in_flight: int
    inexact_seeds: bool = False
    listening: bool = False


class GatewayOpened(msgspec.Struct, frozen=True, tag="serving"):
    """At `url`, which ends with /v1."""

    url: str


class Judge(msgspec.Struct, frozen=True, tag="judge"):
    """Put `node` (public key) into quarantine, or release it; without a node: nothing, only tell."""

    node: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    release: bool = False
    why: Annotated[str, msgspec.Meta(max_length=512)] = ""


class Judged(msgspec.Struct, frozen=True, tag="judged"):
    """`changed`: it was not so before. `record`: quarantines and releases, oldest first; see `Book.conduct`."""

    changed: bool
    record: list[dict[str, Any]]


class Evict(msgspec.Struct, frozen=True, tag="out"):
    """End the lease of `peer` (public key); `for_good`: and let it in no more. Or revoke the ticket of this id.

    `undo`: let it come in again.
    """

    peer: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    ticket: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    for_good: bool = False
    undo: bool = False


class Evicted(msgspec.Struct, frozen=True, tag="gone"):
    """It is durable. `changed`: it was not so before. `peers`: whose leases ended."""

    changed: bool
    peers: list[bytes]


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """No, and why; `usage`: the user can fix it. The connection ends."""

    why: str
    usage: bool = False


FromTrainer = (
    Attach
    | PublishBegin
    | PublishBlocks
    | PublishEnd
    | GoBack
    | OpenRollouts
    | Offer
    | Taken
    | Accuse
    | Stale
    | AskState
    | OpenGateway
    | Judge
    | Evict
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
    | Refusal
)
