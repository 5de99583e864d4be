"""What one rank has found of a version that it sends: the hashes of its blocks, and the root of these hashes."""

import numpy as np
from numpy.typing import NDArray

from codec import BlockDelta, state_root
from node.trainers.connection.link import Link
from node.trainers.messages import PublishOpened

__all__ = ["Attempt", "runs_of"]


class Attempt:
    """One try at one version, against the replica as `link` has it.

    `hashes`: uint8 (n_blocks, 32), the parent's, and the version's for the blocks that were found changed. `changed`:
    elements whose bits differ. `ended`: the seed was sent everything, so it may have sealed the version although this
    rank did not hear of it.
    """

    def __init__(self, blocks: NDArray[np.int64], opened: PublishOpened, link: Link) -> None:
        """`blocks`: those that this rank encodes, ascending."""
        self._blocks = blocks
        self._name = opened.epoch, opened.version
        self._layout_hash = link.replica.layout.hash
        self.runs = runs_of(blocks)
        self.hashes = link.hashes.copy()
        self.changed = 0
        self.ended = False

    @property
    def unheard(self) -> tuple[int, int] | None:
        """(epoch, version), once the seed may have sealed it although this rank did not hear of it."""
        return self._name if self.ended else None

    def add_delta(self, delta: BlockDelta, changed: int) -> None:
        """A block differs from the replica in `changed` elements."""
        self.hashes[delta.block] = np.frombuffer(delta.new_hash, np.uint8)
        self.changed += changed

    @property
    def root(self) -> bytes:
        """The root over the hashes of this rank's blocks. For a rank that has all blocks, the version's root."""
        return state_root(self._layout_hash, self.hashes[self._blocks])

    def sealed_by(self, link: Link) -> bool:
        """Whether the seed, found again by `link`, has sealed this very version, and none of this part since. Trainers
        of other parts may have published meanwhile."""
        epoch, version = self._name
        if link.unheard is None or link.epoch != epoch or link.version < version:
            return False
        return bool(np.array_equal(link.hashes[self._blocks], self.hashes[self._blocks]))


def runs_of(numbers: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as (first, count) of each run of consecutive ones."""
    if not numbers.size:
        return ()
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    lengths = np.diff(np.append(starts, numbers.size))
    return tuple((int(numbers[at]), int(length)) for at, length in zip(starts, lengths, strict=True))
