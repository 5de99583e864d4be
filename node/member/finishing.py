"""How a node ends on SIGTERM: it takes no more work, finishes what it has, and leaves."""

from dataclasses import dataclass, field

import trio

__all__ = ["Finishing"]


@dataclass(frozen=True)
class Finishing:
    """A request to end, which a signal makes. `within_s`: how long the work that the node holds may take."""

    within_s: float
    asked: trio.Event = field(default_factory=trio.Event)
