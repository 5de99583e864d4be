"""The few ways in which the store touches a disk, each of them all or nothing.

A file is written beside its place, synced, and renamed; only then does it exist. So a crash between any two steps
leaves the old file, or the new one, and perhaps a `.tmp` that the next start removes. Tests kill the process between
any two steps through `before`.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from codec.errors import UsageError

__all__ = ["TEMPORARY", "Disk", "DiskFull"]

TEMPORARY: Final = ".tmp"
"""Ends the name of whatever is not finished; removed on opening."""

_PARTS_AT_ONCE: Final = 512
"""Half of what one call takes on Linux (IOV_MAX)."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class DiskFull(UsageError):
    """The disk is full. Nothing half-written counts: free some space and start again."""


def _nothing(step: str, path: Path) -> None:
    """Where tests put their failures."""


class Disk:
    """Durable steps under one folder. `before(step, path)` is called ahead of each of them: `write`, `sync`, `rename`,
    `sync_folder`, `remove`, `commit`."""

    def __init__(self, before: Callable[[str, Path], None] = _nothing) -> None:
        self.before = before

    def write_whole(self, path: Path, data: bytes | memoryview) -> None:
        """Make `path` hold exactly `data`, durably. Raises `DiskFull`."""
        temporary = path.with_name(path.name + TEMPORARY)
        with self.errors(path):
            self.before("write", path)
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                self.before("sync", path)
                os.fsync(file.fileno())
            self.put_in_place(temporary, path)

    def put_in_place(self, temporary: Path, path: Path) -> None:
        """Rename a synced file or folder to its name, and sync the folder that holds it."""
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
            view = memoryview(data)
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written

    def write_parts_at(self, descriptor: int, parts: Sequence[bytes], offset: int, path: Path) -> None:
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

    def remove(self, path: Path) -> None:
        """Remove a file or a folder with all in it; nothing there is fine."""
        self.before("remove", path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def remove_unfinished(self, folder: Path) -> None:
        """Clear away what a crash left half-written."""
        for path in folder.iterdir():
            if path.name.endswith(TEMPORARY):
                self.remove(path)

    @contextmanager
    def errors(self, path: Path) -> Iterator[None]:
        """Say of a full or forbidden disk what the user can do about it."""
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise DiskFull(
                    f"The disk that holds {path.parent} is full. Free some space, or point SWARM_HOME at a "
                    "larger disk, then start again: nothing is damaged."
                ) from error
            if error.errno in _REFUSED:
                raise UsageError(
                    f"Cannot write {path}: {error.strerror}. Point SWARM_HOME at a folder you own."
                ) from error
            raise
