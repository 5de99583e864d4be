"""Diffs and codes this rank's blocks, in several threads and in order, each as soon as its bits are copied."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Final, NamedTuple, Protocol

from codec import Layout, Replica
from codec.bits import DTYPES, Bits
from codec.rice import bits_at
from codec.staging import EncodedBlock, warm_up
from node.trainers.errors import SwarmTimeout
from node.trainers.ranks.copies import LOOK_S, Copies
from node.trainers.ranks.ownership import Ownership
from node.trainers.ranks.peers import have, named

__all__ = ["COPIED_WITHIN_S", "BlockSource", "Encoder", "FoundBlock", "not_published"]

COPIED_WITHIN_S: Final = 300.0
"""How long to wait for another rank's copy. It copies as fast as this one; a rank that takes this long is stuck."""
LOOK_EVERY_S: Final = 0.1
"""How often a rank that waits for another's bits checks whether the version is still wanted."""

LISTED_SHARE: Final = 0.25
"""Share of a block's elements up to which its changes are listed for the seed: a longer list costs more memory than it
saves time."""


class BlockSource(Protocol):
    """The new bits of a version that are read where they are, not copied first."""

    def block(self, block: int) -> Bits:
        """A block's elements, flat, in the base's dtype. They are valid until the same thread asks again."""
        ...

    def check_unchanged(self) -> None:
        """Called after the last block. Raises `UsageError` when the bits may have changed while they were read."""
        ...


class FoundBlock(NamedTuple):
    """A block that differs from the replica. `bits`: the new bits at the changed positions; None: not listed."""

    encoded: EncodedBlock
    bits: Bits | None


class Encoder:
    """One rank's encoder threads. `blocks`: int64, those that it encodes, ascending."""

    def __init__(self, copies: Copies, ownership: Ownership, rank: int, threads: int, layout: Layout) -> None:
        self._copies, self._ownership = copies, ownership
        self.blocks = ownership.blocks_of(rank)
        self._ahead = 2 * threads
        self._pool = ThreadPoolExecutor(threads, "swarm-encode")
        self._warm = self._pool.submit(_load_kernels, sorted({spec.dtype for spec in layout.tensors}))

    def await_ready(self) -> None:
        """Wait until the kernels are loaded, usually a quarter of a second after the start.

        A version that is begun before would keep every node waiting for that long.
        """
        self._warm.result()

    def deltas(
        self,
        replica: Replica,
        slot: int,
        publish: int,
        coder: int,
        still_wanted: Callable[[Sequence[int]], None] = lambda ranks: None,
        what: str = "this version",
        source: BlockSource | None = None,
        kept: range = range(0),
    ) -> Iterator[FoundBlock]:
        """Each of this rank's blocks that differs from the replica, in order.

        `slot`, `publish`: which copy, and the number of the publish that is in it. `coder`: of `codec.chunk`. `what`:
        the version in words, for errors. `source`: has the new bits, instead of the copy. `kept`: blocks that stay as
        they are. Waits for a block until every
        rank that writes some of it has done so. While it waits, it calls `still_wanted(ranks)` with the ranks that have
        not, which raises when waiting is useless.

        Raises `SwarmTimeout` after `COPIED_WITHIN_S`, `PublishFailed` when a rank cannot copy its weights.
        """
        deadline, layout = time.monotonic() + COPIED_WITHIN_S, replica.layout

        def encode(block: int) -> FoundBlock | None:
            new = self._copies.block(slot, block) if source is None else source.block(block)
            with replica.visiting(block) if source is not None else nullcontext():
                encoded = replica.encode_changes(block, new, coder)
            if encoded is None:
                return None
            positions = encoded.positions
            if positions is None or positions.size > LISTED_SHARE * new.size:
                return FoundBlock(encoded, None)
            return FoundBlock(encoded, bits_at(new, positions, layout.block(block).dtype))

        running: deque[Future[FoundBlock | None]] = deque()
        left = iter([block for block in self.blocks.tolist() if block not in kept])
        try:
            while True:
                while len(running) < self._ahead and (block := next(left, None)) is not None:
                    tensor = replica.layout.block(block).tensor
                    self._await_bits(slot, publish, block, tensor, deadline, still_wanted, what)
                    running.append(self._pool.submit(encode, block))
                if not running:
                    return
                if (found := running.popleft().result()) is not None:
                    yield found
        finally:
            for future in running:
                future.cancel()

    def close(self) -> None:
        """Stop the threads, without waiting for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _await_bits(
        self,
        slot: int,
        publish: int,
        block: int,
        tensor: int,
        deadline: float,
        still_wanted: Callable[[Sequence[int]], None],
        what: str,
    ) -> None:
        ranks = self._ownership.touching(block)
        look_at = time.monotonic() + LOOK_EVERY_S
        while not self._copies.written(slot, publish, ranks, tensor):
            now = time.monotonic()
            if now >= look_at:
                late = self._copies.unwritten(slot, publish, ranks, tensor)
                if now >= deadline and late:
                    raise SwarmTimeout(not_published(late, self._ownership.world, what))
                still_wanted(late)
                look_at = now + LOOK_EVERY_S
            time.sleep(LOOK_S)


def not_published(ranks: Sequence[int], world: int, what: str) -> str:
    """The error text of a wait for the weights of `ranks`."""
    return (
        f"{named(ranks, world).capitalize()} {have(ranks)} not published {what} within {COPIED_WITHIN_S:.0f} s of this "
        "rank. Every rank must publish each step."
    )


def _load_kernels(dtypes: Sequence[str]) -> None:
    for name in dtypes:
        warm_up(DTYPES[name])
