"""What the runtime reports to the program around it: the coordinator, a member or a relay."""

from typing import TYPE_CHECKING, Protocol

from codec import Manifest
from swarm.protocol.core.events import VersionId
from swarm.protocol.core.notices import Notice

if TYPE_CHECKING:
    from codec import StagedChunk

__all__ = ["Application"]


class Application(Protocol):
    """The program that runs a core. It is called from the event loop: take note, and return at once."""

    def committed(self, version: VersionId, manifest: Manifest, changes: "tuple[StagedChunk, ...] | None") -> None:
        """The replica is at this version. `changes`: what was written since the one before (for `codec.write_patch`);
        None when it is not known, so that an engine must reload from the replica."""
        ...

    def notify(self, notice: Notice) -> None:
        """A notice of the core, or of the runtime (`CheckpointWritten`)."""
        ...
