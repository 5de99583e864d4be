"""Memory that other processes can map read-only: sealed memfds.

`/dev/shm` is not used, because containers limit it to 64 MB. Systems without memfds (all but Linux) get anonymous
memory, which only one process can use.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
from pathlib import Path
from typing import Final

from codec.errors import UsageError

__all__ = [
    "map_file",
    "map_readonly",
    "no_room",
    "no_sharing",
    "populate",
    "punch",
    "reopen_readonly",
    "reserve",
    "seal_for_readers",
    "seal_forever",
    "seal_size",
    "unmap",
]

_MADV_POPULATE_READ: Final = 22
"""From linux/mman.h; the `mmap` module lacks it."""
_F_SEAL_FUTURE_WRITE: Final = 0x10
"""From linux/fcntl.h; the `fcntl` module has it from Python 3.13 on. Existing maps can still write, new ones cannot."""

_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2
"""From linux/falloc.h."""


def reserve(name: str, nbytes: int) -> tuple[int | None, mmap.mmap]:
    """(descriptor, writable map) of `nbytes` zeros; the descriptor is None on systems without memfds.

    Raises `UsageError` if there is too little memory.
    """
    nbytes = max(nbytes, 1)
    fd = None
    try:
        if sys.platform != "linux":
            return None, mmap.mmap(-1, nbytes)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        return fd, mmap.mmap(fd, nbytes)
    except (OSError, MemoryError) as error:
        if fd is not None:
            os.close(fd)
        raise UsageError(
            f"Cannot get {nbytes / 1e9:.1f} GB of memory for {name}. Free some memory, or use a machine with more."
        ) from error


def map_file(path: Path, nbytes: int) -> tuple[int, mmap.mmap]:
    """As `reserve`, for a file instead of memory; an existing file keeps its bytes.

    The file's blocks are allocated here, so that a full disk raises `UsageError` here and does not crash a later write.
    """
    fd = None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(fd, 0, max(nbytes, 1))
        os.ftruncate(fd, max(nbytes, 1))
        return fd, mmap.mmap(fd, max(nbytes, 1))
    except OSError as error:
        if fd is not None:
            os.close(fd)
        raise no_room(nbytes, path, error) from error


def no_room(nbytes: int, path: Path | None, error: OSError) -> UsageError:
    """The error to raise when a file cannot be kept."""
    return UsageError(f"Cannot keep {nbytes / 1e9:.1f} GB at {path}: {error.strerror}.")


def _add_seals(fd: int, seals: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def seal_for_readers(fd: int) -> None:
    """Fix the size, and make every new map read-only; existing maps can still write. Needs Linux 5.1."""
    have = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
    if have & wanted != wanted:
        _add_seals(fd, wanted)


def seal_forever(fd: int) -> None:
    """Make the memfd immutable. Every writable map must be closed before."""
    _add_seals(fd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)


def map_readonly(fd: int) -> mmap.mmap:
    """A read-only map of the whole file."""
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)


def populate(memory: mmap.mmap, start: int, size: int) -> None:
    """Map these pages of shared memory for reading, in one system call instead of a fault for every few. `start`,
    `size`: whole pages. No effect before Linux 5.14."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            memory.madvise(_MADV_POPULATE_READ, start, size)


def unmap(memory: mmap.mmap, start: int, size: int) -> None:
    """Take these pages of shared memory out of this process; they are kept, and mapped again when they are read."""
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_DONTNEED, start, size)


def seal_size(fd: int) -> None:
    """Fix the size of a memfd. Unlike after `seal_for_readers`, `punch` still works."""
    _add_seals(fd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def reopen_readonly(fd: int) -> int:
    """Another descriptor of the same memory, which can be mapped for reading only. Raises `OSError` without `/proc`."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def punch(fd: int, nbytes: int, start: int = 0) -> bool:
    """Give the disk blocks or memory pages of `nbytes` from `start` on back, and keep the file's size: processes that
    have mapped it read zeros. False where the system cannot, or `seal_for_readers` forbids it."""
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    except (OSError, AttributeError):
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, start, nbytes) == 0


def no_sharing() -> UsageError:
    """The error to raise on systems without memfds."""
    return UsageError("This system has no memfds, so the engine cannot share memory with the swarm; use Linux.")
