"""What one rank has found of a version so far: the hashes that its blocks will have, and what they add up to."""

import numpy as np
from numpy.typing import NDArray

from codec import BlockDelta, state_root
from node.trainers.connection.link import Link
from node.trainers.messages import PublishOpened

__all__ = ["Attempt", "runs_of"]


class Attempt:
    """`ended`: the seed was told that this was all, so it may have sealed the version without our hearing of it."""

    def __init__(self, blocks: NDArray[np.int64]) -> None:
        """`blocks`: those that this rank encodes, ascending."""
        self._blocks = blocks
        self.runs = runs_of(blocks)
        self.ended = False

    def begin(self, opened: PublishOpened, link: Link) -> None:
        """(Again): against the replica as it is now."""
        self._name = opened.epoch, opened.version
        self._layout_hash = link.replica.layout.hash
        self.hashes = link.hashes.copy()
        self.changed = 0
        self.ended = False

    def note(self, delta: BlockDelta, changed: int) -> None:
        """A block that differs in so many elements."""
        self.hashes[delta.block] = np.frombuffer(delta.new_hash, np.uint8)
        self.changed += changed

    @property
    def root(self) -> bytes:
        """What the hashes of our blocks add up to; for a rank that has all of them, the version's root."""
        return state_root(self._layout_hash, self.hashes[self._blocks])

    def stands_in(self, link: Link) -> bool:
        """Whether the seed, found again, has sealed this very version."""
        if not self.ended or (link.epoch, link.version) != self._name:
            return False
        return bool(np.array_equal(link.hashes[self._blocks], self.hashes[self._blocks]))


def runs_of(numbers: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as (first, how many)."""
    if not numbers.size:
        return ()
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    lengths = np.diff(np.append(starts, numbers.size))
    return tuple((int(numbers[at]), int(length)) for at, length in zip(starts, lengths, strict=True))
