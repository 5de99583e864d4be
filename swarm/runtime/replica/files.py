"""A replica's checkpoints on disk, and the file for an engine to load from when the replica is not in memory."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from codec import Checkpoint, Layered, Layout, Replica, write_checkpoint
from codec.bits import Bits
from codec.checkpoint import check_files
from codec.errors import PeerError, UsageError
from codec.manifest import state_root
from codec.parts import base_layout, policy_part
from codec.zeros import are_zeros
from swarm.protocol.core.events import VersionId
from swarm.runtime.replica.base_folder import Proven
from swarm.store import Store

__all__ = ["Loan", "ReplicaFiles"]


class Loan(NamedTuple):
    """The bits of a replica for another process to map. The replica keeps ownership of `fd`.

    `layout`, `root`: of the base, with its draft model if that was asked for. `swarm_root`: of the whole version.
    """

    layout: Layout
    fd: int
    version: VersionId
    root: bytes
    swarm_root: bytes


class ReplicaFiles:
    """The files of one replica. The file that is lent stays, at the version that was last lent, because other processes
    have mapped it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._file: Replica | None = None

    def lend(
        self, replica: Replica | Layered, version: VersionId, *, drafted: bool = False
    ) -> tuple[Loan | None, tuple[int, ...]]:
        """The base's bits for another process to map; or None, and the blocks that are damaged. Raises `UsageError`.

        `drafted`: with the draft model, the same in every call. What is lent of a replica on disk is copied to the
        replica file. No version may be applied meanwhile.
        """
        wrong: tuple[int, ...] = ()
        swarm_root = replica.root
        base = policy_part(replica.layout).layout if drafted else base_layout(replica.layout)
        if isinstance(replica, Layered):
            replica, wrong = self._update_file(replica, base)
        if wrong:
            return None, wrong
        root = state_root(base.hash, replica.hashes[: base.n_blocks])
        return Loan(base, replica.seal_for_readers(), version, root, swarm_root), ()

    def _update_file(self, layered: Layered, base: Layout) -> tuple[Replica, tuple[int, ...]]:
        if self._file is None:
            self._file = Replica.create(base, self._store.replica_path)
        self._file.refill_file()
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            return self._file, self._file.take_from(layered, pool.map)

    def empty_file(self) -> None:
        """Give the replica file's disk space back until it is lent again."""
        if self._file is not None:
            self._file.empty_file()

    def remove_file(self) -> None:
        """Remove the replica file."""
        self._file = None
        self._store.disk.remove(self._store.replica_path)

    def refer(self, replica: Replica | Layered, version: VersionId, proven: Proven) -> bool:
        """Make the user's folder the checkpoint of `version`, without copying it; whether its bits still are those.

        A folder inside the store is never referred to: what is in the store is removed when it is not needed.
        """
        inside = proven.reference.folder.resolve().is_relative_to(self._store.folder.resolve())
        if inside or replica.root != proven.root or not proven.reference.unchanged:
            return False
        self._store.put_file(replica.layout.to_bytes())
        self._store.checkpoints.refer(proven.reference, version, proven.root, replica.layout.hash)
        self._store.partial.clear()
        return True

    def write_checkpoint(
        self, replica: Replica | Layered, version: VersionId, bits: Callable[[str], Bits | Iterator[Bits | int]]
    ) -> None:
        """Write a checkpoint of `replica`; `bits(name)` gives the bits of each tensor. Raises `DiskFull`, and what
        `bits` raises."""
        layout = replica.layout
        self._store.put_file(layout.to_bytes())
        fill = partial(
            write_checkpoint, layout=layout, bits=bits, files=self._small_files(layout),
            write_file=self._store.disk.write_file,
        )  # fmt: skip
        self._store.write_checkpoint(version, replica.root, layout.hash, fill)
        self._store.partial.clear()

    def finish_partial(self, replica: Replica | Layered, version: VersionId, give_way: Callable[[], None]) -> None:
        """Make the unfinished checkpoint the one of `version`: write the blocks that it lacks, and rename it. Blocks
        that the replica does not hold stay holes of its files.

        `give_way` is called between blocks, and may raise; what is written stays. No version may be applied meanwhile.
        A replica on disk rests on the checkpoint afterwards. Raises `DiskFull`, `Torn`.
        """
        layout, unfinished = replica.layout, self._store.partial
        self._store.put_file(layout.to_bytes())
        files = unfinished.blocks(layout)
        for block in range(layout.n_blocks):
            if isinstance(replica, Replica) and not replica.holds(block):
                continue
            digest = replica.hashes[block].tobytes()
            if are_zeros(layout, block, digest) and not unfinished.written(block):
                continue  # a hole of the file
            if isinstance(replica, Layered):
                if not replica.rests_on(block, files):
                    give_way()
                    write = partial(unfinished.add, layout, block, digest=digest)
                    replica.move_block(block, write, files)
            elif not unfinished.has(block, digest):
                give_way()
                unfinished.add(layout, block, replica.block(block).view(np.uint8).data, digest)
        small = self._small_files(layout)
        check_files(layout, small)
        for name, data in small.items():
            self._store.disk.write_whole(unfinished.files / name, data)
        self._store.checkpoints.adopt(unfinished.files, version, replica.root, layout.hash)
        unfinished.clear()

    def _small_files(self, layout: Layout) -> dict[str, bytes]:
        return {spec.name: data for spec in layout.files if (data := self._store.file(spec.hash)) is not None}

    def rebase(self, replica: Layered, frozen: Layered, version: VersionId) -> None:
        """`frozen` was written as the checkpoint of `version`: put `replica` on top of it, if it can be read."""
        with contextlib.suppress(UsageError, PeerError, OSError):
            replica.rebase(Checkpoint.open(self._folder(version), parts=True), frozen)

    def _folder(self, version: VersionId) -> Path:
        return next(saved.folder for saved in self._store.checkpoints.list() if saved.version == version)
