"""Bytes from one process to another through shared memory, so that a socket carries only where they lie.

    u64 taken | padding to a page | `size` bytes, used over and over

The writer makes the memory and passes its descriptor once. A place is a count of bytes since the start: place p lies at
p modulo `size`, and no record crosses the end. The writer tells the reader the place of each record by a message; the
reader copies the record, and moves `taken` past it to give the room back. The memory cannot shrink (it is sealed), so a
writer that dies, or lies, cannot make the reader fault; the reader checks every place before it uses it.
"""

import fcntl
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from codec import shared
from codec.errors import PeerError

__all__ = ["MAX_RING_BYTES", "RingReader", "RingWriter"]

MAX_RING_BYTES: Final = 64 << 20
"""A reader maps no larger ring."""
_PAGE: Final = 4096
_ALIGNED: Final = 8
"""Records begin at multiples of this, so that numbers in them can be read in place."""

Part = bytes | memoryview


class RingWriter:
    """The end that writes. `fd`: the memory, for the reader; None on systems without memfds, where no ring works."""

    def __init__(self, size: int) -> None:
        """Raises `UsageError` if there is too little memory."""
        assert 0 < size <= MAX_RING_BYTES
        assert size % _ALIGNED == 0
        self.size = size
        self.fd, self._memory = shared.reserve("swarm-ring", _PAGE + size)
        if self.fd is not None:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._taken = np.frombuffer(self._memory, np.uint64, 1)
        self._end = 0

    def put(self, parts: Sequence[Part]) -> int | None:
        """Write a record: the place at which it begins; None while the reader has not given back enough room.

        A record may have half of `size` at most.
        """
        length = sum(map(len, parts))
        assert 2 * length <= self.size
        at = self._end
        if at % self.size + length > self.size:
            at += self.size - at % self.size
        end = at + -(-length // _ALIGNED) * _ALIGNED
        if end - int(self._taken[0]) > self.size:
            return None
        offset = _PAGE + at % self.size
        for part in parts:
            self._memory[offset : offset + len(part)] = part
            offset += len(part)
        self._end = end
        return at

    def close(self) -> None:
        """Release the memory, unless the reader still has it."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class RingReader:
    """The end that reads: maps a ring that a `RingWriter` of another process made."""

    def __init__(self, fd: int, size: int) -> None:
        """Does not take ownership of `fd`. Raises `PeerError` when it is no sealed memory of that size."""
        if sys.platform != "linux" or not 0 < size <= MAX_RING_BYTES or size % _ALIGNED:
            raise PeerError(f"ring: {size} bytes")
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(fd).st_size != _PAGE + size:
                raise PeerError("ring: the memory is not sealed, or of another size")
            self._memory: Any = mmap.mmap(fd, _PAGE + size)
        except OSError as error:
            raise PeerError(f"ring: {error.strerror}") from error
        self._size = size
        self._taken = np.frombuffer(self._memory, np.uint64, 1)

    def copy(self, at: int, length: int) -> bytes:
        """A copy of the record at place `at`. Raises `PeerError` when it does not lie within the ring."""
        offset = at % self._size
        if at % _ALIGNED or offset + length > self._size:
            raise PeerError(f"ring: {length} bytes at {at}")
        return self._memory[_PAGE + offset : _PAGE + offset + length]

    def give_back(self, end: int) -> None:
        """Everything before place `end` was copied: the writer may use its room again."""
        self._taken[0] = -(-end // _ALIGNED) * _ALIGNED
