"""What a node gives to saved states: disk for fragments, and its replica to a machine that has lost all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from node.saved.folder import FragmentFolder
from node.saved.holder import Holder, ReplicaReader
from swarm.protocol.core.events import SendBlob, SendBlock, VersionId
from swarm.protocol.membership.roster import Roster
from swarm.runtime.replica.manifests import Manifests
from swarm.store import Store

if TYPE_CHECKING:
    from swarm.runtime.services import ReplicaServices
    from swarm.runtime.sessions.outbound import Blob

__all__ = ["FRAGMENTS", "StateRoom", "build_holder"]

FRAGMENTS: Final = "state"
"""In the swarm's folder of a node's home."""


@dataclass(frozen=True, slots=True)
class StateRoom:
    """`budget_bytes`: disk for fragments. `roster()`: the node's newest one."""

    budget_bytes: int
    roster: Callable[[], Roster | None]


def build_holder(
    room: StateRoom, authority: bytes, store: Store, services: "ReplicaServices", manifests: Manifests
) -> Holder:
    """The holder of a node with a replica. Reads the folder of fragments, so it may block."""

    async def manifest() -> bytes:
        version = services.jobs.model.version
        found = None if version is None else manifests.get(version)
        return b"" if found is None else found[1]

    async def blob(kind: int, name: bytes) -> bytes | None:
        found = await services.blobs.find_blob(SendBlob(b"", 0, kind, name, 0))
        return None if found is None else _all_of(found)

    async def block(root: bytes, number: int) -> bytes | None:
        found = await services.blobs.find_blob(SendBlock(b"", 0, number))
        if found is None or manifests.root(VersionId(found.label.epoch, found.label.version)) != root:
            return None
        return _all_of(found)

    folder = FragmentFolder(store.folder / FRAGMENTS, authority, room.budget_bytes)
    return Holder(authority, folder, ReplicaReader(manifest, blob, block), room.roster)


def _all_of(blob: "Blob") -> bytes:
    """A blob that is in memory already: a block, a hash list, a layout or small file."""
    return blob.read(0, blob.total)
