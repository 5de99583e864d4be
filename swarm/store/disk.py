"""The disk operations of the store, each of them atomic.

A file is written under a temporary name, synced, and renamed. So a crash between any two steps leaves the old file or
the new one, and perhaps a `.tmp` file, which the next start removes. Tests end the process before any step through
`before`.
"""

import errno
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from codec.errors import UsageError
from swarm.store.private import FILE_MODE

__all__ = ["PAGE_BYTES", "TEMPORARY", "Disk", "DiskFull", "PageWriter"]

TEMPORARY: Final = ".tmp"
"""Suffix of unfinished files and folders, which are removed on opening."""

PAGE_BYTES: Final = 4096
"""The unit of `write_pages`: unbuffered writes must be aligned to the block size, which divides it on usual disks."""

_SCRATCH_BYTES: Final = 2 << 20
"""Bytes written at once around the page cache: a chunk of the largest usual size (1 MiB) with its header fits."""
_PARTS_AT_ONCE: Final = 512
"""Parts in one `pwritev` call: half of IOV_MAX on Linux."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FAILED: Final = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO, errno.ESTALE})
_REFUSED: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class DiskFull(UsageError):
    """The disk is full. No partial write counts: free some space and start again."""


def _nothing(step: str, path: Path) -> None:
    """The default of `before`; tests replace it to inject failures."""


class Disk:
    """Disk operations, with a hook for tests.

    `before(step, path)` is called before each step: `write`, `sync`, `rename`, `sync_folder`, `remove` or `commit`.
    """

    def __init__(self, before: Callable[[str, Path], None] = _nothing) -> None:
        self.before = before
        self._scratch: mmap.mmap | None = None
        self._scratch_lock = threading.Lock()

    def write_whole(self, path: Path, data: bytes | memoryview) -> None:
        """Replace the file at `path` by `data`, atomically and durably. Raises `DiskFull`."""
        temporary = path.with_name(path.name + TEMPORARY)
        with self.errors(path):
            self.before("write", path)
            with open(temporary, "wb", opener=_private) as file:
                file.write(data)
                file.flush()
                self.before("sync", path)
                os.fsync(file.fileno())
            self.put_in_place(temporary, path)

    def put_in_place(self, temporary: Path, path: Path) -> None:
        """Rename a synced file or folder to `path`, and sync the parent folder."""
        with self.errors(path):
            self.before("rename", path)
            os.replace(temporary, path)
            self.sync_folder(path.parent)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in `folder` durable."""
        with self.errors(folder):
            self.before("sync_folder", folder)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def sync_file(self, path: Path) -> None:
        """Make the bytes of `path` durable."""
        with self.errors(path):
            self.before("sync", path)
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def sync(self, descriptor: int, path: Path) -> None:
        """Make the bytes written through `descriptor` durable."""
        with self.errors(path):
            self.before("sync", path)
            os.fsync(descriptor)

    def write_at(self, descriptor: int, data: bytes | memoryview, offset: int, path: Path) -> None:
        """Write all of `data` at `offset`. Not durable before `sync`."""
        with self.errors(path):
            self.before("write", path)
            _write_all(descriptor, memoryview(data), offset)

    def write_parts_at(self, descriptor: int, parts: Sequence[bytes | memoryview], offset: int, path: Path) -> None:
        """Write all of `parts` from `offset` on, without joining them first. Not durable before `sync`."""
        for first in range(0, len(parts), _PARTS_AT_ONCE):
            some = parts[first : first + _PARTS_AT_ONCE]
            size = sum(map(len, some))
            with self.errors(path):
                self.before("write", path)
                written = os.pwritev(descriptor, some, offset)
            if written < size:
                self.write_at(descriptor, b"".join(some)[written:], offset + written, path)
            offset += size

    def open_unbuffered(self, path: Path) -> int | None:
        """Open an existing file to write around the page cache (O_DIRECT); None if the system cannot do that."""
        try:
            return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except (OSError, AttributeError):
            return None

    def write_pages(self, descriptor: int, parts: Sequence[bytes | memoryview], offset: int, path: Path) -> int:
        """Write `parts` in order, then zeros up to the next page boundary; returns the bytes written.

        `offset` must be a multiple of `PAGE_BYTES`. Not durable before `sync`. With a descriptor of `open_unbuffered`
        the data does not enter the page cache. For data that is not soon read again that is much cheaper: a new cache
        page for each 4 KiB costs far more than the write (ten times as much in virtual machines).
        """
        with self.errors(path), self._scratch_lock:
            self.before("write", path)
            if self._scratch is None:
                self._scratch = mmap.mmap(-1, _SCRATCH_BYTES)  # page-aligned, as O_DIRECT requires
            scratch = memoryview(self._scratch)
            written = filled = 0
            for part in parts:
                view = memoryview(part)
                while view:
                    some = view[: len(scratch) - filled]
                    scratch[filled : filled + len(some)] = some
                    view, filled = view[len(some) :], filled + len(some)
                    if filled == len(scratch):
                        written += _write_all(descriptor, scratch, offset + written)
                        filled = 0
            if filled:
                whole = -(-filled // PAGE_BYTES) * PAGE_BYTES
                scratch[filled:whole] = bytes(whole - filled)
                written += _write_all(descriptor, scratch[:whole], offset + written)
            return written

    def write_file(self, path: Path, parts: Iterable[bytes | memoryview | int]) -> None:
        """Create a file with `parts`, around the page cache where that is possible, and sync it. A part that is an int
        is that many zeros; their whole pages are left as holes. Raises `DiskFull`."""
        with self.errors(path):
            self.before("write", path)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
            writer = PageWriter(self, path, descriptor)
            try:
                nbytes = writer.write_stream(parts)
                os.ftruncate(descriptor, nbytes)
                self.sync(descriptor, path)
            finally:
                writer.close()

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with its contents, if it exists."""
        self.before("remove", path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def remove_unfinished(self, folder: Path) -> None:
        """Remove the unfinished files and folders that a crash left in `folder`."""
        for path in folder.iterdir():
            if path.name.endswith(TEMPORARY):
                self.remove(path)

    @contextmanager
    def errors(self, path: Path) -> Iterator[None]:
        """Turn errors of a full, read-only or failing disk into a `UsageError` that says what to do."""
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise DiskFull(
                    f"The disk that holds {path.parent} is full. Free some space, or point SWARM_HOME at a "
                    "larger disk, then start again: nothing is damaged."
                ) from error
            if error.errno in _FAILED:
                raise UsageError(
                    f"The disk that holds {path.parent} has failed ({error.strerror}). What was written before is "
                    "proven at the next start; if it fails again, point SWARM_HOME at another disk."
                ) from error
            if error.errno in _REFUSED:
                raise UsageError(
                    f"Cannot write {path}: {error.strerror}. Point SWARM_HOME at a folder you own."
                ) from error
            raise


class PageWriter:
    """Writes to an open file: whole pages around the page cache if the file system can do that, all else through it.

    Any number of threads may write. It owns the descriptor.
    """

    def __init__(self, disk: Disk, path: Path, descriptor: int) -> None:
        self._disk, self._path, self._buffered = disk, path, descriptor
        self._unbuffered = disk.open_unbuffered(path)
        self._refused = False
        """Whether the file system opens files with O_DIRECT but cannot write them."""

    def write_at(self, parts: Sequence[bytes | memoryview], offset: int) -> None:
        """Write all of `parts` in order, from `offset` on. Not durable before `sync`. Raises `DiskFull`."""
        if offset % PAGE_BYTES or sum(map(len, parts)) % PAGE_BYTES:
            self._disk.write_parts_at(self._buffered, parts, offset, self._path)
        else:
            self.write_pages(parts, offset)

    def write_pages(self, parts: Sequence[bytes | memoryview], offset: int) -> None:
        """Write `parts` in order, then zeros up to the next page boundary. `offset`: of a page."""
        self._around_cache(lambda descriptor: self._disk.write_pages(descriptor, parts, offset, self._path))

    def write_stream(self, parts: Iterable[bytes | memoryview | int]) -> int:
        """Write `parts` from the start of the file on, then zeros up to the next page boundary; returns the bytes of
        `parts`. A part that is an int is that many zeros; their whole pages are left out."""
        buffer = memoryview(mmap.mmap(-1, _SCRATCH_BYTES))
        filled = written = 0

        def write(size: int) -> None:
            self._around_cache(lambda descriptor: self._disk.write_at(descriptor, buffer[:size], written, self._path))

        for part in parts:
            if isinstance(part, int):
                padding = min(part, -filled % PAGE_BYTES)
                buffer[filled : filled + padding] = bytes(padding)
                filled += padding
                if not (hole := (part - padding) // PAGE_BYTES * PAGE_BYTES):
                    view = memoryview(bytes(part - padding))
                else:
                    if filled:
                        write(filled)
                    written, filled = written + filled + hole, 0
                    view = memoryview(bytes(part - padding - hole))
            else:
                view = memoryview(part)
            while view:
                some = view[: len(buffer) - filled]
                buffer[filled : filled + len(some)] = some
                view, filled = view[len(some) :], filled + len(some)
                if filled == len(buffer):
                    write(filled)
                    written, filled = written + filled, 0
        if filled:
            whole = -(-filled // PAGE_BYTES) * PAGE_BYTES
            buffer[filled:whole] = bytes(whole - filled)
            write(whole)
        return written + filled

    def _around_cache(self, write: Callable[[int], object]) -> None:
        """Call `write` with the descriptor to write whole pages to."""
        if self._unbuffered is not None and not self._refused:
            try:
                write(self._unbuffered)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            self._refused = True
        write(self._buffered)

    def sync(self) -> None:
        """Make everything written durable. Raises `DiskFull`."""
        self._disk.sync(self._buffered, self._path)

    def close(self) -> None:
        os.close(self._buffered)
        if self._unbuffered is not None:
            os.close(self._unbuffered)


def _private(path: str, flags: int) -> int:
    """An opener for `open`: new files are readable only by their owner."""
    return os.open(path, flags, FILE_MODE)


def _write_all(descriptor: int, view: memoryview, offset: int) -> int:
    """Write all of `view` at `offset`; returns its length."""
    written = 0
    while written < len(view):
        written += os.pwrite(descriptor, view[written:], offset + written)
    return written
