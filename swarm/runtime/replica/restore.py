"""Bring back the newest version that a store can prove: a checkpoint, and the chunks since.

What hashes the bits must have is known before any of them is read: those of the checkpoint are kept, those of the
blocks that a chunk changed stand in its signed header, and all of them add up to the root of a sealed version. So
each block is made once, by all its chunks, and hashed once; or, after a clean end, when it is used.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec import Checkpoint, Layered, Layout, Replica, state_root
from codec.errors import PeerError, UsageError
from codec.staging import block_hash
from swarm.store import Anchor, Recovery, Seal, Store

__all__ = ["Found", "Place", "open_layered", "restore"]

Hashes = NDArray[np.uint8]
Place = Callable[[Layout], Path | None]
"""The file that a replica of this layout is to be kept in; None: memory. May raise `UsageError`."""


class Found(NamedTuple):
    """`replica`: at version `seal`, but for the blocks `wrong`. `believed`: nothing was hashed."""

    replica: Replica | Layered
    seal: Seal
    wrong: tuple[int, ...]
    believed: bool


def restore(store: Store, place: Place) -> Found | None:
    """The newest version that the store leads to; None when it leads to none.

    An anchor whose bits are not what they must be is removed, and the next one tried; of the last one what can be used
    is returned, with the blocks that cannot.
    """
    left = store.clean.take()
    while (anchor := (recovery := store.recover()).anchor) is not None:
        found = _found(store, recovery, place, believed=left.vouches_for(anchor))
        if found is not None and not found.wrong:
            return found
        store.anchors.remove(anchor)
        if found is not None and store.recover().anchor is None:
            return found
    return None


def _found(store: Store, recovery: Recovery, place: Place, *, believed: bool) -> Found | None:
    assert recovery.anchor is not None
    seal = store.records.seal(recovery.anchor.version)
    layered = None if seal is None else open_layered(store, recovery.anchor)
    if seal is None or layered is None:
        return None
    for following in recovery.replay:
        before = layered.frozen()
        layered.follow([chunk.header for chunk in store.chunks.of(following.id, following.attempt)])
        if layered.root != following.root:
            layered = before
            break
        seal = following
    path = place(layered.layout)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        if path is None:
            replica = Replica.create(layered.layout)
            return Found(replica, seal, replica.take_from(layered, pool.map, believed=believed), believed)
        blocks = range(0 if believed else layered.layout.n_blocks)
        wrong = [block for block, bad in zip(blocks, pool.map(layered.wrong, blocks), strict=True) if bad]
    layered.hashes[wrong] = 0
    return Found(layered, seal, tuple(wrong), believed)


def open_layered(store: Store, anchor: Anchor) -> Layered | None:
    """The anchor as a replica, not hashed; None when it is none, or nothing says which hashes its blocks must have and
    they do not have the right ones."""
    data = store.file(anchor.layout)
    if data is None:
        return None
    try:
        layout, checkpoint = Layout.from_bytes(data), Checkpoint.open(anchor.folder)
        hashes = store.hashes(anchor.root)
        if hashes is None or len(hashes) != layout.n_blocks or state_root(layout.hash, hashes) != anchor.root:
            hashes = _hashed(layout, checkpoint)
        layered = Layered(layout, checkpoint, hashes.copy(), store.chunks.payload)
    except (UsageError, PeerError, KeyError, OSError):
        return None
    return layered if layered.root == anchor.root else None


def _hashed(layout: Layout, checkpoint: Checkpoint) -> Hashes:
    """The hashes that the checkpoint's blocks have."""

    def digest(block: int) -> bytes:
        spec = layout.block(block)
        return block_hash(checkpoint.bits(spec.name)[spec.start : spec.start + spec.count])

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = b"".join(pool.map(digest, range(layout.n_blocks)))
    return np.frombuffer(found, np.uint8).reshape(-1, 32)
