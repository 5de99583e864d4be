"""The interface of fuzz targets: a target creates worlds, and a world takes messages. `run` drives them."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from scenarios.fuzz.inputs.fields import Kind

__all__ = ["FOREVER", "Broken", "Target", "World"]

FOREVER: Final = 1 << 40
"""The episode of a target without state."""


class Broken(AssertionError):
    """A property that must hold for any input is violated; the text names it."""


class World(ABC):
    """One instance of the code under test: for example a core with its sessions, or a decoder without state."""

    off_loop_s: float = 0.0
    """CPU time of the last message that the product spends in another thread."""

    def turn(self, rng: random.Random) -> None:  # noqa: B027 - most worlds do nothing here
        """Prepare the next case: let time pass, let honest peers send, choose the sender."""

    @abstractmethod
    def give(self, kind: Kind, data: bytes) -> str:
        """Give one message to the code under test; return its outcome in a few words. Any exception is an escape."""

    def check(self) -> None:  # noqa: B027
        """Raise `Broken` when a property is violated. Called every `run.CHECK_EVERY` cases."""

    def sizes(self) -> dict[str, int]:
        """Return the number of entries of each table that a peer could make grow."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Release files and other resources."""


class Target(ABC):
    """One reader of messages that is fuzzed."""

    name: ClassVar[str]
    about: ClassVar[str]
    episode: ClassVar[int] = 5000
    """Cases per world. Reproducing an escape takes at most this many cases."""
    slow_s: ClassVar[float] = 0.05
    """Limit on this thread's CPU time per message; a longer one would stall every other peer."""
    most_entries: ClassVar[int] = 20_000
    """Limit on the entries of any one table."""
    kinds: Sequence[Kind]

    @abstractmethod
    def world(self, rng: random.Random) -> World:
        """Create a new world."""

    def types(self) -> dict[str, Any]:
        """Return the message types that the target must cover, by name of the kind. A test checks that each has one."""
        return {}
