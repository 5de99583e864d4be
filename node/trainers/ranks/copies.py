"""Two versions' bits in shared memory, and the counters by which the ranks of one trainer agree on them.

Each rank writes only its own part of a copy, and reads beyond that only the border blocks that it encodes; pages that
no rank writes take no memory. Each counter is written by one rank, and the others poll it with a deadline. So no rank
enters a collective for the swarm, and the trainer's own collectives are never disturbed. Publishes are numbered from 1.

    written[slot, rank, tensor]   number of the publish whose bits of the tensor the rank has written
    finished[slot, rank]          number of the publish that the rank has copied; negative when its copy failed
    sent[slot, rank]              number of the publish of which the rank has sent the seed all blocks that it encodes
    decided[publish % KEPT]       by rank 0: (publish, slot or BUSY or DOWN, publish that it replaces or 0)
"""

import mmap
import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec import Layout, shared
from codec.bits import Bits
from codec.errors import UsageError
from codec.layout import TensorSpec
from node.settings import memory_plan
from node.settings.memory import free_bytes
from node.trainers.errors import PublishFailed
from node.trainers.ranks.peers import named

__all__ = ["BUSY", "DOWN", "LOOK_S", "SLOTS", "Copies", "Decision"]

SLOTS: Final = 2
"""Copies in memory. At most two versions are not sealed: one being encoded, one waiting."""
BUSY: Final = -1
"""A decision: no copy became free in time, so the publish is refused."""
DOWN: Final = -2
"""A decision: there is no seed, so the publish is refused."""
KEPT: Final = 64
"""Decisions remembered. A rank that is this many publishes behind has run into its deadline before."""
LOOK_S: Final = 0.001
"""How often a rank that waits for another's counter reads it."""
_PAGE: Final = 4096
"""Bytes of a memory page: copies begin at page borders, so that ranks do not share the pages between them."""


class Decision(NamedTuple):
    """What rank 0 decided on a publish. `slot`: the copy that it goes into, or `BUSY` or `DOWN`. `replaces`: the number
    of the waiting publish that it takes the place of (0: none)."""

    slot: int
    replaces: int


class Copies:
    """The memory that the ranks share; see the module. `fd`: its memfd, or None on a system without memfds."""

    def __init__(self, layout: Layout, world: int, fd: int | None, memory: Any) -> None:
        self.layout = layout
        self.world = world
        self.fd = fd
        tensors = len(layout.tensors)
        buffer = np.frombuffer(memory, np.uint8)
        counters = buffer[: _control_bytes(layout, world)].view(np.int64)
        decided, finished = 3 * KEPT, SLOTS * world
        self._decided = counters[:decided].reshape(KEPT, 3)
        self._finished = counters[decided : decided + finished].reshape(SLOTS, world)
        self._sent = counters[decided + finished : decided + 2 * finished].reshape(SLOTS, world)
        ends = decided + 2 * finished + SLOTS * world * tensors
        self._written = counters[decided + 2 * finished : ends].reshape(SLOTS, world, tensors)
        start = _control_bytes(layout, world)
        stride = _slot_bytes(layout)
        self._slots = [buffer[start + i * stride : start + i * stride + layout.nbytes] for i in range(SLOTS)]

    @classmethod
    def create(cls, layout: Layout, world: int) -> "Copies":
        """Reserve the memory; called by rank 0. Raises `UsageError` when there is not enough."""
        plan = memory_plan.publisher(layout.nbytes, SLOTS)
        memory_plan.require(plan, free_bytes(), "free some memory, or train on a machine with more")
        return cls(layout, world, *shared.reserve("swarm-copies", _total_bytes(layout, world)))

    @classmethod
    def open(cls, layout: Layout, world: int, owner: tuple[int, int]) -> "Copies":
        """Map rank 0's memory; called by the other ranks. `owner`: process id and descriptor of rank 0.

        Raises `UsageError` when this process may not open it.
        """
        try:
            fd = os.open("/proc/{}/fd/{}".format(*owner), os.O_RDWR | os.O_CLOEXEC)
            return cls(layout, world, fd, mmap.mmap(fd, _total_bytes(layout, world)))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"This rank cannot share memory with rank 0 ({error}). Run all ranks as one user, in one container."
            ) from error

    # ------------------------------------------------------------ bits

    def tensor(self, slot: int, spec: TensorSpec) -> NDArray[np.uint8]:
        """The bytes of a tensor in a copy, flat and writable."""
        offset = self.layout.offset(spec.name)
        return self._slots[slot][offset : offset + spec.nbytes]

    def block(self, slot: int, block: int) -> Bits:
        """The elements of a block in a copy, flat, as unsigned integers."""
        spec = self.layout.block(block)
        return self._slots[slot][spec.offset : spec.offset + spec.nbytes].view(spec.dtype.bits)

    # ------------------------------------------------------------ how far the copying is

    def note_written(self, slot: int, rank: int, publish: int, tensors: int | slice | NDArray[np.int64]) -> None:
        """`rank` has written its part of these tensors. `tensors`: their indices in the layout."""
        self._written[slot, rank, tensors] = publish

    def note_copied(self, slot: int, rank: int, publish: int, *, failed: bool = False) -> None:
        """`rank` has written all of its part; `failed`: it cannot."""
        self._finished[slot, rank] = -publish if failed else publish

    def note_sent(self, slot: int, rank: int, publish: int) -> None:
        """`rank` has sent the seed every block that it encodes."""
        self._sent[slot, rank] = publish

    def uncopied(self, slot: int, publish: int) -> list[int]:
        """Ranks that have not copied all of their part yet."""
        return np.flatnonzero(self._finished[slot] != publish).tolist()

    def unsent(self, slot: int, publish: int) -> list[int]:
        """Ranks that have not sent the seed all of their blocks yet."""
        return np.flatnonzero(self._sent[slot] != publish).tolist()

    def unwritten(self, slot: int, publish: int, ranks: Sequence[int], tensor: int) -> list[int]:
        """Those of `ranks` that have not written their part of a tensor yet. `tensor`: its index in the layout."""
        return [rank for rank in ranks if self._written[slot, rank, tensor] != publish]

    def written(self, slot: int, publish: int, ranks: Sequence[int], tensor: int) -> bool:
        """Whether all of `ranks` have written their part of a tensor. Raises `PublishFailed` when a rank cannot."""
        self.check(slot, publish)
        return not self.unwritten(slot, publish, ranks, tensor)

    def begun(self, slot: int, publish: int, rank: int) -> bool:
        """Whether `rank` has written the first of its tensors. Raises `PublishFailed` when a rank cannot."""
        self.check(slot, publish)
        return self._finished[slot, rank] == publish or bool((self._written[slot, rank] == publish).any())

    def check(self, slot: int, publish: int) -> None:
        """Raises `PublishFailed` when a rank could not write its part."""
        failed = np.flatnonzero(self._finished[slot] == -publish)
        if failed.size:
            subject = named(failed.tolist(), self.world).capitalize()
            raise PublishFailed(f"{subject} could not copy its weights; nothing was published.")

    # ------------------------------------------------------------ what rank 0 decides

    def decide(self, publish: int, decision: Decision) -> None:
        """Write rank 0's decision on a publish, for the other ranks."""
        row = self._decided[publish % KEPT]
        row[1:] = decision
        row[0] = publish  # last, so that a rank that reads it also reads the decision

    def decision(self, publish: int) -> Decision | None:
        """Rank 0's decision on a publish; None while there is none."""
        row = self._decided[publish % KEPT]
        return Decision(int(row[1]), int(row[2])) if row[0] == publish else None


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _control_bytes(layout: Layout, world: int) -> int:
    return _pages(8 * (3 * KEPT + SLOTS * world * (2 + len(layout.tensors))))


def _slot_bytes(layout: Layout) -> int:
    return _pages(layout.nbytes)


def _total_bytes(layout: Layout, world: int) -> int:
    return _control_bytes(layout, world) + SLOTS * _slot_bytes(layout)
