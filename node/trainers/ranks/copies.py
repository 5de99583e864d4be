"""Two versions' bits in memory that the ranks of one trainer share, and the few words that they need to agree on them.

Each rank writes only its own part and touches, beyond that, only the border blocks that it encodes: pages that nobody
writes cost nothing. The words are counters, each written by one rank and awaited with a deadline, so that no rank ever
enters a collective for the swarm's sake: the trainer's own are never disturbed.

    written[slot, rank, tensor]   the publish whose bits these are
    finished[slot, rank]          the publish that was copied (negative: whose copy failed)
    sent[slot, rank]              the publish whose blocks the seed was sent, all that this rank encodes
    decided[publish % KEPT]       by rank 0: (publish, slot or BUSY or DOWN, publish that it takes the place of)
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
from node.trainers.errors import PublishFailed
from node.trainers.ranks.peers import named

__all__ = ["BUSY", "DOWN", "LOOK_S", "SLOTS", "Copies", "Decision"]

SLOTS: Final = 2
"""At most two versions are not sealed: one being encoded, one waiting."""
BUSY: Final = -1
"""Decided: there is no room, the publish is refused."""
DOWN: Final = -2
"""Decided: there is no seed, the publish is refused."""
KEPT: Final = 64
"""Decisions remembered. A rank that is so many publishes behind has long run into its deadline."""
LOOK_S: Final = 0.001
_PAGE: Final = 4096


class Decision(NamedTuple):
    """What rank 0 made of a publish. `instead`: the waiting one that it takes the place of (0: none)."""

    slot: int
    instead: int


class Copies:
    """See the module. `fd`: what other ranks open; None where there are no memfds. Publishes count from 1."""

    def __init__(self, layout: Layout, world: int, fd: int | None, memory: Any) -> None:
        self.layout = layout
        self.world = world
        self.fd = fd
        tensors = len(layout.tensors)
        buffer = np.frombuffer(memory, np.uint8)
        words = buffer[: _control_bytes(layout, world)].view(np.int64)
        decided, finished = 3 * KEPT, SLOTS * world
        self._decided = words[:decided].reshape(KEPT, 3)
        self._finished = words[decided : decided + finished].reshape(SLOTS, world)
        self._sent = words[decided + finished : decided + 2 * finished].reshape(SLOTS, world)
        ends = decided + 2 * finished + SLOTS * world * tensors
        self._written = words[decided + 2 * finished : ends].reshape(SLOTS, world, tensors)
        start = _control_bytes(layout, world)
        room = _slot_bytes(layout)
        self._slots = [buffer[start + i * room : start + i * room + layout.nbytes] for i in range(SLOTS)]

    @classmethod
    def create(cls, layout: Layout, world: int) -> "Copies":
        """By rank 0. Raises `UsageError` when there is no memory."""
        return cls(layout, world, *shared.reserve("swarm-copies", _total_bytes(layout, world)))

    @classmethod
    def open(cls, layout: Layout, world: int, owner: tuple[int, int]) -> "Copies":
        """By the others. `owner`: process id and descriptor of rank 0. Raises `UsageError`."""
        try:
            fd = os.open("/proc/{}/fd/{}".format(*owner), os.O_RDWR | os.O_CLOEXEC)
            return cls(layout, world, fd, mmap.mmap(fd, _total_bytes(layout, world)))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"This rank cannot share memory with rank 0 ({error}). Run all ranks as one user, in one container."
            ) from error

    # ------------------------------------------------------------ bits

    def tensor(self, slot: int, spec: TensorSpec) -> NDArray[np.uint8]:
        """The bytes of a tensor, to write to."""
        offset = self.layout.offset(spec.name)
        return self._slots[slot][offset : offset + spec.nbytes]

    def block(self, slot: int, block: int) -> Bits:
        """A block's elements, flat."""
        spec = self.layout.block(block)
        return self._slots[slot][spec.offset : spec.offset + spec.nbytes].view(spec.dtype.bits)

    # ------------------------------------------------------------ how far the copying is

    def tell(self, slot: int, rank: int, publish: int, tensors: int | NDArray[np.int64]) -> None:
        """`rank` has written its part of these tensors (by number)."""
        self._written[slot, rank, tensors] = publish

    def finish(self, slot: int, rank: int, publish: int, *, failed: bool = False) -> None:
        """`rank` has written all of its part, or cannot."""
        self._finished[slot, rank] = -publish if failed else publish

    def note_sent(self, slot: int, rank: int, publish: int) -> None:
        """The seed was sent every block that `rank` encodes."""
        self._sent[slot, rank] = publish

    def uncopied(self, slot: int, publish: int) -> list[int]:
        """Ranks that have not copied their part (yet)."""
        return np.flatnonzero(self._finished[slot] != publish).tolist()

    def unsent(self, slot: int, publish: int) -> list[int]:
        """Ranks that have not sent the seed all of their blocks (yet)."""
        return np.flatnonzero(self._sent[slot] != publish).tolist()

    def unwritten(self, slot: int, publish: int, ranks: Sequence[int], tensor: int) -> list[int]:
        """Those of `ranks` that have not written their part of a tensor (yet)."""
        return [rank for rank in ranks if self._written[slot, rank, tensor] != publish]

    def written(self, slot: int, publish: int, ranks: Sequence[int], tensor: int) -> bool:
        """Whether these ranks have written their parts of a tensor. Raises `PublishFailed` when some rank cannot."""
        self.check(slot, publish)
        return not self.unwritten(slot, publish, ranks, tensor)

    def begun(self, slot: int, publish: int, rank: int) -> bool:
        """Whether `rank` has written something. Raises `PublishFailed` when some rank cannot."""
        self.check(slot, publish)
        return self._finished[slot, rank] == publish or bool((self._written[slot, rank] == publish).any())

    def check(self, slot: int, publish: int) -> None:
        """Raises `PublishFailed` when some rank could not write its part."""
        failed = np.flatnonzero(self._finished[slot] == -publish)
        if failed.size:
            who = named(failed.tolist(), self.world).capitalize()
            raise PublishFailed(f"{who} could not copy its weights; nothing was published.")

    # ------------------------------------------------------------ what rank 0 decides

    def decide(self, publish: int, decision: Decision) -> None:
        row = self._decided[publish % KEPT]
        row[1:] = decision
        row[0] = publish  # last: whoever sees it sees the rest

    def decision(self, publish: int) -> Decision | None:
        """None: there is none yet."""
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
