"""What a trainer, or a gateway, has with the ledger while it waits for groups."""

from collections import deque
from dataclasses import dataclass, field

import trio

from codec.errors import PeerError
from node.engines.base import SamplingParams
from node.ledger.assignment.pool import check_offer
from node.ledger.model_limits import NO_LIMITS, Limits
from node.ledger.state import Group

__all__ = ["Offer", "Session"]


@dataclass(eq=False)
class Session:
    """One batch of prompts that a trainer waits for. `news` is set when there may be a group or more room."""

    name: str
    n: int
    sampling: SamplingParams
    max_lag: int
    keep: bool
    """Its work outlives the connection."""
    whole: bool = False
    """Groups are drawn whole; see `node.ledger.state.Group`."""
    total: int | None = None
    """Groups that will be offered since the session was opened, if the trainer knows."""
    limits: Limits = NO_LIMITS
    """What the model can read; a prompt beyond it is refused when it is offered."""
    news: trio.Event = field(default_factory=trio.Event)
    offered: int = 0
    skipped: int = 0
    """Of `total`, those that will not be offered: the trainer's prompt cannot be drawn."""
    allowed: int = 0
    """Groups that may be offered since the session was opened: a total, so that news in flight cannot be misread."""
    impossible: dict[bytes, str] = field(default_factory=dict)
    """Groups that no node can do, and why."""
    wanted: set[bytes] = field(default_factory=set)
    """Groups that were offered since the session was opened, and not taken. No other is handed over: of those that an
    earlier trainer left under this name, nobody has said yet that it asks for the same."""
    refused: dict[bytes, tuple[str, bool]] = field(default_factory=dict)
    """Groups that are not drawn, a sentence that says why, and whether it is that the key stands for other work."""
    groups: deque[Group] = field(default_factory=deque)
    """Complete and durable, not yet fetched."""

    ended: trio.Event = field(default_factory=trio.Event)
    """Its trainer hung up."""

    def offer(
        self, group: bytes, prompt: bytes, n: int | None, sampling: SamplingParams | None, affinity: bytes
    ) -> "Offer":
        """Samples of `prompt`: as many, and sampled, as the session says unless said otherwise here. Raises `PeerError`
        for what no node could do."""
        self.offered += 1
        n, sampling = self.n if n is None else n, self.sampling if sampling is None else sampling
        try:
            check_offer(prompt, n, sampling)
        except ValueError as error:
            raise PeerError(f"rollouts.offer: {error}") from error
        if (why := self.limits.why_not(prompt, sampling.max_tokens)) is not None:
            raise PeerError(why)
        return Offer(self, group, prompt, n, sampling, affinity)

    def wake(self) -> None:
        self.news.set()
        self.news = trio.Event()


@dataclass(frozen=True, slots=True)
class Offer:
    """A prompt that is to become a group. It does with the next write."""

    session: Session
    group: bytes
    prompt: bytes
    n: int
    sampling: SamplingParams
    affinity: bytes
