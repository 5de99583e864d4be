"""Restores the newest version that a store can prove, from a checkpoint and the chunks since.

The hashes that the bits must have are known before any bits are read: the store keeps those of the checkpoint, a
chunk's signed header has those of the blocks that it changed, and together they add up to the root of a sealed version.
So each block is built once, with all its chunks, and hashed once; after a clean shutdown, only when it is first used.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec import Checkpoint, Layered, Layout, Replica, Torn, state_root
from codec.errors import PeerError, UsageError
from codec.staging import block_hash
from codec.zeros import zero_hash
from swarm.runtime.replica.holding import Holding
from swarm.store import Recovery, SavedCheckpoint, Seal, Store

__all__ = ["Found", "OnDisk", "open_layered", "replay_from", "restore"]

Hashes = NDArray[np.uint8]
"""(n_blocks, 32)"""
OnDisk = Callable[[int, int], bool]
"""`on_disk(held_bytes, base_bytes)`: whether to keep a replica of so many bytes, of a model whose base has so many, on
disk instead of in memory. May raise `UsageError`."""


class Found(NamedTuple):
    """`replica` is at version `seal`, except for the blocks `wrong`. `believed`: nothing was hashed."""

    replica: Replica | Layered
    seal: Seal
    wrong: tuple[int, ...]
    believed: bool


def restore(store: Store, on_disk: OnDisk, holding: Holding) -> Found | None:
    """The newest version that the store proves; None when it proves none. `holding`: which blocks it has.

    A checkpoint with wrong bits is removed and the next one tried. The last one is returned even so, with its wrong
    blocks.
    """
    clean_end = store.clean.take()
    while (checkpoint := (recovery := store.recover()).checkpoint) is not None:
        found = _found(store, recovery, on_disk, holding, believed=clean_end.vouches_for(checkpoint))
        if found is not None and not found.wrong:
            return found
        store.checkpoints.remove(checkpoint)
        if found is not None and store.recover().checkpoint is None:
            return found
    return None


def _found(store: Store, recovery: Recovery, on_disk: OnDisk, holding: Holding, *, believed: bool) -> Found | None:
    assert recovery.checkpoint is not None
    seal = store.records.seal(recovery.checkpoint.version)
    layered = None if seal is None else open_layered(store, recovery.checkpoint)
    if seal is None or layered is None:
        return None
    for following in recovery.replay:
        before = layered.frozen()
        layered.follow([chunk.header for chunk in store.chunks.of(following.id, following.attempt)])
        if layered.root != following.root:
            layered = before
            break
        seal = following
    keep = on_disk(holding.nbytes(layered.layout), layered.layout.base_nbytes)
    holding.check_place(layered.layout, on_disk=keep)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        if not keep:
            replica = Replica.create(layered.layout, held=holding.blocks(layered.layout))
            return Found(replica, seal, replica.take_from(layered, pool.map, believed=believed), believed)
        blocks = range(0 if believed else layered.layout.n_blocks)
        wrong = [block for block, bad in zip(blocks, pool.map(layered.wrong, blocks), strict=True) if bad]
    layered.hashes[wrong] = 0
    return Found(layered, seal, tuple(wrong), believed)


def replay_from(store: Store, replica: Replica) -> Seal | None:
    """Bring a replica, whose bits are those of a sealed version, as far forward as the store's chunks prove; the
    version reached. None when no seal has its root, or its bits are of no version afterwards."""
    last = next((seal for seal in reversed(store.records.seals()) if seal.root == replica.root), None)
    for seal in () if last is None else store.chain(last.root, last.id):
        try:
            for chunk in store.chunks.of(seal.id, seal.attempt):
                body = store.chunks.body(chunk.key)
                if body is not None:
                    replica.scatter([replica.stage(chunk.header, body)])
        except (Torn, PeerError):
            break
        if replica.root != seal.root:
            break
        last = seal
    return last if last is not None and replica.root == last.root else None


def open_layered(store: Store, checkpoint: SavedCheckpoint) -> Layered | None:
    """The checkpoint as a replica. Its blocks are hashed only when the store has no valid hash list for it.

    None when it cannot be read, or its blocks do not add up to its root.
    """
    data = store.file(checkpoint.layout)
    if data is None:
        return None
    try:
        layout, opened = Layout.from_bytes(data), Checkpoint.open(checkpoint.folder, parts=True)
        hashes = store.hashes(checkpoint.root)
        if hashes is None or len(hashes) != layout.n_blocks or state_root(layout.hash, hashes) != checkpoint.root:
            hashes = _hashed(layout, opened)
        layered = Layered.on(layout, opened, hashes.copy(), store.chunks.payload)
    except (UsageError, PeerError, KeyError, OSError):
        return None
    return layered if layered.root == checkpoint.root else None


def _hashed(layout: Layout, checkpoint: Checkpoint) -> Hashes:
    """The hashes of the checkpoint's blocks, uint8 (n_blocks, 32)."""

    def digest(block: int) -> bytes:
        spec = layout.block(block)
        if block >= layout.base_blocks and not checkpoint.has(spec.name):
            return zero_hash(spec.nbytes)
        return block_hash(checkpoint.bits(spec.name)[spec.start : spec.start + spec.count])

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = b"".join(pool.map(digest, range(layout.n_blocks)))
    return np.frombuffer(found, np.uint8).reshape(-1, 32)
