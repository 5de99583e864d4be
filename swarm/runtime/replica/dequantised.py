"""What a member with a format gives its engine: the base that its codes stand for, and what each version changes in it.

The engine computes with bf16, or with packed codes; its live bits are proven against the root of these bits. The file
lies on disk and is emptied when the engine is filled, so the member's memory stays that of the format.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec import Layered, Layout, Replica, StagedBlock, StagedChunk, state_root
from codec.errors import UsageError
from codec.formats.dequantised import DequantisedBase
from codec.formats.packed import PackedBase
from codec.formats.part import reader_of
from codec.formats.spec import format_named
from codec.staging import block_hash
from swarm.protocol.core.events import VersionId
from swarm.runtime.replica.files import Loan
from swarm.runtime.replica.model import Model
from swarm.store import Store

__all__ = ["DequantisedReplica", "EngineChanges"]


class EngineChanges(NamedTuple):
    """What a version changes in an engine. `root`: of the engine's bits afterwards."""

    changes: tuple[StagedChunk, ...]
    root: bytes


class DequantisedReplica:
    """The engine's view of a member's replica in the format `name`. Calls come one at a time, from worker threads.

    `packed`: the engine computes with packed codes (`codec.formats.packed`), else with bf16.
    """

    def __init__(self, model: Model, store: Store, name: str, *, packed: bool = False) -> None:
        self._model, self._store, self._form = model, store, format_named(name)
        self._packed = packed
        self._base: DequantisedBase | PackedBase | None = None
        self._file: Replica | None = None
        self._hashes: NDArray[np.uint8] | None = None
        """uint8 (n_blocks of the base, 32), of the engine's bits at `_version`."""
        self._version: VersionId | None = None

    def lend(self) -> Loan | None:
        """The bits for an engine to map; None while the replica is of no version. Raises `UsageError` without room on
        the disk. No version is applied meanwhile."""
        return self._model.read(self._fill)

    def _fill(self, replica: Replica | Layered) -> Loan:
        if self._base is None:
            self._base = self._base_of(replica.layout)
        layout, read = self._base.layout, reader_of(replica)
        if self._file is None:
            self._file = Replica.create(layout, self._store.replica_path)
        file, base = self._file, self._base
        file.refill_file()

        def fill(block: int) -> None:
            bits = base.block(block, read)
            file.write_block(block, bits.tobytes(), block_hash(bits))

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for _ in pool.map(fill, range(layout.n_blocks)):
                pass
        assert self._model.version is not None
        self._hashes, self._version = file.hashes.copy(), self._model.version
        return Loan(layout, file.seal_for_readers(), self._version, file.root, replica.root)

    def _base_of(self, layout: Layout) -> DequantisedBase | PackedBase:
        """What the engine is to have of this model. Raises `UsageError` if it cannot have packed codes."""
        if not self._packed:
            return DequantisedBase(layout, self._form)
        config = next((self._store.file(file.hash) for file in layout.files if file.name == "config.json"), None)
        if config is None:
            raise UsageError("--engine-holds format: the model has no config.json. Leave out --engine-holds.")
        return PackedBase(layout, self._form, config)

    @property
    def layout(self) -> Layout:
        """Of the engine's bits; known once they were lent."""
        assert self._base is not None
        return self._base.layout

    @property
    def files(self) -> Mapping[str, bytes]:
        """The small files, by name, that the engine needs in place of the model's; known once its bits were lent."""
        assert self._base is not None
        return self._base.files

    def end_loan(self) -> None:
        """No engine reads the file any more: give its disk space back until the next loan."""
        if self._file is not None:
            self._file.empty_file()

    def changes(self, version: VersionId, staged: Sequence[StagedChunk]) -> EngineChanges | None:
        """What `version`, which the replica became by `staged`, changes in an engine that has the one before. None when
        that is not known, because the replica has gone on: the engine has to be filled again."""
        if self._hashes is None or self._base is None or self._version is None or version <= self._version:
            return None
        hashes, base = self._hashes.copy(), self._base

        def find(replica: Replica | Layered) -> EngineChanges | None:
            if self._model.version != version:
                return None
            found: list[StagedBlock] = []
            changed = (block for chunk in staged for block in chunk)
            for block, positions, bits in base.touched(changed, reader_of(replica)):
                old_hash, new_hash = hashes[block].tobytes(), block_hash(bits)
                if new_hash != old_hash:
                    found.append(StagedBlock(block, positions, bits[positions], old_hash, new_hash))
                    hashes[block] = np.frombuffer(new_hash, np.uint8)
            root = state_root(base.layout.hash, hashes)
            return EngineChanges((StagedChunk(tuple(found)),) if found else (), root)

        changes = self._model.read(find)
        self._hashes, self._version = (None, None) if changes is None else (hashes, version)
        return changes
