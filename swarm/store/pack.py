"""A pack: one file with the chunks of one attempt at a version.

Each chunk has an extent that starts on a page boundary: a head, the signed header, then space for the body. Pieces are
written in any order; or the whole body at once around the page cache, since a node rarely reads a chunk again. The file
is self-describing: after a crash it is scanned, and headers are verified with the authority's key and pieces with their
headers; what does not verify is ignored. So the file needs no sync before the version is sealed, and one then.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from swarm.store.disk import PAGE_BYTES, Disk, PageWriter

__all__ = ["Extent", "Pack"]

_HEAD: Final = Struct("<4sIQ")
_MAGIC: Final = b"SWC2"
_MAX_HEADER: Final = 1 << 20
_MAX_BODY: Final = 64 << 20
"""Bytes; a raw block of 2^20 elements of 8 bytes (8 MiB) fits."""


class Extent(NamedTuple):
    """A chunk in the file. `header`: sealed. `body`: offset of the body in the file. `size`: bytes of the body; 0: only
    the header is kept."""

    header: bytes
    body: int
    size: int


class Pack:
    """An open file of chunks. Safe to use from several threads."""

    def __init__(self, path: Path, disk: Disk, *, create: bool = True) -> None:
        """Raises `FileNotFoundError` when there is no such file and it is not to be created."""
        self.path = path
        self._disk = disk
        self._lock = threading.Lock()
        with disk.errors(path):
            disk.before("write", path)
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        self._writer = PageWriter(disk, path, self._file)
        self._end = _page_up(os.fstat(self._file).st_size)
        self.closed = False

    def add(self, header: bytes, size: int) -> int:
        """Append an extent for a chunk with a body of `size` bytes; returns the offset of the body."""
        with self._lock:
            at, body = self._extend(header, size)
            self._disk.write_at(self._file, _HEAD.pack(_MAGIC, len(header), size) + header, at, self.path)
            return body

    def put(self, header: bytes, parts: Sequence[bytes | memoryview]) -> int:
        """Append a chunk whose body is `parts`, in order; returns the offset of the body."""
        size = sum(map(len, parts))
        with self._lock:
            at, body = self._extend(header, size)
            if not self.closed:
                self._writer.write_pages((_HEAD.pack(_MAGIC, len(header), size), header, *parts), at)
            return body

    def _extend(self, header: bytes, size: int) -> tuple[int, int]:
        """Allocate an extent; returns its offset, and that of its body."""
        at = self._end
        body = at + _HEAD.size + len(header)
        self._end = _page_up(body + size)
        return at, body

    def write(self, parts: Sequence[bytes | memoryview], offset: int) -> None:
        """Write `parts` in order, from `offset` in the file on."""
        with self._lock:
            if not self.closed:
                self._disk.write_parts_at(self._file, parts, offset, self.path)

    def read(self, offset: int, size: int) -> bytes | None:
        """`size` bytes at `offset`; None if the pack is closed or the file ends before."""
        with self._lock:
            if self.closed:
                return None
            data = os.pread(self._file, size, offset)
        return data if len(data) == size else None

    def sync(self) -> None:
        """Make everything written so far durable. Other threads may read and write meanwhile."""
        with self._lock:
            duplicate = os.dup(self._file)
        try:
            self._disk.sync(duplicate, self.path)
        finally:
            os.close(duplicate)

    def scan(self) -> Iterator[Extent]:
        """The extents in the file up to the first invalid one, which the next new extent overwrites."""
        at = 0
        while (head := self.read(at, _HEAD.size)) is not None:
            magic, header_size, size = _HEAD.unpack(head)
            if magic != _MAGIC or header_size > _MAX_HEADER or size > _MAX_BODY:
                break
            header = self.read(at + _HEAD.size, header_size)
            if header is None:
                break
            body = at + _HEAD.size + header_size
            at = _page_up(body + size)
            yield Extent(header, body, size)
        self._end = at

    def close(self) -> None:
        with self._lock:
            if not self.closed:
                self.closed = True
                self._writer.close()


def _page_up(offset: int) -> int:
    """`offset` rounded up to a page boundary."""
    return -(-offset // PAGE_BYTES) * PAGE_BYTES
