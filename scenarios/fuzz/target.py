"""What is fuzzed: a target makes worlds, and a world takes messages. `run` drives them."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from scenarios.fuzz.fields import Kind

__all__ = ["FOREVER", "Broken", "Target", "World"]

FOREVER: Final = 1 << 40
"""The episode of a target without a state."""


class Broken(AssertionError):
    """Something that must be true whatever a peer sends is not: the text says what."""


class World(ABC):
    """One run of what is fuzzed, from its start: a core with its sessions, say, or nothing at all."""

    off_loop_s: float = 0.0
    """Processor time of the last message that another thread would have spent."""

    def turn(self, rng: random.Random) -> None:  # noqa: B027 - most have nothing to do
        """Before each case: let time pass, let honest peers speak, choose who speaks now."""

    @abstractmethod
    def give(self, kind: Kind, data: bytes) -> str:
        """Take one message; a few words on what became of it. Any exception that leaves it is an escape."""

    def check(self) -> None:  # noqa: B027
        """Now and then: raise `Broken` unless all is as it must be."""

    def sizes(self) -> dict[str, int]:
        """Entries of each table that a peer could make grow."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Give back files and the like."""


class Target(ABC):
    """One thing that reads what others send."""

    name: ClassVar[str]
    about: ClassVar[str]
    episode: ClassVar[int] = 5000
    """Cases until the world is made anew: what has to be run again to see an escape again."""
    slow_s: ClassVar[float] = 0.05
    """Of this thread's processor time: a message that takes longer stalls every other peer."""
    most_entries: ClassVar[int] = 20_000
    """Of any one table."""
    kinds: Sequence[Kind]

    @abstractmethod
    def world(self, rng: random.Random) -> World:
        """A new one."""

    def types(self) -> dict[str, Any]:
        """The message types that the target must have kinds for, by the name of the kind: a new one without a kind
        fails the test."""
        return {}
