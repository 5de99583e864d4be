"""What stands in a trainer's publish line."""

import threading
from dataclasses import dataclass, field

from codec.errors import SwarmError
from node.trainers.messages import VersionRef
from node.trainers.publish.encoding import BlockSource
from node.trainers.publish.publication import Publication

__all__ = ["Entry", "Rollback"]


@dataclass(eq=False)
class Entry:
    """A publish in the line. `number`: counted from 1, the same on all ranks. `slot`: the copy that holds its bits.

    `again`: not a new version, but the bits of this sealed one. `copied_at`: `time.perf_counter` of the end of the
    copy. `begun`: the sender is about to tell the seed, so a newer publish can no longer replace it. `source`: has the
    bits, and the copy has none. `expected_bytes`: of the payload, if the caller knows. `elements`: of which the changed
    ones are a share; 0: all of the layout's. `kept`: the blocks that stay as they are, whatever the copy has.
    """

    number: int
    publication: Publication
    slot: int
    again: VersionRef | None = None
    copied_at: float = 0.0
    begun: bool = False
    source: BlockSource | None = None
    expected_bytes: int = 0
    elements: int = 0
    kept: range = range(0)
    written: threading.Event = field(default_factory=threading.Event)
    """Some of its copy can be read, its copy failed, or it is superseded."""
    copy_failed: bool = False
    """Its copy failed in this process, and `publish` raised why."""

    @property
    def what(self) -> str:
        """The publish in words, such as "step 5 (version 0.12)"."""
        return self.publication.named


@dataclass(eq=False)
class Rollback:
    """A return to an older version, which waits for its turn in the line. `number`: as in `Entry`."""

    number: int
    wanted: VersionRef
    done: threading.Event = field(default_factory=threading.Event)
    error: SwarmError | None = None
    what: str = "the return to an older version"
