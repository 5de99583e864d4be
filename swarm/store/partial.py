"""The blocks that an unfinished catch-up has fetched, on disk, so that a restarted node does not fetch them again.

There is a sparse file of the size of the replica's buffer with each block at its offset, and a list of the blocks
written. Nothing in them is trusted: the caller of `load` hashes each block, and fetches those that are wrong again.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from codec import Layout
from swarm.store.disk import Disk

__all__ = ["Partial"]


class Partial:
    """The fetched blocks under one folder, of one layout at a time."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._data = folder / "partial"
        self._list = folder / "partial.list"
        self._disk = disk
        self._layout: bytes | None = None

    def add(self, layout: Layout, block: int, data: bytes) -> None:
        """Write a block, not durably. Blocks of another layout are removed. Raises `DiskFull`."""
        if self._layout != layout.hash:
            if self._read_list()[0] != layout.hash:
                self.clear()
                self._append(self._list, layout.hash)
            self._layout = layout.hash
        with self._disk.errors(self._data):
            descriptor = os.open(self._data, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._disk.write_at(descriptor, data, layout.block(block).offset, self._data)
            finally:
                os.close(descriptor)
        self._append(self._list, block.to_bytes(8, "little"))

    def load(self, layout: Layout) -> Iterator[tuple[int, bytes]]:
        """Yield the blocks of this layout that an earlier process fetched: (block, bytes), not verified."""
        listed, blocks = self._read_list()
        if listed != layout.hash or not self._data.exists():
            return
        with open(self._data, "rb") as file:
            for block in sorted(blocks):
                if block < layout.n_blocks:
                    spec = layout.block(block)
                    file.seek(spec.offset)
                    data = file.read(spec.nbytes)
                    if len(data) == spec.nbytes:
                        yield block, data

    def clear(self) -> None:
        """Remove all blocks. Call it when the replica is complete and on disk elsewhere."""
        self._layout = None
        for path in (self._list, self._data):
            self._disk.remove(path)

    def _append(self, path: Path, data: bytes) -> None:
        with self._disk.errors(path), open(path, "ab") as file:
            self._disk.before("write", path)
            file.write(data)

    def _read_list(self) -> tuple[bytes, set[int]]:
        """(hash of the layout, blocks written)."""
        try:
            data = self._list.read_bytes()
        except FileNotFoundError:
            return b"", set()
        numbers = data[32 : 32 + (len(data) - 32) // 8 * 8]
        return data[:32], {int.from_bytes(numbers[i : i + 8], "little") for i in range(0, len(numbers), 8)}
