"""What the ledger knows: groups, leases, nodes; and the facts that must outlive a crash. Values only, no rules."""

from dataclasses import dataclass, field
from typing import NamedTuple

from node.engines.base import SamplingParams, Version
from node.ledger.messages import Reason, Rollout
from node.ledger.rate import Rate

__all__ = [
    "Accepted",
    "Advanced",
    "Discarded",
    "Done",
    "Dropped",
    "Fact",
    "Group",
    "Head",
    "Lease",
    "Leased",
    "Node",
    "Offered",
    "Requeued",
    "Settings",
    "Taken",
]


@dataclass(frozen=True, slots=True)
class Settings:
    """Every number that the ledger runs by."""

    max_lag: int = 1
    """A token may be this many versions older than the head when its group is handed over. 0: synchronous."""
    ahead: float = 2.0
    """Samples open (queued or leased) for each sequence that the nodes can hold: 1 would leave nodes idle while a
    result travels, more makes rollouts older than they need be."""
    cold_groups: int = 16
    """Groups taken from the trainer before any node has asked for work."""
    max_open_samples: int = 1 << 16
    """The pool's bound, whatever the nodes hold."""
    deadline_slack: float = 3.0
    """A lease runs this many times as long as its node should need at its own low rate, at full length."""
    min_deadline_s: float = 10.0
    """Covers two round trips and a commit's wait, however short the work."""
    max_deadline_s: float = 600.0
    """Also the deadline for a node of which nothing is known."""
    busy_window_s: float = 10.0
    """A node that always has work is measured this often."""
    asking_ttl_s: float = 60.0
    """A node that asked for work this lately counts when shares are worked out."""
    resend_after_s: float = 5.0
    """A lease that a request made this long after it does not name was lost on the way, and is sent again."""
    refusers: int = 3
    """A group that the engines of this many nodes refuse (or of all, where there are fewer) is impossible."""
    remembered: int = 1 << 16
    """Ended leases and judged samples remembered, to answer repeated results as the first time."""


class Head(NamedTuple):
    """The newest sealed version."""

    epoch: int
    version: int
    root: bytes

    @property
    def name(self) -> Version:
        return (self.epoch, self.version)


@dataclass(frozen=True, slots=True)
class Done:
    """An accepted sample. `oldest`: the oldest version that any of its tokens came from. `sealed`: as it was signed."""

    node: bytes
    lease: int
    token: int
    oldest: Version
    rollout: Rollout
    sealed: bytes


@dataclass(slots=True)
class Group:
    """One prompt, of which `n` samples are wanted. Every sample is in exactly one of `free`, `leased` and `done`."""

    id: bytes
    session: str
    order: int
    """Groups are worked on in this order, also after a restart."""
    prompt: bytes
    n: int
    sampling: SamplingParams
    free: set[int] = field(default_factory=set)
    leased: dict[int, int] = field(default_factory=dict)
    """sample -> lease"""
    done: dict[int, Done] = field(default_factory=dict)
    refusers: set[bytes] = field(default_factory=set)
    """Nodes whose engines refuse it."""
    handed_over: bool = False
    """On its way to the trainer, which has not said yet that it has it."""

    @property
    def complete(self) -> bool:
        return len(self.done) == self.n


@dataclass(slots=True)
class Lease:
    """`samples`: those still to come. `token` rises with every lease ever given, over restarts too."""

    id: int
    token: int
    node: bytes
    group: bytes
    samples: tuple[int, ...]
    granted: float
    deadline: float
    duration_s: float
    """As first given: what a renewal adds."""
    minimum: Version
    open: set[int]
    progress: int = 0
    """Tokens that the node last said it has."""


@dataclass(slots=True)
class Node:
    """A member as the ledger sees it."""

    key: bytes
    rate: Rate = field(default_factory=Rate)
    leases: set[int] = field(default_factory=set)
    outstanding: int = 0
    """Samples leased to it and still to come."""
    capacity: int = 0
    """Sequences that it can hold in all: outstanding + what it last asked for."""
    asked: float = float("-inf")
    serial: int = -1
    busy_since: float = 0.0
    busy_tokens: int = 0
    accepted: int = 0
    refused: dict[Reason, int] = field(default_factory=dict)


class Offered(NamedTuple):
    """The trainer wants this group."""

    group: Group


class Dropped(NamedTuple):
    """The trainer no longer wants this group."""

    group: bytes


class Leased(NamedTuple):
    """A lease was given."""

    lease: Lease


class Requeued(NamedTuple):
    """These samples of a lease are free again; if they were all that was open, the lease is over."""

    lease: int
    group: bytes
    samples: tuple[int, ...]
    why: str


class Accepted(NamedTuple):
    """A sample is done."""

    group: bytes
    sample: int
    done: Done


class Discarded(NamedTuple):
    """An accepted sample became too old before its group was handed over, and is free again."""

    group: bytes
    sample: int


class Taken(NamedTuple):
    """The trainer has this group."""

    group: bytes


class Advanced(NamedTuple):
    """A version was sealed."""

    head: Head


Fact = Offered | Dropped | Leased | Requeued | Accepted | Discarded | Taken | Advanced
"""What must be durable before anybody is told of it; `node.ledger.book` writes a list of facts as one transaction."""
