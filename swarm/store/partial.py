"""The checkpoint that an unfinished catch-up writes: blocks are written where the finished checkpoint has them.

So the bits of a machine that joins are written once: when the replica is complete, the blocks that are missing are
added and the folder is renamed. A restarted node fetches no block again that is in these files. Nothing in them is
trusted: `load` hashes each block, and its caller compares the hashes.

    partial.files/       the files of a checkpoint, sparse (`codec.checkpoint.plan_files`)
    partial.blocks       the hash of the layout, then the numbers of the blocks written

Earlier releases wrote `partial`, in which blocks lie as in memory, and `partial.list`. They are still read.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from codec import BlockSpec, Layout
from swarm.store.disk import Disk, PageWriter
from swarm.store.private import FILE_MODE

if TYPE_CHECKING:
    from codec.block_files import BlockFiles

__all__ = ["NAMES", "Partial"]

NAMES = ("partial.files", "partial.blocks", "partial", "partial.list")
"""What a home may have of an unfinished catch-up."""


class _Files:
    """The open files of one layout. `digests`: by block written, its hash."""

    def __init__(self, folder: Path, layout: Layout, disk: Disk) -> None:
        from codec.block_files import BlockFiles  # a relay's store has no blocks, so it never loads these and numpy
        from codec.checkpoint import plan_files

        folder.mkdir(mode=0o700, exist_ok=True)
        self.layout = layout
        self.digests: dict[int, bytes] = {}
        self.writers: list[PageWriter] = []
        self._places: dict[str, tuple[PageWriter, int]] = {}
        paths: dict[str, tuple[Path, int]] = {}
        for planned in plan_files(layout):
            path = folder / planned.name
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            writer = PageWriter(disk, path, os.open(path, flags, FILE_MODE))
            self.writers.append(writer)
            writer.write_at([planned.head], 0)  # again: after a power failure the file may have its size without it
            os.truncate(path, planned.nbytes)
            for name, offset in planned.offsets.items():
                self._places[name], paths[name] = (writer, offset), (path, offset)
        self.blocks = BlockFiles(paths)

    def write(self, spec: BlockSpec, data: bytes | memoryview) -> None:
        writer, offset = self._places[spec.name]
        writer.write_at([data], offset + spec.start * spec.dtype.itemsize)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


class Partial:
    """The fetched blocks under one folder, of one layout at a time."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.files, self._list, self._old_data, self._old_list = (folder / name for name in NAMES)
        self._disk = disk
        self._lock = threading.RLock()
        self._open: _Files | None = None

    def add(self, layout: Layout, block: int, data: bytes | memoryview, digest: bytes) -> None:
        """Write a block, not durably. Blocks of another layout are removed. Raises `DiskFull`."""
        files = self._opened(layout)
        spec = layout.block(block)
        with self._lock:
            files.digests.pop(block, None)
        with self._disk.errors(self.files):
            files.write(spec, data)
        with self._lock:
            self._append(block.to_bytes(8, "little"))
            files.digests[block] = digest

    def blocks(self, layout: Layout) -> "BlockFiles":
        """The files in which the blocks written are. Raises `DiskFull`."""
        return self._opened(layout).blocks

    def holds(self, layout: Layout) -> bool:
        """Whether this process has read or written blocks of this layout here."""
        return self._open is not None and self._open.layout.hash == layout.hash and bool(self._open.digests)

    def has(self, block: int, digest: bytes) -> bool:
        """Whether the block that was written last has this hash."""
        return self._open is not None and self._open.digests.get(block) == digest

    def written(self, block: int) -> bool:
        """Whether this process has read or written the block here."""
        return self._open is not None and block in self._open.digests

    def load(self, layout: Layout) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield the blocks of this layout that an earlier process fetched: (block, bytes, their hash), not verified.

        Those of an earlier release are written as `add` does.
        """
        import numpy as np

        listed, blocks = self._read_list(self._list)
        if listed == layout.hash and self.files.is_dir():
            files = self._opened(layout)
            for block in sorted(block for block in blocks if block < layout.n_blocks):
                spec = layout.block(block)
                bits = np.empty(spec.count, spec.dtype.bits)
                try:
                    files.blocks.read(spec, bits)
                except OSError:
                    continue
                data = bits.tobytes()
                digest = files.digests[block] = blake3(data).digest()
                yield block, data, digest
        listed, blocks = self._read_list(self._old_list)
        if listed == layout.hash and self._old_data.is_file():
            with open(self._old_data, "rb") as file:
                for block in sorted(block for block in blocks if block < layout.n_blocks):
                    spec = layout.block(block)
                    file.seek(spec.offset)
                    data = file.read(spec.nbytes)
                    if len(data) == spec.nbytes:
                        digest = blake3(data).digest()
                        self.add(layout, block, data, digest)
                        yield block, data, digest

    def sync(self) -> None:
        """Make the blocks durable. Raises `DiskFull`."""
        assert self._open is not None
        for writer in self._open.writers:
            writer.sync()

    def clear(self) -> None:
        """Remove all blocks. Call it when the replica is complete and on disk elsewhere, or the files were renamed."""
        with self._lock:
            self._remove(self._list, self.files, self._old_list, self._old_data)

    def _opened(self, layout: Layout) -> _Files:
        with self._lock:
            if self._open is not None and self._open.layout.hash == layout.hash:
                return self._open
            if self._read_list(self._list)[0] != layout.hash or not self.files.is_dir():
                old = () if self._read_list(self._old_list)[0] == layout.hash else (self._old_list, self._old_data)
                self._remove(self._list, self.files, *old)
            with self._disk.errors(self.files):
                self._disk.before("write", self.files)
                self._open = _Files(self.files, layout, self._disk)
            if not self._list.exists():
                self._append(layout.hash)
            return self._open

    def _remove(self, *paths: Path) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
        for path in paths:
            self._disk.remove(path)

    def _append(self, data: bytes) -> None:
        with self._disk.errors(self._list), open(self._list, "ab") as file:
            self._disk.before("write", self._list)
            file.write(data)

    @staticmethod
    def _read_list(path: Path) -> tuple[bytes, set[int]]:
        """(hash of the layout, blocks written)."""
        try:
            data = path.read_bytes()
        except OSError:
            return b"", set()
        numbers = data[32 : 32 + (len(data) - 32) // 8 * 8]
        return data[:32], {int.from_bytes(numbers[i : i + 8], "little") for i in range(0, len(numbers), 8)}
