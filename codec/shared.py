"""Memory that other processes may map: memfds, sealed so that whoever receives one can only read it.

Not `/dev/shm`, which containers keep at 64 MB. Where there is no memfd (not Linux), anonymous memory does for one
process.
"""

import fcntl
import mmap
import os
import sys
from pathlib import Path
from typing import Final

from codec.errors import UsageError

__all__ = ["map_file", "map_readonly", "no_sharing", "reserve", "seal_for_readers", "seal_forever"]

_F_SEAL_FUTURE_WRITE: Final = 0x10
"""linux/fcntl.h; Python names it from 3.13 on. Maps made before keep writing; no new ones can."""


def reserve(name: str, nbytes: int) -> tuple[int | None, mmap.mmap]:
    """(descriptor, writable map) of `nbytes` zeros; the descriptor is None where there are no memfds.

    Raises `UsageError` when there is not enough memory.
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
            f"Cannot get {nbytes / 1e9:.1f} GB of memory for {name}: free some, or use another box."
        ) from error


def map_file(path: Path, nbytes: int) -> tuple[int, mmap.mmap]:
    """As `reserve`, for a file instead of memory: made, or opened as it is. Its blocks are allocated, so that a full
    disk shows here (`UsageError`) and not as a crash in the middle of a write.
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
        raise UsageError(f"Cannot keep {nbytes / 1e9:.1f} GB at {path}: {error.strerror}.") from error


def _add_seals(fd: int, seals: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def seal_for_readers(fd: int) -> None:
    """The size is fixed, and no new map can write; the owner's, made before, still does. Linux 5.1 and later."""
    have = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
    if have & wanted != wanted:
        _add_seals(fd, wanted)


def seal_forever(fd: int) -> None:
    """Nobody can change it any more; every writable map must be closed before."""
    _add_seals(fd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)


def map_readonly(fd: int) -> mmap.mmap:
    """A read-only map of all of it."""
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)


def no_sharing() -> UsageError:
    """What to raise where there are no memfds to pass on."""
    return UsageError("This system has no memfds, so the engine cannot share memory with the swarm; use Linux.")
