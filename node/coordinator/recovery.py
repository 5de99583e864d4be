"""The seed's replica at a start: the newest sealed version, from the store or the base checkpoint."""

from typing import Final

from codec import Checkpoint, Layout, Replica, open_manifest
from codec.errors import UsageError
from codec.parts import draft_files, draft_layout
from codec.sign import Key
from node.coordinator.draft import load_draft
from node.coordinator.format_parts import compute_formats
from swarm.runtime.publishing import genesis
from swarm.runtime.replica.model import Model
from swarm.store import Store

__all__ = ["CHECKPOINTS_KEPT", "open_newest_version"]

CHECKPOINTS_KEPT: Final = 2
"""Checkpoints of a seed: a way back over eight versions or more, also just after a new checkpoint."""


def open_newest_version(
    store: Store, model: Model, checkpoint: Checkpoint, layout: Layout, key: Key, draft: Checkpoint | None = None
) -> bytes:
    """Load the newest sealed version into `model`; its sealed manifest. A new store gets the base and the draft
    model as version 0, with zeros in all other parts of `layout`, but for formats, which are computed.

    Never loads an older version: members hold the newest one, so a second version of its number would contradict it.
    Raises `UsageError` when the store's bits do not lead to it.
    """
    newest = store.newest()
    if newest is None and (store.chunks.all() or any(saved.version > (0, 0) for saved in store.checkpoints.list())):
        raise UsageError(
            f"{store.folder} holds versions, but not the record of which were sealed. Restore its swarm.sqlite from a "
            "backup; or start a new swarm, with another home (--home) and another key."
        )
    if newest is None:
        files = checkpoint.files | ({} if draft is None else draft_files(draft.files))
        return genesis(store, model, _load(model, checkpoint, layout, draft), key, files=files).manifest
    if open_manifest(newest.manifest, key.public).layout_hash != layout.hash:
        raise UsageError(
            f"{store.folder} holds the swarm of another model than {checkpoint.path}. "
            "Give the folder that the swarm was started with (--base), or another home (--home)."
        )
    seal = model.restore()
    if seal is None or seal.id < newest.id:
        seal = model.restore_from(_load(model, checkpoint, layout, draft))
        if seal is None or seal.id < newest.id:
            what = f"What {store.folder} holds of version {newest.id}, the newest, is damaged."
            if model.changed_base is not None:
                what = (
                    f"{model.changed_base}, the checkpoint that the swarm was started with, was changed or removed "
                    f"while the seed did not run, and version {newest.id}, the newest, is built on it."
                )
            also = "" if draft is not None or draft_layout(layout) is None else " and its draft model as --draft"
            raise UsageError(
                f"{what} Give the checkpoint that was published as that version, or the unchanged base, as "
                f"--base{also}; or restore the folder from a backup."
            )
        model.write_checkpoint()
    _repair_files(store, model, checkpoint, draft)
    return seal.manifest


def _load(model: Model, checkpoint: Checkpoint, layout: Layout, draft: Checkpoint | None) -> Replica:
    """A replica with the bits of the checkpoint and of the draft model, and the formats that the layout has of them."""
    replica = model.load_base(checkpoint, layout)
    if draft is not None:
        load_draft(replica, draft)
    compute_formats(replica)
    return replica


def _repair_files(store: Store, model: Model, checkpoint: Checkpoint, draft: Checkpoint | None) -> None:
    """Write again what new members fetch and only the seed may have: small files, layout and block hashes."""
    assert model.replica is not None
    small = (*checkpoint.files.values(), *(() if draft is None else draft.files.values()))
    for data in (*small, model.replica.layout.to_bytes()):
        store.put_file(data)
    store.put_hashes(model.replica.root, model.replica.hashes)
