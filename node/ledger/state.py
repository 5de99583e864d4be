"""What the ledger knows: groups, leases, nodes. Values only, no rules."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from node.engines.base import SamplingParams, Version, needs
from node.ledger.assignment.liveness import Liveness
from node.ledger.assignment.rate import Rate
from node.ledger.assignment.version_timing import Average
from node.ledger.messages import Reason, Rollout, Timesheet
from node.ledger.trust.reputation import Reputation

__all__ = ["Done", "Group", "Head", "Lease", "Node"]


class Head(NamedTuple):
    """The newest sealed version. `coming`: the one that the trainer has begun to publish since."""

    epoch: int
    version: int
    root: bytes
    coming: Version | None = None

    @property
    def name(self) -> Version:
        return (self.epoch, self.version)

    def counted_from(self, max_lag: int) -> Version:
        """The version that lags are counted from: the newest sealed one. Where none is allowed, what the trainer has
        begun to publish: those are its weights, and it waits for their tokens."""
        return self.coming or self.name if max_lag == 0 else self.name


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
    max_lag: int = 1
    """A token may be this many versions older than the newest sealed one when the trainer gets the group."""
    affinity: bytes = b""
    """Groups of one affinity go to one node where they can, for its prefix cache. Empty: to any."""
    whole: bool = False
    """All its samples are drawn by one node, in one batch, so that their bits do not depend on who draws them."""
    since: float = 0.0
    """When it was offered."""
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

    def fits(self, abilities: frozenset[str] | None) -> bool:
        """An engine with these abilities (None: nobody knows which) can draw it."""
        return self.sampling.options is msgspec.UNSET or needs(self.sampling) <= (abilities or frozenset())

    @property
    def urgent(self) -> bool:
        """What is done of it grows old: the rest goes to whoever has a place, and is begun there before all else."""
        return bool(self.done) and not self.whole


@dataclass(slots=True)
class Lease:
    """`samples`: those still to come. `token` rises with every lease ever given, over restarts too."""

    id: int
    token: int
    node: bytes
    group: bytes
    samples: tuple[int, ...]
    granted: float
    """-inf for one that was found in the book: nobody knows when."""
    deadline: float
    duration_s: float
    """As first given: what a renewal adds."""
    minimum: Version
    open: set[int]
    progress: int = 0
    """Tokens that the node last said it has."""
    begun_at: Version = (0, 0)
    """The head when that was counted from nothing: a version that comes may make a node begin anew, once each."""


@dataclass(slots=True)
class Node:
    """A member as the ledger sees it."""

    key: bytes
    rate: Rate = field(default_factory=Rate)
    reputation: Reputation = field(default_factory=Reputation)
    liveness: Liveness = field(default_factory=Liveness)
    leases: set[int] = field(default_factory=set)
    outstanding: int = 0
    """Samples leased to it and still to come."""
    capacity: int = 0
    """Sequences that it can hold in all: outstanding + what it last asked for."""
    asked: float = float("-inf")
    serial: int = -1
    version: Version | None = None
    """What its engine held when it last asked."""
    token_s: Average = field(default_factory=Average)
    """Of one sequence, its waiting at the node included, lately."""
    gone_since: float = float("-inf")
    """When it was last heard of, at the last lapse of a lease that nothing was heard after."""
    busy_since: float = 0.0
    busy_tokens: int = 0
    accepted: int = 0
    tokens: int = 0
    """Of accepted samples."""
    used: int = 0
    """Samples that a trainer, or a client of the gateway, has taken."""
    used_tokens: int = 0
    unused: Counter[Reason] = field(default_factory=Counter)
    """Samples that were drawn and will never be used, by the reason."""
    unused_tokens: int = 0
    refused: dict[Reason, int] = field(default_factory=dict)
    scores: bool = True
    """Its engine can score tokens, as far as is known."""
    abilities: frozenset[str] | None = None
    """What its engine can do beyond what every release can; None: it has not said."""
    abilities_asked: float = float("-inf")
    kind: str = ""
    """Of its engine, as it said with its abilities."""
    timesheet: Timesheet | None = None
    """Where its time went, as it says."""
