"""What can happen to a machine of the council (events), and what it asks its runtime for (effects).

The runtime carries out the effects of one event in their order, each completely before the next, and applies no other
event meanwhile. So an answer that depends on something stored is sent only when it is on disk, and a crash leaves what
the effects before it made. `now` is always the machine's own monotonic clock, in seconds.
"""

from dataclasses import dataclass
from typing import NamedTuple

from swarm.protocol.council.messages import CouncilMessage, Entry, Position

__all__ = [
    "AskedToHandOver",
    "Ballot",
    "CouncilEffect",
    "CouncilEvent",
    "CouncilHeard",
    "Established",
    "InstallSnapshot",
    "Lead",
    "Propose",
    "Resign",
    "SaveBallot",
    "SendSnapshot",
    "SendTo",
    "SnapshotCame",
    "StopLeading",
    "StoreEntries",
    "TakeOver",
    "Tick",
    "WakeAt",
]


class Ballot(NamedTuple):
    """What a machine must not forget."""

    term: int
    """The highest term in which it voted, or heard a leader."""
    voted_for: bytes
    """Key of the machine that it voted for in that term; empty: none."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class CouncilHeard:
    """A message of another machine, whose key the transport has proven."""

    peer: bytes
    message: CouncilMessage


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that `WakeAt` named has come. One that comes early or late does no harm."""


@dataclass(frozen=True, slots=True)
class Propose:
    """The application of a leader wants this entry stored by a majority. Ignored by any other machine."""

    body: bytes


@dataclass(frozen=True, slots=True)
class SnapshotCame:
    """A whole snapshot of the leader of `term` is here. `last`: the position up to which it has everything."""

    peer: bytes
    term: int
    last: Position


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A person wants this machine to lead: ask the leader to hand over, or campaign as soon as that is allowed."""


@dataclass(frozen=True, slots=True)
class Resign:
    """This machine's application has stopped leading, or never began. `to`: who is to follow; empty: any."""

    to: bytes = b""


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class SaveBallot:
    """Make the ballot durable."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class StoreEntries:
    """Make these entries durable, with what they mean for the machine's state, in one step with its position."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class InstallSnapshot:
    """Replace the whole state by the snapshot that came from `peer`, durably and at once, with its position."""

    peer: bytes
    last: Position


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send a message to another machine; it may be lost."""

    peer: bytes
    message: CouncilMessage


@dataclass(frozen=True, slots=True)
class SendSnapshot:
    """Send the whole state, as it is when it is read, to another machine."""

    peer: bytes
    term: int


@dataclass(frozen=True, slots=True)
class Lead:
    """This machine leads `term` from now on, and a majority has all that was acknowledged before."""

    term: int


@dataclass(frozen=True, slots=True)
class Established:
    """A majority has stored everything up to `index`: it may be told."""

    index: int


@dataclass(frozen=True, slots=True)
class StopLeading:
    """This machine leads no more: its application must act for the swarm no longer. What is not established may be
    lost."""

    why: str


@dataclass(frozen=True, slots=True)
class AskedToHandOver:
    """The leader is asked to stop: its application ends what it does, and then posts `Resign` with `to`."""

    to: bytes


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Post a `Tick` at this time of the machine's clock; replaces an earlier one."""

    at: float


CouncilEvent = CouncilHeard | Tick | Propose | SnapshotCame | TakeOver | Resign
CouncilEffect = (
    SaveBallot
    | StoreEntries
    | InstallSnapshot
    | SendTo
    | SendSnapshot
    | Lead
    | Established
    | StopLeading
    | AskedToHandOver
    | WakeAt
)
