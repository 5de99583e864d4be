"""A session: what a trainer or the gateway has with the ledger while it waits for request groups."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import trio

from codec.errors import PeerError
from node.engines.base import RewardAsked, SamplingParams
from node.ledger.assignment.pool import check_offer
from node.ledger.binding import Binding
from node.ledger.model_limits import NO_LIMITS, ModelLimits
from node.ledger.state import Group
from node.ledger.terms import PLAIN, Terms

__all__ = ["GroupOffer", "WorkSession"]

MOST_SAMPLINGS: Final = 16


@dataclass(eq=False)
class WorkSession:
    """An open session. `news` is set, and replaced, when a group is ready, refused or impossible, or more are wanted.

    The ledger fills `groups`, `impossible` and `refused`; the session's owner empties them.
    """

    name: str
    work: Binding
    """The defaults of its groups: `n`, sampling, lag, and whether they are whole."""
    keep: bool
    """Its work outlives the connection."""
    total: int | None = None
    """Groups that will be offered since the session was opened, if the trainer knows."""
    limits: ModelLimits = NO_LIMITS
    """What the model can read; an offer of a prompt beyond it is refused."""
    terms: Terms = PLAIN
    """What it asks of its groups beyond their samples."""
    samplings: set[SamplingParams] = field(default_factory=set)
    """Other samplings than its own that a trainer's prompts have, `MOST_SAMPLINGS` at most; for people."""
    news: trio.Event = field(default_factory=trio.Event)
    offered: int = 0
    """Groups offered since the session was opened."""
    skipped: int = 0
    """Of `total`, the groups that will not be offered, because their prompts cannot be continued."""
    allowed: int = 0
    """Groups that may be offered since the session was opened: a total, so that a message in flight cannot make it
    ambiguous."""
    impossible: dict[bytes, str] = field(default_factory=dict)
    """Groups that no node can generate, and why."""
    wanted: set[bytes] = field(default_factory=set)
    """Groups that were offered since the session was opened, and not taken. Only these are handed over: nobody has
    confirmed yet that groups which an earlier trainer left under this name are still wanted."""
    refused: dict[bytes, tuple[str, bool]] = field(default_factory=dict)
    """Groups that will not be generated: a sentence that says why, and whether the reason is that the session's key
    stands for other work."""
    groups: deque[Group] = field(default_factory=deque)
    """Complete and durable groups that the owner has not fetched yet."""
    ended: trio.Event = field(default_factory=trio.Event)
    """Set when the session is closed."""

    @property
    def part(self) -> str:
        """The part of the model that its work is for, where its groups do not say otherwise."""
        return self.work.sampling.extra.adapter

    def offer(
        self,
        group: bytes,
        prompt: bytes,
        n: int | None,
        sampling: SamplingParams | None,
        affinity: bytes,
        max_lag: int | None = None,
    ) -> "GroupOffer":
        """A request for samples of `prompt`; `n`, `sampling` and `max_lag` default to the session's.

        Raises `PeerError` for work that no node could do.
        """
        self.offered += 1
        n, sampling = self.work.n if n is None else n, self.work.sampling if sampling is None else sampling
        try:
            check_offer(prompt, n, sampling)
        except ValueError as error:
            raise PeerError(f"rollouts.offer: {error}") from error
        if (why := self.limits.why_not(prompt, sampling.max_tokens)) is not None:
            raise PeerError(why)
        lag = self.work.max_lag if max_lag is None else max_lag
        return GroupOffer(self, group, prompt, n, sampling, affinity, lag)

    def own_sampling(self, sampling: SamplingParams | None) -> SamplingParams | None:
        """The sampling of one of a trainer's prompts, which may differ from the session's in all but the adapter and
        routes. It is noted in `samplings`.

        Raises `PeerError`.
        """
        if sampling is None:
            return None
        own, ours = sampling.extra, self.work.sampling.extra
        if (own.adapter, own.routes) != (ours.adapter, ours.routes):
            raise PeerError("rollouts.offer: the adapter and routes of a prompt are those of its session")
        if len(self.samplings) < MOST_SAMPLINGS and sampling != self.work.sampling:
            kind = own.reward and RewardAsked(own.reward.name)  # the metadata differs from prompt to prompt
            self.samplings.add(sampling.with_options(reward=kind))
        return sampling

    def samples_to_come(self) -> int | None:
        """Samples that will still be offered; None when the trainer has not said how many."""
        if self.total is None:
            return None
        return self.work.n * max(0, self.total - self.offered - self.skipped)

    def hand_over(self, groups: Iterable[Group], allowed: int) -> None:
        """`groups` are ready, and `allowed` groups may be offered in all. Wakes the owner when either is news."""
        groups = list(groups)
        if groups or allowed > self.allowed:
            self.groups = deque(sorted([*self.groups, *groups], key=lambda group: group.order))
            self.allowed = max(self.allowed, allowed)
            self.wake()

    def give_up(self, group: bytes, why: str) -> None:
        """No node can generate `group`."""
        self.impossible[group] = why
        self.wake()

    def refuse(self, group: bytes, why: str) -> None:
        """`group` will not be generated, because the session's key stands for other work."""
        self.refused[group] = (why, True)
        self.wake()

    def forget(self, group: bytes) -> None:
        """The owner no longer wants `group`."""
        self.impossible.pop(group, None)
        self.wanted.discard(group)

    def wake(self) -> None:
        """Set `news`."""
        self.news.set()
        self.news = trio.Event()


@dataclass(frozen=True, slots=True)
class GroupOffer:
    """A prompt that becomes a request group at the next write."""

    session: WorkSession
    group: bytes
    prompt: bytes
    n: int
    sampling: SamplingParams
    affinity: bytes
    max_lag: int
