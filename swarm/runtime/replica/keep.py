"""What of a replica is on disk: anchors; and for one that is not in memory, a file to catch up in or to load from."""

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
from swarm.store import Anchor, Store

__all__ = ["Keep", "Loan"]


class Loan(NamedTuple):
    """A replica's bits for another process to map. `fd` stays the replica's own."""

    layout: Layout
    fd: int
    version: VersionId
    root: bytes


class Keep:
    """`lent`: somebody has mapped the file, so it stays, at whatever version they last loaded."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._file: Replica | None = None
        self.lent = False

    def new(self, layout: Layout) -> Replica:
        """The file, empty. Raises `UsageError` when the disk is full."""
        self._file = Replica.create(layout, self._store.replica_path)
        return self._file

    def file_of(self, layered: Layered) -> tuple[Replica, tuple[int, ...]]:
        """The file, brought to what `layered` is; and the blocks that could not be. Raises `UsageError`."""
        file = self._file or self.new(layered.layout)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            return file, file.take_from(layered, pool.map)

    def forget(self) -> None:
        """The file is of no use any more."""
        self._file = None
        self._store.disk.remove(self._store.replica_path)

    def write_anchor(
        self, replica: Replica | Layered, version: VersionId, bits: Callable[[str], Bits | Iterator[Bits]]
    ) -> None:
        """A checkpoint of `replica`, whose `bits(name)` these are. Raises `DiskFull`, and what `bits` raises."""
        layout = replica.layout
        self._store.put_file(layout.to_bytes())
        files = {spec.name: data for spec in layout.files if (data := self._store.file(spec.hash)) is not None}
        fill = partial(write_checkpoint, layout=layout, bits=bits, files=files)
        self._store.write_anchor(version, replica.root, layout.hash, fill)
        self._store.partial.clear()

    def go_on(self, version: VersionId) -> Layered | None:
        """What was a file is this version's anchor from here on. The file goes, unless it is lent."""
        layered = open_layered(self._store, self._anchor(version))
        if layered is not None and not self.lent:
            self.forget()
        return layered

    def rebase(self, replica: Layered, frozen: Layered, version: VersionId) -> None:
        """`frozen` was written as this version's anchor: `replica` rests on that one, if it can be read."""
        with contextlib.suppress(UsageError, PeerError, OSError):
            replica.rebase(Checkpoint.open(self._anchor(version).folder), frozen)

    def _anchor(self, version: VersionId) -> Anchor:
        return next(anchor for anchor in self._store.anchors.list() if anchor.version == version)
