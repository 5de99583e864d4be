"""What a trainer, or a gateway, has with the ledger while it waits for groups."""

from collections import deque
from dataclasses import dataclass, field

import trio

from node.engines.base import SamplingParams
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
    news: trio.Event = field(default_factory=trio.Event)
    offered: int = 0
    allowed: int = 0
    """Groups that may be offered since the session was opened: a total, so that news in flight cannot be misread."""
    impossible: dict[bytes, str] = field(default_factory=dict)
    """Groups that no node can do, and why."""
    groups: deque[Group] = field(default_factory=deque)
    """Complete and durable, not yet fetched."""

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
