"""What stands in a trainer's publish line."""

import threading
from dataclasses import dataclass, field

from codec.errors import SwarmError
from node.trainers.messages import VersionRef
from node.trainers.publish.publication import Publication

__all__ = ["Entry", "Return"]


@dataclass(eq=False)
class Entry:
    """A publish in the line. `slot`: where its copy is. `begun`: too late for a newer one to take its place."""

    number: int
    publication: Publication
    slot: int
    again: VersionRef | None = None
    copied_at: float = 0.0
    begun: bool = False
    written: threading.Event = field(default_factory=threading.Event)
    """Some of its copy can be read, or its copy failed."""
    told: bool = False
    """Its copy failed here, and the caller knows why."""

    @property
    def what(self) -> str:
        """For people: "step 5 (version 0.12)"."""
        return self.publication.named


@dataclass(eq=False)
class Return:
    """A way back to an older version, in its turn."""

    number: int
    wanted: VersionRef
    done: threading.Event = field(default_factory=threading.Event)
    error: SwarmError | None = None
    what: str = "the way back"
