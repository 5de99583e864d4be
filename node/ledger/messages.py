"""The messages between a node and the ledger, and their encoding in the body of the swarm's `Work` messages.

    node                                   ledger (in the seed)
      WorkRequest  ------------------------->  the node's free capacity, version and rate
      <------------------------------- WorkLease  one for each part of a request group
      Renew        ------------------------->  progress; asks for a later deadline
      <--------------------------------- Renewed
      SignedRollout ------------------------>  one finished sample; repeated until its verdict arrives
      RolloutPart  ------------------------->  a part of one that is larger than a message
      <---------------------------------- Follow  tell the tokens of these leases as they are drawn
      Drawn        ------------------------->  tokens of samples that are not finished
      <--------------------------------- Verdict
      GiveBack     ------------------------->  the node will not finish these leases
      Cannot       ------------------------->  the node's engine refuses this work
      <--------------------------------- Withdraw  these leases are void
      <------------------------------------ Unfit  no work for this engine
      <-------------------------------------- Ask  score these tokens of another node's sample
      WorkAnswer       ------------------------->
      <--------------------------- JudgeRequest  what should these tokens of another node's sample look like?
      JudgeAnswer  ------------------------->
      <------------------------------ AskReward  which reward does this sample of another node have?
      RewardAnswer ------------------------->
      Timesheet    ------------------------->  how the node's time divides
      <------------------------------ AskAbilities  what can your engine do?
      Abilities    ------------------------->
      AskImage     ------------------------->  a part of an image that the sampling of a lease names
      <------------------------------ ImagePart

Any message may be lost, repeated or late: a request names the leases that the node holds, so that a lost lease is sent
again, and a result is safe to repeat. A body is one byte of protocol version and a MessagePack array `[tag, field...]`.
The node that generated a rollout signs it under `ROLLOUT_DOMAIN`, and the ledger keeps the signed bytes.
"""

from enum import StrEnum
from typing import Annotated, Any, Final, Literal

import msgspec
from blake3 import blake3

from codec.errors import PeerError
from codec.sign import SIGNATURE_BYTES, Key, open_sealed
from codec.unpack import unpack
from node.engines.base import SamplingParams
from node.ledger.ability_messages import Abilities, AskAbilities, AskAdapters, LoadedAdapters
from node.ledger.fields import (
    MAX_ADAPTERS,
    MAX_BODY_BYTES,
    MAX_CAPACITY,
    MAX_PARTS,
    MAX_ROLLOUT_BYTES,
    MAX_TOKENS,
    PART_BYTES,
    U32,
    U63,
    GroupId,
    Leases,
    Packed32,
    Root,
    Routes,
    Samples,
    Seconds,
    TokensPerS,
    WorkMessage,
)  # fmt: skip
from node.ledger.image_messages import AskImage, ImagePart
from node.ledger.reward_messages import AskReward, RewardAnswer, RewardClaim
from node.ledger.token_messages import Drawn, Follow

__all__ = [
    "MAX_ADAPTERS",
    "MAX_BODY_BYTES",
    "MAX_CAPACITY",
    "MAX_PARTS",
    "MAX_ROLLOUT_BYTES",
    "MAX_TOKENS",
    "PART_BYTES",
    "ROLLOUT_DOMAIN",
    "Abilities",
    "Ask",
    "AskAbilities",
    "AskAdapters",
    "AskImage",
    "AskReward",
    "Cannot",
    "Commits",
    "Drawn",
    "Follow",
    "GiveBack",
    "ImagePart",
    "JudgeAnswer",
    "JudgeRequest",
    "LoadedAdapters",
    "Reason",
    "Renew",
    "Renewed",
    "RewardAnswer",
    "RewardClaim",
    "Rollout",
    "RolloutPart",
    "SignedRollout",
    "Timesheet",
    "Unfit",
    "Verdict",
    "VersionSpan",
    "Withdraw",
    "WorkAnswer",
    "WorkLease",
    "WorkMessage",
    "WorkRequest",
    "decode",
    "encode",
    "open_rollout",
    "seal_rollout",
    "stream_of",
    "work_hash",
]

PROTOCOL: Final = 1
ROLLOUT_DOMAIN: Final = b"swarm-node rollout 1"


class Reason(StrEnum):
    """Why a rollout or a request was refused."""

    UNKNOWN_LEASE = "unknown lease"
    EXPIRED = "lease expired"
    FENCED = "wrong fencing token"
    WRONG_NODE = "lease of another node"
    NOT_A_MEMBER = "membership lease is dead"
    DUPLICATE = "another result was accepted for this sample"
    WRONG_WORK = "not the prompt and sampling that were leased"
    MALFORMED = "malformed rollout"
    TOO_OLD = "version too old"
    TOO_NEW = "version not sealed yet"
    WRONG_ROOT = "root is not that version's"
    BAD_SIGNATURE = "bad signature"
    WITHDRAWN = "work was withdrawn"
    IMPOSSIBLE = "the engine refuses this work"
    GIVEN_BACK = "given back"
    COPIED = "the same tokens as another sample"
    TOO_FAST = "faster than any engine draws"
    QUARANTINED = "the node is in quarantine"
    LIED = "the node was proven to lie"
    WRONG_REWARD = "another reward than other nodes compute"
    DISPUTED = "nodes disagree about its reward"
    NO_WORK = "no work at the moment"
    LATE = "too late for this version: the next is due"


class WorkRequest(WorkMessage, frozen=True, tag=1):
    """A node can take `capacity` more sequences. A newer request (by `serial`) replaces an older one.

    `holding` names the leases that the node has; the ledger sends the others again, because they were lost on the way.
    `tokens_per_s` is the result of a self-test; the ledger uses it until it has measured the node itself.
    """

    serial: U63
    capacity: Annotated[int, msgspec.Meta(ge=0, le=MAX_CAPACITY)]
    epoch: U32
    version: U63
    root: Root
    tokens_per_s: TokensPerS
    holding: Leases


class WorkLease(WorkMessage, frozen=True, tag=2):
    """The right to generate these samples of a group until `deadline_s` from receipt, at (epoch, version) or later.

    A sample may continue over the commits of later versions, as long as its oldest token is at most `max_lag` versions
    behind the newest. If `whole` is not 0, the node generates that many samples, from number 0 on, in a batch of their
    own, and returns those that are leased to it. An `urgent` lease comes before others, because the accepted rollouts
    of its group age.
    """

    lease: U63
    token: U63
    group: GroupId
    samples: Samples
    prompt: Packed32
    sampling: SamplingParams
    deadline_s: Seconds
    epoch: U32
    version: U63
    max_lag: U32
    whole: Annotated[int, msgspec.Meta(ge=0, le=MAX_CAPACITY)] = 0
    urgent: bool = False


class Renew(WorkMessage, frozen=True, tag=3):
    """The samples of this lease have `tokens` tokens so far. It is progress only if that is more than last time."""

    lease: U63
    token: U63
    tokens: U63


class Renewed(WorkMessage, frozen=True, tag=4):
    """The lease now runs for `deadline_s` from receipt."""

    lease: U63
    deadline_s: Seconds


class SignedRollout(WorkMessage, frozen=True, tag=5):
    """`signature || Rollout`; see `open_rollout`."""

    sealed: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES + 1, max_length=MAX_BODY_BYTES)]


class RolloutPart(WorkMessage, frozen=True, tag=20):
    """Part `part` of `parts` of a sample's sealed rollout; see `node.ledger.rollout_parts`. Only rollouts with routes
    are so large, and no older seed asks for them."""

    lease: U63
    sample: U32
    part: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)]
    parts: Annotated[int, msgspec.Meta(ge=2, le=MAX_PARTS)]
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PART_BYTES)]


class Verdict(WorkMessage, frozen=True, tag=6):
    """A rollout was accepted (`refused` is None) or refused. In both cases the node may forget it."""

    lease: U63
    sample: U32
    refused: Reason | None


class GiveBack(WorkMessage, frozen=True, tag=7):
    """The node will not finish these leases, because it is leaving or its engine broke."""

    leases: Leases


class Withdraw(WorkMessage, frozen=True, tag=8):
    """These leases are void: nobody wants their results any more."""

    leases: Leases


class Unfit(WorkMessage, frozen=True, tag=9):
    """The request `serial` will never get work: the engine's version is too old, or has another root than sealed."""

    serial: U63
    reason: Reason


class Cannot(WorkMessage, frozen=True, tag=10):
    """The node's engine refuses the prompt or the sampling of this lease; another attempt would end the same."""

    lease: U63
    token: U63
    why: Annotated[str, msgspec.Meta(max_length=512)]


class Ask(WorkMessage, frozen=True, tag=11):
    """Asks for the log-probabilities of tokens [start, end) of `token_ids`, which follow `prompt`, at exactly this
    version."""

    check: U63
    prompt: Packed32
    token_ids: Packed32
    sampling: SamplingParams
    epoch: U32
    version: U63
    start: U32
    end: U32


class WorkAnswer(WorkMessage, frozen=True, tag=12):
    """The log-probabilities (f32, packed) that were asked for, by the engine at `version`.

    Empty at the version that was asked for: the engine cannot score. Empty at another version: the engine no longer
    holds the version that was asked for.
    """

    check: U63
    epoch: U32
    version: U63
    logprobs: Packed32


class Commits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The durations of one version's commit on a node, in seconds.

    `wait_s`: from the commit of its replica to that of its engine, of which `stage_s` were spent on staging in the
    background. `pause_s`: the engine generated nothing. `resume_s`: until the sequences that ran before had their next
    token.
    """

    epoch: U32
    version: U63
    wait_s: Seconds
    stage_s: Seconds
    pause_s: Seconds
    resume_s: Seconds


class Timesheet(WorkMessage, frozen=True, tag=13):
    """How the node's time since its start divides, in seconds; the four add up to all of it.

    `generate_s`: at least one sequence was generated. `wait_version_s`: idle, because the engine's version is too old.
    `commit_s`: nothing was generated because a version was committed, or the engine was filled anew. `commits`: the
    last versions, newest last.
    """

    generate_s: Seconds
    wait_work_s: Seconds
    wait_version_s: Seconds
    commit_s: Seconds
    commits: Annotated[tuple[Commits, ...], msgspec.Meta(max_length=16)] = ()

    @property
    def useful(self) -> float:
        """The share of its time in which it generated."""
        total = self.generate_s + self.wait_work_s + self.wait_version_s + self.commit_s
        return self.generate_s / total if total else 0.0


class JudgeRequest(WorkMessage, frozen=True, tag=16):
    """Asks for a judgement of tokens [start, end) of `token_ids`, which follow `prompt`, under exactly this version.

    `sampling` and `stream` are those of the lease. `previous`: score them under the version before, too. What the
    author claims is not said. `replay`: compute it as the tokens were drawn (`node.engines.judgement.Claim`). Sent only
    to nodes that named the ability `JUDGES`, and `REPLAYS` for a replay.
    """

    check: U63
    prompt: Packed32
    token_ids: Packed32
    sampling: SamplingParams
    stream: int
    epoch: U32
    version: U63
    start: U32
    end: U32
    previous: bool
    replay: bool = False


class JudgeAnswer(WorkMessage, frozen=True, tag=17):
    """What the engine at `version` computed (f32, packed): one finite number for each token in each part that is there.

    `scores`: log-probabilities; empty: it could not judge. `previous`: the same under the version before; empty: not
    available. `margins`: of portable draws, in nats; empty for other draws.
    """

    check: U63
    epoch: U32
    version: U63
    scores: Packed32
    previous: Packed32 = b""
    margins: Packed32 = b""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The tokens from the previous span's end up to `end` (exclusive) were sampled from this version with this root."""

    epoch: U32
    version: U63
    root: Root
    end: U32


class Rollout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A finished sample: token ids (u32) and log-probabilities (f32), little-endian; see
    `node.engines.base.Completion`.

    `work` is the `work_hash` of what was leased, so that the signature covers the question and the answer. `routes`,
    `prompt_routes`: as in `Completion`, if the sampling asks for them; the prompt's with each lease's first sample.
    `top`, `prompt_scores`: as in `Completion`, if the sampling asks for them. `reward`: if the sampling asks for one. A
    rollout without them is encoded as older releases did, without these fields.
    """

    lease: U63
    token: U63
    sample: U32
    work: Root
    token_ids: Packed32
    logprobs: Packed32
    finish_reason: Literal["stop", "length"]
    spans: Annotated[tuple[VersionSpan, ...], msgspec.Meta(min_length=1, max_length=64)]
    routes: Routes = b""
    prompt_routes: Routes = b""
    top: Routes = b""
    reward: RewardClaim | None = None
    prompt_scores: Routes = b""

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.token_ids) // 4

    @property
    def oldest(self) -> tuple[int, int]:
        """The oldest (epoch, version) that any token was sampled from."""
        return min((span.epoch, span.version) for span in self.spans)


_ALL = (
    WorkRequest
    | WorkLease
    | Renew
    | Renewed
    | SignedRollout
    | Verdict
    | GiveBack
    | Withdraw
    | Unfit
    | Cannot
    | Ask
    | WorkAnswer
    | Timesheet
    | AskAbilities
    | Abilities
    | JudgeRequest
    | JudgeAnswer
    | AskAdapters
    | LoadedAdapters
    | RolloutPart
    | Follow
    | Drawn
    | AskReward
    | RewardAnswer
    | AskImage
    | ImagePart
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_ALL)
_rollout_decoder = msgspec.msgpack.Decoder(Rollout)


def _plain(value: msgspec.Struct) -> Any:
    """`value` as lists and maps, whose encoding depends on nothing but their content. A struct's depends on how many
    fields its class has: with more than fifteen, `SamplingOptions` would have another header than in older releases,
    which hash it too."""
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def encode(message: WorkMessage) -> bytes:
    """The body of a `Work` message with `message`. Raises `ValueError` when it is too large."""
    shortest = _plain(message) if isinstance(message, WorkLease | Ask | JudgeRequest | AskReward) else message
    data = bytes((PROTOCOL,)) + _encoder.encode(shortest)
    if len(data) > MAX_BODY_BYTES:
        raise ValueError(f"{type(message).__name__}: {len(data)} bytes is more than a message may have")
    return data


def decode(data: bytes) -> WorkMessage:
    """The message in `data`. Raises `PeerError` unless it is exactly one well-formed message of `PROTOCOL`."""
    if not 1 < len(data) <= MAX_BODY_BYTES:
        raise PeerError(f"work message: {len(data)} bytes")
    if data[0] != PROTOCOL:
        raise PeerError(f"work message: protocol version {data[0]}, ours is {PROTOCOL}")
    return unpack(_decoder, memoryview(data)[1:], "work message")


def seal_rollout(key: Key, rollout: Rollout) -> bytes:
    """`rollout` signed with `key`, the key of the node that generated it."""
    fields = msgspec.structs.astuple(rollout)
    if not rollout.prompt_scores:
        fields = fields[:-1]
        if rollout.reward is None:
            fields = fields[:-1] if rollout.top else fields[:-2] if rollout.routes else fields[:-4]
    return key.seal(ROLLOUT_DOMAIN, _encoder.encode(fields))


def open_rollout(node: bytes, sealed: bytes) -> Rollout:
    """The rollout in `sealed`. Raises `PeerError` unless `node` (a public key) signed it."""
    return unpack(_rollout_decoder, open_sealed(node, ROLLOUT_DOMAIN, sealed), "rollout")


def work_hash(group: bytes, sample: int, prompt: bytes, sampling: SamplingParams) -> bytes:
    """BLAKE3 of everything that decides a sample: group (16 bytes), number (u32), sampling (MessagePack), prompt
    (packed)."""
    return blake3(group + sample.to_bytes(4, "little") + _encoder.encode(_plain(sampling)) + prompt).digest()


def stream_of(group: bytes, sample: int, sampling: SamplingParams | None = None) -> int:
    """The number of a sample's random stream: the same at each node and each attempt.

    With a seeded `sampling` it is the number of the sample, so that it is the same in every group.
    """
    if sampling is not None and sampling.extra.seeded:
        return sample
    return int.from_bytes(blake3(group + sample.to_bytes(4, "little")).digest(8), "little")
