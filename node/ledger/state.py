"""The records that the ledger keeps: heads, request groups, work leases, accepted rollouts, nodes.

Values and what follows from one of them alone; the rules are in `node.ledger.rules`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from node.engines.base import SamplingParams, Version, needs
from node.ledger.assignment.liveness import Liveness
from node.ledger.assignment.rate import Rate
from node.ledger.assignment.version_timing import Average
from node.ledger.messages import Reason, Rollout, Timesheet
from node.ledger.part_history import BASE, PartHistory
from node.ledger.terms import PLAIN, Terms
from node.ledger.trust.reputation import Reputation

__all__ = ["AcceptedRollout", "Group", "Head", "LiveLease", "Node", "RewardCheck"]

RewardCheck = Literal["checked", "unchecked", "disputed"]
"""checked: another node computed the same reward. unchecked: none could. disputed: one computed another, and no third
decided."""


class Head(NamedTuple):
    """The newest sealed version. `coming`: the version that a trainer has begun to publish since, if any, and
    `coming_part` what it changes: an adapter, or the base."""

    epoch: int
    version: int
    root: bytes
    coming: Version | None = None
    coming_part: str = BASE
    trained: tuple[tuple[str, Version], ...] = ()
    """By part, the version that its trainer's weights are at, where that is newer: perhaps not published yet."""

    @property
    def name(self) -> Version:
        return (self.epoch, self.version)

    def counted_from(self, max_lag: int, part: str = BASE, *, trained: bool = False) -> Version:
        """The version that lags of `part` are counted from: the newest sealed one. `trained`: the one that the
        trainer's weights are at, if it is newer.

        With `max_lag` 0 it is the version that the trainer has begun to publish, if it changes `part` or the base: its
        weights are at that version, and it waits for tokens of that version.
        """
        newest = dict(self.trained).get(part, self.name) if trained else self.name
        if max_lag or self.coming is None or self.coming_part not in (BASE, part):
            return newest
        return max(newest, self.coming)

    def with_trained(self, trained: Mapping[str, Version]) -> "Head":
        """This head with those of the trainers' versions, by part, that are newer than it, in its epoch."""
        newer = [(part, at) for part, at in trained.items() if at[0] == self.epoch and at > self.name]
        return self._replace(trained=tuple(sorted(newer)))

    def lag_reason(
        self, version: Version, max_lag: int, parts: PartHistory, part: str = BASE, *, trained: bool = False
    ) -> Reason | None:
        """None when `version` is at most `max_lag` versions behind the head, for work of `part`. A version of another
        epoch is too old."""
        if version > self.name:
            return Reason.TOO_NEW
        newest = self.counted_from(max_lag, part, trained=trained)
        if version[0] != newest[0] or parts.since(part, version, newest) > max_lag:
            return Reason.TOO_OLD
        return None


@dataclass(frozen=True, slots=True)
class AcceptedRollout:
    """A rollout that counts for its sample. `sealed`: the bytes that its node signed."""

    node: bytes
    lease: int
    token: int
    oldest: Version
    """The oldest version that any of its tokens was sampled from."""
    rollout: Rollout
    sealed: bytes
    own: tuple[int, ...] = ()
    """For each span, the own version of the group's part (`PartHistory.own`). Empty: not known any more."""


@dataclass(slots=True)
class Group:
    """A request group: one prompt, and `n` samples wanted of it.

    Each sample is in exactly one of `free`, `leased`, `done` and `dropped`.
    """

    id: bytes
    session: str
    order: int
    """Groups are assigned in this order, also after a restart."""
    prompt: bytes
    """Packed token ids."""
    n: int
    sampling: SamplingParams
    max_lag: int = 1
    """How many versions older than the head a token may be when the trainer gets the group."""
    affinity: bytes = b""
    """Groups of one affinity go to one node where possible, because it has their prefix in its cache. Empty: none."""
    whole: bool = False
    """One node generates all samples in one batch, so that their bits do not depend on which node it is."""
    since: float = 0.0
    """When it was offered."""
    free: set[int] = field(default_factory=set)
    leased: dict[int, int] = field(default_factory=dict)
    """sample -> lease"""
    done: dict[int, AcceptedRollout] = field(default_factory=dict)
    refusers: set[bytes] = field(default_factory=set)
    """Nodes whose engines refuse it."""
    handed_over: bool = False
    """It was handed to the trainer, which has not confirmed that it took it."""
    terms: Terms = PLAIN
    dropped: set[int] = field(default_factory=set)
    """Samples that are no longer wanted, because the group's time was over (`Terms.partial_s`)."""
    reward_checks: dict[int, RewardCheck] = field(default_factory=dict)
    """What became of the checks of its samples' rewards that are over, by sample."""

    @property
    def complete(self) -> bool:
        return len(self.done) + len(self.dropped) == self.n

    @property
    def size(self) -> int:
        """How many samples the trainer gets."""
        return self.n - len(self.dropped)

    @property
    def adapter(self) -> str:
        """The adapter that draws its samples; empty: the base alone. It is also the part that lags are counted by."""
        return self.sampling.extra.adapter

    def counted_from(self, head: Head) -> Version:
        """The version that its lag is counted from."""
        return head.counted_from(self.max_lag, self.adapter, trained=self.terms.from_trained)

    def lag_reason(self, version: Version, head: Head, parts: PartHistory) -> Reason | None:
        """None when tokens of `version` count for it; see `Head.lag_reason`."""
        return head.lag_reason(version, self.max_lag, parts, self.adapter, trained=self.terms.from_trained)

    def fits(self, node: "Node") -> bool:
        """Whether the engine of `node` can generate it, as far as the node has said."""
        if self.sampling.options is msgspec.UNSET:
            return True
        has_adapter = not self.adapter or self.adapter in node.adapters
        return has_adapter and needs(self.sampling) <= (node.abilities or frozenset())

    @property
    def urgent(self) -> bool:
        """Its accepted rollouts age while the other samples are missing: any node with room may generate those, and
        begins them before its other work."""
        return bool(self.done) and not self.whole


@dataclass(slots=True)
class LiveLease:
    """A work lease: the right of one node to generate samples of one group until `deadline`."""

    id: int
    token: int
    """The fencing token; each new lease has a higher one, over restarts too."""
    node: bytes
    group: bytes
    samples: tuple[int, ...]
    """The samples that were leased."""
    granted: float
    """When; -inf for a lease restored from the book, which does not record it."""
    deadline: float
    duration_s: float
    """The duration at the grant; a renewal adds the same."""
    minimum: Version
    """The oldest version that its tokens may be sampled from."""
    open: set[int]
    """The samples of which no rollout was accepted or refused yet."""
    progress: int = 0
    """Tokens that the node last reported."""
    portable: bool | None = False
    """It asks for portable draws that its group does not ask for itself; None: not known, as the book does not say."""
    reward: str = ""
    """The node's ability to compute the reward that the group asks for, with the digest that it declared at the grant.
    Empty: there is none, or the book, which does not keep it, restored the lease."""
    begun_at: Version = (0, 0)
    """The head when `progress` was last counted from 0. A new version may make a node generate from the beginning, once
    per version."""


@dataclass(slots=True)
class Node:
    """A member as the ledger sees it."""

    key: bytes
    rate: Rate = field(default_factory=Rate)
    reputation: Reputation = field(default_factory=Reputation)
    liveness: Liveness = field(default_factory=Liveness)
    leases: set[int] = field(default_factory=set)
    outstanding: int = 0
    """Samples leased to it that are still open."""
    capacity: int = 0
    """Sequences that it can hold in all: `outstanding` plus the room that it last reported."""
    asked: float = float("-inf")
    """When it last asked for work."""
    serial: int = -1
    """Of its newest request for work."""
    version: Version | None = None
    """The version that its engine held when it last asked for work."""
    token_s: Average = field(default_factory=Average)
    """Recent seconds per token of one sequence, waiting at the node included."""
    gone_since: float = float("-inf")
    """`liveness.heard` at the last lapse that happened while the node was silent: one silence counts as one lapse."""
    busy_since: float = 0.0
    """Since when `busy_tokens` are counted: the beginning of work, or the last measurement."""
    busy_tokens: int = 0
    accepted: int = 0
    """Rollouts accepted."""
    tokens: int = 0
    """Tokens of accepted rollouts."""
    used: int = 0
    """Samples that a trainer, or a client of the gateway, has taken."""
    used_tokens: int = 0
    unused: Counter[Reason] = field(default_factory=Counter)
    """Samples that were generated and will never be used, by reason."""
    unused_tokens: int = 0
    refused: dict[Reason, int] = field(default_factory=dict)
    """Rollouts refused, by reason."""
    scores: bool = True
    """False once it answered that its engine cannot score tokens."""
    abilities: frozenset[str] | None = None
    """What its engine can do beyond what every release can. None: it has not answered."""
    abilities_asked: float = float("-inf")
    """When it was last asked for its abilities."""
    abilities_questions: int = 0
    """How often it was asked since it came."""
    kind: str = ""
    """The kind of its engine, as it reported with its abilities."""
    adapters: frozenset[str] = frozenset()
    """The adapters that its engine has loaded, as it last said."""
    adapters_asked: float = float("-inf")
    """When it was last asked for its adapters, until it has answered; then inf."""
    timesheet: Timesheet | None = None
    """How its time divides, as it last reported."""

    def leave(self) -> None:
        """Its membership lease ended. It may come back with another release and another engine."""
        self.capacity, self.asked = 0, float("-inf")
        self.abilities, self.abilities_asked, self.abilities_questions = None, float("-inf"), 0
        self.adapters, self.adapters_asked = frozenset(), float("-inf")
        self.scores = True

    def begin_work(self, samples: int, now: float) -> None:
        """It was leased `samples` more."""
        if not self.outstanding:
            self.busy_since, self.busy_tokens = now, 0
            self.liveness.begin(now)
        self.outstanding += samples

    def count_accepted(self, tokens: int) -> None:
        """A rollout of `tokens` tokens was accepted."""
        self.accepted += 1
        self.tokens += tokens
        self.busy_tokens += tokens

    def count_used(self, tokens: int) -> None:
        """A trainer or client took an accepted rollout of `tokens` tokens."""
        self.used += 1
        self.used_tokens += tokens

    def count_unused(self, tokens: int, why: Reason) -> None:
        """A rollout of `tokens` tokens was generated and will never be used."""
        self.unused[why] += 1
        self.unused_tokens += tokens

    def measure(self, now: float, window_s: float) -> None:
        """Observe the rate: at the end of each time with work, or every `window_s` seconds of it."""
        busy_s = now - self.busy_since
        if not self.outstanding or busy_s >= window_s:
            self.rate.observe(self.busy_tokens, busy_s)
            self.busy_since, self.busy_tokens = now, 0
