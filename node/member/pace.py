"""How much work a node holds, and how often it speaks to the ledger."""

from dataclasses import dataclass
from typing import Final

__all__ = ["PACE", "Pace"]


@dataclass(frozen=True, slots=True)
class Pace:
    """How a node works."""

    capacity: int = 64
    """Sequences held at a time, generating or waiting."""
    batch: int = 32
    """Sequences generated at once by an engine that does not batch continuously; another one generates all that it
    holds. A small batch is slow; a large one delays versions where a commit waits for it."""
    ask_every_s: float = 5.0
    """Interval of requests for work, in case one was lost or the seed was restarted."""
    say_again_s: float = 3.0
    """A result without a verdict is sent again after this time, several round trips of the longest links."""
    renew_every_s: float = 3.0
    """Interval of renewals of a lease that gets new tokens, well within the shortest lease."""
    memory_s: float = 60.0
    """Time constant of the rate that the ledger is told."""
    self_test_rows: int = 8
    self_test_tokens: int = 16
    """Generated before the first request, so that the ledger has a rate to begin with. 0: no self-test."""
    self_test_within_s: float = 10.0
    """Limit of the self-test; the rate of a slower engine is found out by its work."""


PACE: Final = Pace()
"""How every node works, except in simulations and tests."""
