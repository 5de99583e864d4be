"""What a version changes, divided for an engine: the blocks that it writes into its weights, and other parts.

An engine loads the base, or the base with its draft model: the first blocks of the model.

Pure: it is told each version in order, and keeps only the hashes of all blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec import Layout, StagedChunk
from codec.manifest import state_root
from codec.parts import Part, base_layout, changed_parts, parts, policy_part

__all__ = ["ChangedParts", "VersionChanges"]


class VersionChanges(NamedTuple):
    """What one version changes. `base`: the changes of what the engine loads. `base_root`: its root in this version.
    `parts`: all parts that it changes. `hashes`: uint8 (n_blocks, 32), of all blocks in this version."""

    base: tuple[StagedChunk, ...]
    base_root: bytes
    parts: frozenset[Part]
    hashes: NDArray[np.uint8]


class ChangedParts:
    """Divides the changes of the versions of one model."""

    def __init__(self, layout: Layout, hashes: NDArray[np.uint8], *, drafted: bool = False) -> None:
        """`hashes`: uint8 (n_blocks, 32), of the whole model in the version before the first that is divided.
        `drafted`: the engine loads the draft model with the base."""
        self.base = policy_part(layout).layout if drafted else base_layout(layout)
        self._ranges = parts(layout)
        self._hashes = hashes.copy()

    def divide(self, changes: Sequence[StagedChunk]) -> VersionChanges:
        """Divide the changes of the next version. A chunk has blocks of one part only, but that is not relied on."""
        mine: list[StagedChunk] = []
        changed: set[Part] = set()
        for staged in changes:
            blocks = tuple(block for block in staged if block.block < self.base.n_blocks)
            changed |= changed_parts(self._ranges, (block.block for block in staged))
            if blocks:
                mine.append(staged if len(blocks) == len(staged.blocks) else StagedChunk(blocks, staged.key))
            for block in staged:
                self._hashes[block.block] = np.frombuffer(block.new_hash, np.uint8)
        return self._changes(tuple(mine), frozenset(changed))

    def everything(self) -> VersionChanges:
        """The version that the hashes are of, as if it had changed every part, and without the base's changes."""
        return self._changes((), frozenset(found.part for found in self._ranges))

    def _changes(self, base: tuple[StagedChunk, ...], changed: frozenset[Part]) -> VersionChanges:
        root = state_root(self.base.hash, self._hashes[: self.base.n_blocks])
        return VersionChanges(base, root, changed, self._hashes.copy())
