"""What the core tells the application: one class per notice, carried by the effect `Notify`.

The application (the node, the coordinator, a simulation) matches on the class. Most notices are also a line of its
log: `log_name` names the line and `log_fields` gives its fields, so that renaming a class or a consumer changes nothing
that a user reads.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from swarm.protocol.core.version import VersionId

__all__ = [
    "AuthorityUnreachable",
    "BadBytes",
    "BudgetChanged",
    "CatchupFailed",
    "CatchupPhaseEntered",
    "CatchupStarted",
    "CaughtUp",
    "CheckpointWritten",
    "ClocksApart",
    "Equivocation",
    "JoinRefused",
    "Joined",
    "LeaseExpired",
    "MemberHolds",
    "MemberJoined",
    "MemberLeft",
    "Notice",
    "PeerStuck",
    "Planned",
    "ReplicaDamaged",
    "SuccessionHeard",
    "Superseded",
    "VersionComplete",
    "WorkHeard",
]


@dataclass(frozen=True, slots=True)
class Notice:
    """Root of all notices."""

    log_name: ClassVar[str]
    """The name of the log line."""

    def log_fields(self) -> dict[str, Any]:
        """The fields of the log line, in order; one that is None is left out."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in named if value is not None}


# ---------------------------------------------------------------- of both cores


@dataclass(frozen=True, slots=True)
class WorkHeard(Notice):
    """A `Work` message came from a peer that has proven that it belongs. Not a line of any log: there are many."""

    log_name: ClassVar[str] = "work"
    peer: bytes
    body: bytes


# ---------------------------------------------------------------- of the authority


@dataclass(frozen=True, slots=True)
class MemberJoined(Notice):
    """A member's grant is durable, and the member stands in the plan for the first time."""

    log_name: ClassVar[str] = "member_joined"
    peer: bytes
    slot: int
    name: str


@dataclass(frozen=True, slots=True)
class MemberLeft(Notice):
    """A member released its lease, or was removed (`why`)."""

    log_name: ClassVar[str] = "member_left"
    peer: bytes
    slot: int
    why: str | None = None


@dataclass(frozen=True, slots=True)
class LeaseExpired(Notice):
    """Nothing was heard of a member until hard expiry."""

    log_name: ClassVar[str] = "lease_expired"
    slot: int
    peer: bytes


@dataclass(frozen=True, slots=True)
class MemberHolds(Notice):
    """A member says for the first time that it holds this version."""

    log_name: ClassVar[str] = "held"
    slot: int
    peer: bytes
    version: VersionId


@dataclass(frozen=True, slots=True)
class Planned(Notice):
    """The authority has a new roster."""

    log_name: ClassVar[str] = "planned"
    serial: int
    members: int


@dataclass(frozen=True, slots=True)
class Superseded(Notice):
    """A later boot of this authority's own key is at work: this one has stopped."""

    log_name: ClassVar[str] = "superseded"
    boot: int


# ---------------------------------------------------------------- of a member: its membership


@dataclass(frozen=True, slots=True)
class Joined(Notice):
    """The authority has admitted this member."""

    log_name: ClassVar[str] = "joined"
    slot: int
    serial: int


@dataclass(frozen=True, slots=True)
class JoinRefused(Notice):
    """The authority does not admit this member, or has removed it. `code`: as in `wire.Refused`."""

    log_name: ClassVar[str] = "refused"
    code: str
    why: str


@dataclass(frozen=True, slots=True)
class AuthorityUnreachable(Notice):
    """A dial to the authority failed, or the session that it opened ended before the authority had answered."""

    log_name: ClassVar[str] = "unreachable"
    why: str


@dataclass(frozen=True, slots=True)
class ClocksApart(Notice):
    """A heartbeat names a boot too far ahead of this machine's clock, so heartbeats of that boot are ignored. Given
    once."""

    log_name: ClassVar[str] = "clocks_apart"


@dataclass(frozen=True, slots=True)
class SuccessionHeard(Notice):
    """The swarm has a new key. `sealed`: the succession document, verified."""

    log_name: ClassVar[str] = "succession"
    sealed: bytes


@dataclass(frozen=True, slots=True)
class BudgetChanged(Notice):
    """What this machine may send today is nearly used up (`saving`), or no longer so."""

    log_name: ClassVar[str] = "budget"
    saving: bool


@dataclass(frozen=True, slots=True)
class PeerStuck(Notice):
    """A parent, or a peer that was asked for a chunk, brought nothing and did not answer a ping."""

    log_name: ClassVar[str] = "stuck"
    peer: bytes
    slot: int


@dataclass(frozen=True, slots=True)
class BadBytes(Notice):
    """A peer sent bytes that do not verify. `peer` is empty where the sender is not known (gossip)."""

    log_name: ClassVar[str] = "bad_bytes"
    peer: bytes
    detail: str


# ---------------------------------------------------------------- of a member: its replica


@dataclass(frozen=True, slots=True)
class VersionComplete(Notice):
    """All chunks of the next version and its manifest are here."""

    log_name: ClassVar[str] = "complete"
    version: VersionId


@dataclass(frozen=True, slots=True)
class CatchupStarted(Notice):
    """A catch-up aims at this version."""

    log_name: ClassVar[str] = "catching_up"
    version: VersionId
    root: bytes


@dataclass(frozen=True, slots=True)
class CatchupPhaseEntered(Notice):
    """The catch-up has gone on to another phase (a value of `Phase`)."""

    log_name: ClassVar[str] = "catch_up_phase"
    phase: str


@dataclass(frozen=True, slots=True)
class CaughtUp(Notice):
    """The catch-up has ended: the replica is this version. `blocks`: how many were fetched."""

    log_name: ClassVar[str] = "caught_up"
    version: VersionId
    blocks: int


@dataclass(frozen=True, slots=True)
class CatchupFailed(Notice):
    """This machine cannot hold the model."""

    log_name: ClassVar[str] = "failed"
    detail: str


@dataclass(frozen=True, slots=True)
class ReplicaDamaged(Notice):
    """Blocks of the replica are not what the version says; they are fetched anew."""

    log_name: ClassVar[str] = "damaged"
    version: VersionId
    detail: str


@dataclass(frozen=True, slots=True)
class Equivocation(Notice):
    """The authority's key sealed two different roots for one version: this member believes nothing of it any more."""

    log_name: ClassVar[str] = "equivocation"
    version: VersionId
    ours: bytes
    theirs: bytes


# ---------------------------------------------------------------- of the runtime


@dataclass(frozen=True, slots=True)
class CheckpointWritten(Notice):
    """The runtime wrote a checkpoint of this version to the disk. The only notice that no core emits."""

    log_name: ClassVar[str] = "checkpointed"
    version: VersionId
