"""The way back to an older version, block by block, from a checkpoint and the chunks since that the seed keeps.

A chunk can only be applied forwards, because its code depends on the bits before it. So each block is read from a
checkpoint older than the wanted version, brought forward by that block's changes, and compared with the replica: one
block at a time, so that no second replica is needed.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from codec import BlockDelta, BlockSpec, Checkpoint, Replica
from codec.bits import Bits
from codec.chunk import BlockEntry
from codec.errors import UsageError
from codec.staging import block_hash, decode
from codec.zeros import are_zeros
from swarm.store import Seal, Store

__all__ = ["Rewind"]

_Changes = dict[int, list[tuple[BlockEntry, memoryview]]]


class Rewind:
    """Leads from `replica`, which is the head, to versions before it. Runs in worker threads; writes nothing."""

    def __init__(self, store: Store, replica: Replica, base: Path | None) -> None:
        """`base`: the checkpoint folder of version 0, if the swarm began with one."""
        self._store, self._replica, self._base = store, replica, base

    def deltas(self, to: Seal, skip: range = range(0)) -> Iterator[tuple[BlockDelta, int]]:
        """(delta, elements changed) of each block that differs between the replica and the version `to`. `skip`: blocks
        that are left out.

        Raises `UsageError` when the store no longer leads there, or is damaged.
        """
        checkpoint, path = self._path(to)
        changes, layout = self._changes(path), self._replica.layout
        for block in range(layout.n_blocks):
            if block in skip:
                continue
            spec = layout.block(block)
            new = _bits(checkpoint, spec, beyond_base=block >= layout.base_blocks)
            for entry, payload in changes.get(block, ()):
                decoded = decode(entry, payload, new, spec.dtype)
                if decoded is None and block_hash(new) != entry.new_hash:
                    raise _gone(to)
                if decoded is not None:
                    new[decoded[0]] = decoded[1]
            if are_zeros(layout, block, self._replica.hashes[block].tobytes()) and not new.any():
                continue  # zeros then and now: reading the replica would fill a hole
            old = self._replica.block(block)
            delta = self._replica.encode_block(block, new)
            if delta is not None:
                yield delta, int(np.count_nonzero(old != new))

    def _path(self, to: Seal) -> tuple[Checkpoint, list[Seal]]:
        """A checkpoint, and the versions from it to `to`, oldest first."""
        starts = {
            checkpoint.root: checkpoint.folder for checkpoint in self._store.checkpoints.list() if checkpoint.trusted
        }
        seals = self._store.records.seals()
        if self._base is not None:
            starts.setdefault(seals[0].root, self._base)
        path: list[Seal] = []
        at = to
        while at.root not in starts:
            before = next((s for s in reversed(seals) if s.root == at.parent_root and s.id < at.id), None)
            if before is None or not self._store.whole(at):
                raise _gone(to)
            path.append(at)
            at = before
        return Checkpoint.open(starts[at.root], parts=True), path[::-1]

    def _changes(self, path: list[Seal]) -> _Changes:
        """The changes of those versions by block, oldest first. Holds their chunks in memory."""
        changes: _Changes = {}
        for seal in path:
            for chunk in self._store.chunks.of(seal.id, seal.attempt):
                body = self._store.chunks.body(chunk.key)
                if body is None:
                    raise _gone(seal)
                for entry, payload in zip(chunk.header.blocks, chunk.header.payloads(body), strict=True):
                    changes.setdefault(entry.block, []).append((entry, payload))
        return changes


def _bits(checkpoint: Checkpoint, spec: BlockSpec, *, beyond_base: bool) -> Bits:
    """A copy of a block's elements. A tensor beyond the base that the checkpoint does not have is zeros."""
    if beyond_base and not checkpoint.has(spec.name):
        return np.zeros(spec.count, spec.dtype.bits)
    return checkpoint.bits(spec.name)[spec.start : spec.start + spec.count].copy()


def _gone(to: Seal) -> UsageError:
    return UsageError(
        f"The seed no longer keeps what leads to version {to.id}. Load your own checkpoint of it, and give its "
        "weights: swarm.rollback(version, model)."
    )
