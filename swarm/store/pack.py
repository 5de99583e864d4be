"""One file for the chunks of one attempt at a version.

Each chunk has an extent that begins on a page: a head, its signed header, then room for its body, filled piece by
piece in any order, or with all of it at once and past the page cache, since who keeps a chunk seldom reads it. The
file describes itself: after a crash it is scanned, headers are checked against the authority's key and pieces against
their headers, and what does not verify counts as not there. So nothing here needs a sync before the version is sealed,
and then one is enough for all its chunks.
"""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from swarm.store.disk import PAGE_BYTES, Disk

__all__ = ["Extent", "Pack"]

_HEAD: Final = Struct("<4sIQ")
_MAGIC: Final = b"SWC2"
_MAX_HEADER: Final = 1 << 20
_MAX_BODY: Final = 64 << 20
"""A raw block of 2^20 elements of 8 bytes, and then some."""


class Extent(NamedTuple):
    """Where a chunk lies: `body` is the offset of its body in the file, `size` the body's bytes."""

    header: bytes
    body: int
    size: int


class Pack:
    """An open file of chunks. Safe to use from several threads."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self._lock = threading.Lock()
        with disk.errors(path):
            disk.before("write", path)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._unbuffered = disk.open_unbuffered(path)
        self._end = _page(os.fstat(self._file).st_size)
        self.closed = False

    def add(self, header: bytes, size: int) -> int:
        """Make an extent for a chunk of `size` body bytes; the offset of its body."""
        with self._lock:
            at, body = self._extend(header, size)
            self._disk.write_at(self._file, _HEAD.pack(_MAGIC, len(header), size) + header, at, self.path)
            return body

    def put(self, header: bytes, parts: Sequence[bytes]) -> int:
        """Write a chunk whose whole body is `parts`, one behind the other; the offset of its body."""
        size = sum(map(len, parts))
        with self._lock:
            at, body = self._extend(header, size)
            if not self.closed:
                self._put((_HEAD.pack(_MAGIC, len(header), size), header, *parts), at)
            return body

    def _put(self, parts: Sequence[bytes], at: int) -> None:
        if self._unbuffered is not None:
            try:
                self._disk.write_pages(self._unbuffered, parts, at, self.path)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            os.close(self._unbuffered)  # a file system that opens such files, and does not write them
            self._unbuffered = None
        self._disk.write_pages(self._file, parts, at, self.path)

    def _extend(self, header: bytes, size: int) -> tuple[int, int]:
        """Where the next extent goes, and where its body."""
        at = self._end
        body = at + _HEAD.size + len(header)
        self._end = _page(body + size)
        return at, body

    def write(self, parts: Sequence[bytes], offset: int) -> None:
        """Write `parts`, one behind the other."""
        with self._lock:
            if not self.closed:
                self._disk.write_parts_at(self._file, parts, offset, self.path)

    def read(self, offset: int, size: int) -> bytes | None:
        """`size` bytes; None when they are not there (the pack was dropped, the file cut short)."""
        with self._lock:
            if self.closed:
                return None
            data = os.pread(self._file, size, offset)
        return data if len(data) == size else None

    def sync(self) -> None:
        """Make everything written so far durable. Others may read and write meanwhile."""
        with self._lock:
            duplicate = os.dup(self._file)
        try:
            self._disk.sync(duplicate, self.path)
        finally:
            os.close(duplicate)

    def scan(self) -> Iterator[Extent]:
        """The extents in the file, up to the first that makes no sense; new ones go in its place."""
        at = 0
        while (head := self.read(at, _HEAD.size)) is not None:
            magic, header_size, size = _HEAD.unpack(head)
            if magic != _MAGIC or header_size > _MAX_HEADER or size > _MAX_BODY:
                break
            header = self.read(at + _HEAD.size, header_size)
            if header is None:
                break
            body = at + _HEAD.size + header_size
            at = _page(body + size)
            yield Extent(header, body, size)
        self._end = at

    def close(self) -> None:
        with self._lock:
            if not self.closed:
                self.closed = True
                os.close(self._file)
                if self._unbuffered is not None:
                    os.close(self._unbuffered)


def _page(offset: int) -> int:
    """The first page's beginning from `offset` on."""
    return -(-offset // PAGE_BYTES) * PAGE_BYTES
