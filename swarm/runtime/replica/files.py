"""A replica on disk: its checkpoints, and the file to catch up in or to load from when the replica is not in memory."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from codec import Checkpoint, Layered, Layout, Replica, write_checkpoint
from codec.bits import Bits
from codec.errors import PeerError, UsageError
from swarm.protocol.core.events import VersionId
from swarm.runtime.replica.restore import open_layered
from swarm.store import SavedCheckpoint, Store

__all__ = ["Loan", "ReplicaFiles"]


class Loan(NamedTuple):
    """A replica's bits for another process to map. The replica keeps ownership of `fd`."""

    layout: Layout
    fd: int
    version: VersionId
    root: bytes


class ReplicaFiles:
    """The files of one replica. `lent`: another process has mapped the replica file, so the file stays, at the version
    that this process last loaded."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._file: Replica | None = None
        self.lent = False

    def create_file(self, layout: Layout) -> Replica:
        """The replica file, empty. Raises `UsageError` when the disk is full."""
        self._file = Replica.create(layout, self._store.replica_path)
        return self._file

    def update_file(self, layered: Layered) -> tuple[Replica, tuple[int, ...]]:
        """The replica file with the bits of `layered`, and the blocks that could not be copied. Raises `UsageError`."""
        file = self._file or self.create_file(layered.layout)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            return file, file.take_from(layered, pool.map)

    def remove_file(self) -> None:
        """Remove the replica file."""
        self._file = None
        self._store.disk.remove(self._store.replica_path)

    def write_checkpoint(
        self, replica: Replica | Layered, version: VersionId, bits: Callable[[str], Bits | Iterator[Bits]]
    ) -> None:
        """Write a checkpoint of `replica`; `bits(name)` gives the bits of each tensor. Raises `DiskFull`, and what
        `bits` raises."""
        layout = replica.layout
        self._store.put_file(layout.to_bytes())
        files = {spec.name: data for spec in layout.files if (data := self._store.file(spec.hash)) is not None}
        fill = partial(write_checkpoint, layout=layout, bits=bits, files=files)
        self._store.write_checkpoint(version, replica.root, layout.hash, fill)
        self._store.partial.clear()

    def replace_file(self, version: VersionId) -> Layered | None:
        """The checkpoint of `version` as the replica that takes the place of the file. The file is removed, unless it
        is lent. None when the checkpoint cannot be read."""
        layered = open_layered(self._store, self._checkpoint(version))
        if layered is not None and not self.lent:
            self.remove_file()
        return layered

    def rebase(self, replica: Layered, frozen: Layered, version: VersionId) -> None:
        """`frozen` was written as the checkpoint of `version`: put `replica` on top of it, if it can be read."""
        with contextlib.suppress(UsageError, PeerError, OSError):
            replica.rebase(Checkpoint.open(self._checkpoint(version).folder), frozen)

    def _checkpoint(self, version: VersionId) -> SavedCheckpoint:
        return next(saved for saved in self._store.checkpoints.list() if saved.version == version)
