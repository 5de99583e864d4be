"""The bits of one sealed version, read from a store beside the process that uses it, or from a checkpoint folder."""

from pathlib import Path

from codec import Layered, Layout
from swarm.runtime.replica.base_folder import BaseFolder
from swarm.runtime.replica.restore import open_layered
from swarm.store import Seal, Store

__all__ = ["bits_of_folder", "bits_of_version"]


def bits_of_version(store: Store, seal: Seal) -> Layered | None:
    """The bits of a sealed version, each block proven as it is read. None when the store does not lead there any
    more."""
    for checkpoint in store.checkpoints.list():
        if checkpoint.version > seal.id or (layered := open_layered(store, checkpoint)) is None:
            continue
        for following in store.chain(checkpoint.root, checkpoint.version):
            if layered.root == seal.root or following.id > seal.id:
                break
            layered.follow([chunk.header for chunk in store.chunks.of(following.id, following.attempt)])
        if layered.root == seal.root:
            return layered
    return None


def bits_of_folder(folder: Path, layout: Layout) -> Layered:
    """The bits of a checkpoint folder, all of which are hashed. Raises `UsageError` when it is of another model."""

    def no_chunk(*_: object) -> None:
        return None

    found = BaseFolder(folder, refer=False).load(layout, no_chunk, on_disk=True)
    assert isinstance(found, Layered)
    return found
