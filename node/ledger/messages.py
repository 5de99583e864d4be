"""What a node and the ledger say to one another, as the bytes that ride in the swarm's `Work` messages.

    node                                   ledger (in the seed)
      WorkRequest  ------------------------->  what it can take, at which version, how fast it is
      <------------------------------- WorkLease  one for each part of a group
      Renew        ------------------------->  tokens flow, give me longer
      <--------------------------------- Renewed
      SignedRollout ------------------------>  one finished sample; repeated until its verdict comes
      <--------------------------------- Verdict
      GiveBack     ------------------------->  I shall not do this
      Cannot       ------------------------->  my engine refuses it
      <--------------------------------- Withdraw  nobody wants this any more
      <------------------------------------ Unfit  not with that engine
      <-------------------------------------- Ask  how likely are these tokens, of another's sample?
      Answer       ------------------------->
      Timesheet    ------------------------->  where my time went
      <------------------------------ AskAbilities  what can your engine do?
      Abilities    ------------------------->

Any of these may be lost, repeated or late: requests name what the node holds, so that a lost lease is sent again, and a
result is safe to repeat. A message is a byte of protocol version and a MessagePack array `[tag, field...]`. A rollout
is signed by the node that made it, under `ROLLOUT_DOMAIN`, and the ledger keeps the signed bytes.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from blake3 import blake3

from codec.errors import PeerError
from codec.sign import SIGNATURE_BYTES, Key, open_sealed
from codec.unpack import unpack
from node.engines.base import SamplingParams

__all__ = [
    "MAX_CAPACITY",
    "MAX_TOKENS",
    "ROLLOUT_DOMAIN",
    "Abilities",
    "Answer",
    "Ask",
    "AskAbilities",
    "Cannot",
    "Commits",
    "GiveBack",
    "Reason",
    "Renew",
    "Renewed",
    "Rollout",
    "SignedRollout",
    "Timesheet",
    "Unfit",
    "Verdict",
    "VersionSpan",
    "Withdraw",
    "WorkLease",
    "WorkMessage",
    "WorkRequest",
    "decode",
    "encode",
    "open_rollout",
    "pack_floats",
    "pack_tokens",
    "seal_rollout",
    "stream_of",
    "unpack_floats",
    "unpack_tokens",
    "work_hash",
]

PROTOCOL: Final = 1
MAX_BODY_BYTES: Final = 1 << 20
"""The swarm's own limit for a `Work` message."""
MAX_TOKENS: Final = 1 << 16
"""Tokens of a prompt, and of a completion: 8 bytes each with its log-probability, so half of a message."""
MAX_CAPACITY: Final = 4096
"""Sequences that one node may hold at a time."""
ROLLOUT_DOMAIN: Final = b"swarm-node rollout 1"

U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e7)]
TokensPerS = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Root = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
GroupId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Packed32 = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)]
Leases = Annotated[tuple[U63, ...], msgspec.Meta(max_length=MAX_CAPACITY)]
Samples = Annotated[tuple[U32, ...], msgspec.Meta(min_length=1, max_length=MAX_CAPACITY)]


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
    NO_WORK = "no work at the moment"
    LATE = "too late for this version: the next is due"


class WorkMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Root of all messages between a node and the ledger."""


class WorkRequest(WorkMessage, frozen=True, tag=1):
    """I can take `capacity` more sequences. A newer request (by `serial`) replaces an older one.

    `holding`: the leases that the node knows of; one that is not named was lost on the way. `tokens_per_s`: of a
    self-test, for a start; the ledger then goes by what it sees.
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

    What was begun at a version may go on over the commit of later ones, as long as its oldest token is at most
    `max_lag` versions behind the newest. `whole`: where it is not 0, so many samples, from number 0 on, are drawn in
    one batch that holds nothing else, and those that were leased are returned. `urgent`: before others, because what
    is done of its group grows old.
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
    """`tokens` of this lease's samples exist by now. Counts as progress only if that is more than last time."""

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


class Verdict(WorkMessage, frozen=True, tag=6):
    """What became of a sample; `refused` is None when it was accepted. After either, the node may forget it."""

    lease: U63
    sample: U32
    refused: Reason | None


class GiveBack(WorkMessage, frozen=True, tag=7):
    """The node will not finish these leases: it is leaving, or its engine broke."""

    leases: Leases


class Withdraw(WorkMessage, frozen=True, tag=8):
    """Nobody wants these leases' results any more."""

    leases: Leases


class Unfit(WorkMessage, frozen=True, tag=9):
    """The request `serial` gets no work, ever: the node's engine is too old, or its bits are not what it says."""

    serial: U63
    reason: Reason


class Cannot(WorkMessage, frozen=True, tag=10):
    """The node's engine refuses this lease's prompt or sampling: another try would end the same."""

    lease: U63
    token: U63
    why: Annotated[str, msgspec.Meta(max_length=512)]


class Ask(WorkMessage, frozen=True, tag=11):
    """How likely are tokens [start, end) of `token_ids` after `prompt` and those before them, at this very version?"""

    check: U63
    prompt: Packed32
    token_ids: Packed32
    sampling: SamplingParams
    epoch: U32
    version: U63
    start: U32
    end: U32


class Answer(WorkMessage, frozen=True, tag=12):
    """Log-probabilities (f32, packed) of the tokens asked for, by the engine at `version`. None of them, at the version
    that was asked for: this engine cannot score. None at another version: the node has moved on."""

    check: U63
    epoch: U32
    version: U63
    logprobs: Packed32


class Commits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one version took on a node: from its replica's commit to its engine's (`wait_s`), of which `stage_s` in the
    background; `pause_s` while nothing was generated; `resume_s` until what ran before had its next token."""

    epoch: U32
    version: U63
    wait_s: Seconds
    stage_s: Seconds
    pause_s: Seconds
    resume_s: Seconds


class Timesheet(WorkMessage, frozen=True, tag=13):
    """Where the node's time went since it started, s; the sum is all of it. `commits`: the last versions, newest last.

    `generate`: at least one sequence was being drawn. `wait_version`: idle, because the engine's version is too old.
    `commit`: nothing was drawn because a version was being taken, or the engine was being filled anew.
    """

    generate_s: Seconds
    wait_work_s: Seconds
    wait_version_s: Seconds
    commit_s: Seconds
    commits: Annotated[tuple[Commits, ...], msgspec.Meta(max_length=16)] = ()

    @property
    def useful(self) -> float:
        """Share of its time in which it generated."""
        total = self.generate_s + self.wait_work_s + self.wait_version_s + self.commit_s
        return self.generate_s / total if total else 0.0


class AskAbilities(WorkMessage, frozen=True, tag=14):
    """What can your engine do beyond what every release can? Asked where work needs it. A node of an older release
    drops this unread, and gets no such work."""


class Abilities(WorkMessage, frozen=True, tag=15):
    """Answer to `AskAbilities`: of `node.engines.base.ABILITIES`, and the engine's kind (`Engine.kind`). Never sent
    unasked: an older seed would count it as nonsense."""

    names: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=64)]
    kind: Annotated[str, msgspec.Meta(max_length=64)] = ""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens up to `end` (exclusive; from the previous span's end) were sampled from this version with this root."""

    epoch: U32
    version: U63
    root: Root
    end: U32


class Rollout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One finished sample: token ids (u32) and log-probabilities (f32), little-endian; see `Completion` for meanings.

    `work`: the `work_hash` of what was asked for, so that a signature binds answer and question.
    """

    lease: U63
    token: U63
    sample: U32
    work: Root
    token_ids: Packed32
    logprobs: Packed32
    finish_reason: Literal["stop", "length"]
    spans: Annotated[tuple[VersionSpan, ...], msgspec.Meta(min_length=1, max_length=64)]


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
    | Answer
    | Timesheet
    | AskAbilities
    | Abilities
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_ALL)
_rollout_decoder = msgspec.msgpack.Decoder(Rollout)


def encode(message: WorkMessage) -> bytes:
    """`message` as it rides in a `Work` message. `ValueError` when it is too large for one."""
    data = bytes((PROTOCOL,)) + _encoder.encode(message)
    if len(data) > MAX_BODY_BYTES:
        raise ValueError(f"{type(message).__name__}: {len(data)} bytes is more than a message may have")
    return data


def decode(data: bytes) -> WorkMessage:
    """The message in `data`; `PeerError` unless it is exactly one well-formed message of our protocol version."""
    if not 1 < len(data) <= MAX_BODY_BYTES:
        raise PeerError(f"work message: {len(data)} bytes")
    if data[0] != PROTOCOL:
        raise PeerError(f"work message: protocol version {data[0]}, ours is {PROTOCOL}")
    return unpack(_decoder, memoryview(data)[1:], "work message")


def seal_rollout(key: Key, rollout: Rollout) -> bytes:
    """`rollout` signed by the node that made it."""
    return key.seal(ROLLOUT_DOMAIN, _encoder.encode(rollout))


def open_rollout(node: bytes, sealed: bytes) -> Rollout:
    """The rollout in `sealed` if `node` (public key) signed it; `PeerError` otherwise."""
    return unpack(_rollout_decoder, open_sealed(node, ROLLOUT_DOMAIN, sealed), "rollout")


def work_hash(group: bytes, sample: int, prompt: bytes, sampling: SamplingParams) -> bytes:
    """BLAKE3 of all that decides a sample: group (16 bytes), its number, packed prompt, sampling."""
    return blake3(group + sample.to_bytes(4, "little") + _encoder.encode(sampling) + prompt).digest()


def stream_of(group: bytes, sample: int, sampling: SamplingParams | None = None) -> int:
    """The random stream of a sample: the same whichever node draws it, and however often. Where `sampling` is seeded,
    the same in every group: its number."""
    if sampling is not None and sampling.extra.seeded:
        return sample
    return int.from_bytes(blake3(group + sample.to_bytes(4, "little")).digest(8), "little")


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32. `ValueError` when one is out of range or there are too many."""
    if len(token_ids) > MAX_TOKENS:
        raise ValueError(f"{len(token_ids)} tokens is more than {MAX_TOKENS}")
    try:
        return np.asarray(token_ids, "<u4").tobytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2^32 - 1: {error}") from error


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """The other way; `PeerError` when `data` is no whole number of tokens."""
    if len(data) % 4:
        raise PeerError(f"token ids: {len(data)} bytes")
    return tuple(np.frombuffer(data, "<u4").tolist())


def pack_floats(values: tuple[float, ...] | list[float]) -> bytes:
    """Log-probabilities as little-endian f32."""
    return np.asarray(values, "<f4").tobytes()


def unpack_floats(data: bytes) -> tuple[float, ...]:
    """The other way; `PeerError` when `data` is no whole number of values."""
    if len(data) % 4:
        raise PeerError(f"log-probabilities: {len(data)} bytes")
    return tuple(np.frombuffer(data, "<f4").tolist())
