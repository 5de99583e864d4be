"""Shared memory that the driver passes on: mapped for reading only, after a check of its seals."""

import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

__all__ = ["Unsealed", "map_scratch", "map_sealed"]

_F_SEAL_FUTURE_WRITE = 0x10
"""linux/fcntl.h; Python names it from 3.13 on."""


class Unsealed(Exception):
    """The memory could still change its size, or be written by a receiver."""


def map_sealed(fd: int) -> NDArray[np.uint8]:
    """All of the memory, read-only. Takes over `fd`. Raises `Unsealed` for a memfd without seals, or a file open for
    writing.

    Only the owner may write a replica, through the map that it made before it sealed the memory. No receiver of the
    descriptor may.
    """
    try:
        try:
            have = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:  # a file, which is shared by a descriptor that can only read
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                raise Unsealed("the replica's file came with a descriptor that can write") from None
        else:
            sized = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            if have & sized != sized or not have & (fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE):
                raise Unsealed(f"shared memory came with the seals {have:#x}: its size or its bits could be changed")
        return np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), np.uint8)
    finally:
        os.close(fd)


def map_scratch(fd: int) -> NDArray[np.uint8]:
    """All of the memory, for writing. Takes over `fd`."""
    try:
        return np.frombuffer(mmap.mmap(fd, 0), np.uint8)
    finally:
        os.close(fd)
