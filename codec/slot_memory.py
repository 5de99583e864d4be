"""The memory of adapters' slots, apart from the rest of a replica, so that an emptied slot gives its pages back.

A memfd that `codec.shared.seal_for_readers` has sealed gives no page back, and a replica's memory is sealed as soon as
an engine or a trainer maps it. So the slots have a memfd of their own, of which only the size is sealed, and whose
readers get a descriptor that can be mapped for reading only. Bytes have the same offsets in both memfds; each is a hole
where the other has the bits.
"""

import mmap
import os
import weakref
from typing import Final

import numpy as np
from numpy.typing import NDArray

from codec import shared
from codec.errors import UsageError
from codec.layout import Layout
from codec.parts import Kind, parts

__all__ = ["SlotMemory"]

_PAGE: Final = mmap.ALLOCATIONGRANULARITY


class SlotMemory:
    """Zeros for all slots of a layout. `span`: the offsets of their bytes in the layout. Make it with `reserve`."""

    def __init__(self, fd: int, memory: mmap.mmap, span: range) -> None:
        """`memory`: from the page in which `span` begins to its end."""
        self.fd = fd
        self.span = span
        self._readers_fd: int | None = None
        self._bytes = np.frombuffer(memory, np.uint8)
        self._first = span.start // _PAGE * _PAGE
        weakref.finalize(self, os.close, fd)

    @classmethod
    def reserve(cls, layout: Layout) -> "SlotMemory | None":
        """None for a layout without slots, and on systems without memfds. Raises `UsageError` if there is too little
        memory."""
        tensors = [i for found in parts(layout) if found.part.kind is Kind.ADAPTER for i in found.tensors]
        if not tensors:
            return None
        first, last = (layout.tensors[tensors[i]] for i in (0, -1))
        span = range(layout.offset(first.name), layout.offset(last.name) + last.nbytes)
        fd, memory = shared.reserve("swarm-adapters", span.stop)
        memory.close()
        if fd is None:
            return None
        try:
            shared.seal_size(fd)
            start = span.start // _PAGE * _PAGE
            return cls(fd, mmap.mmap(fd, span.stop - start, offset=start), span)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise UsageError(f"Cannot map {len(span) / 1e9:.1f} GB of memory for adapters: {error}.") from error

    def raw(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A writable view of bytes of the layout; all are of slots."""
        at = offset - self._first
        return self._bytes[at : at + nbytes]

    def give_back(self, offset: int, nbytes: int) -> None:
        """Give the whole pages among bytes that are zeros back to the system; they stay zeros."""
        start, end = -(-offset // _PAGE) * _PAGE, (offset + nbytes) // _PAGE * _PAGE
        if start < end:
            shared.punch(self.fd, end - start, start)

    def readers_fd(self) -> int:
        """A descriptor that other processes can map for reading only; this object keeps it. Without `/proc` it is
        sealed memory, which gives no page back. Raises `OSError` if it cannot be sealed either."""
        if self._readers_fd is None:
            try:
                self._readers_fd = shared.reopen_readonly(self.fd)
                weakref.finalize(self, os.close, self._readers_fd)
            except OSError:
                shared.seal_for_readers(self.fd)
                self._readers_fd = self.fd
        return self._readers_fd
