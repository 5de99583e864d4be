"""Diff and code the blocks that are ours, by several threads, in order, each as soon as its bits are there."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np

from codec import BlockDelta, Layout, Replica
from codec.bits import DTYPES
from codec.rice import warm_up
from node.trainers.errors import SwarmTimeout
from node.trainers.ranks.copies import LOOK_S, Copies
from node.trainers.ranks.ownership import Ownership
from node.trainers.ranks.peers import have, named

__all__ = ["COPIED_WITHIN_S", "Encoder", "not_published"]

COPIED_WITHIN_S: Final = 300.0
"""Another rank copies its weights as fast as this one does; one that takes so much longer is stuck."""
LOOK_EVERY_S: Final = 0.1
"""How often a rank that waits for another's bits asks whether the version is still wanted."""

Found = tuple[BlockDelta, int]


class Encoder:
    """One rank's encoders. `blocks`: those that it encodes, ascending."""

    def __init__(self, copies: Copies, ownership: Ownership, rank: int, threads: int, layout: Layout) -> None:
        self._copies, self._ownership = copies, ownership
        self.blocks = ownership.blocks_of(rank)
        self._ahead = 2 * threads
        self._pool = ThreadPoolExecutor(threads, "swarm-encode")
        self._warm = self._pool.submit(_load_kernels, sorted({spec.dtype for spec in layout.tensors}))

    def await_ready(self) -> None:
        """Until the kernels are loaded, a quarter of a second after the start as a rule: a version that is begun before
        keeps every node waiting for that long."""
        self._warm.result()

    def deltas(
        self,
        replica: Replica,
        slot: int,
        publish: int,
        coder: int,
        still_wanted: Callable[[Sequence[int]], None] = lambda ranks: None,
        what: str = "this version",
    ) -> Iterator[Found]:
        """(delta, elements changed) of each of our blocks that differs from the replica. `coder`: of `codec.chunk`.
        `what`: the version's name in an error.

        Waits for the bits of a block until every rank that has some of it has written them; `still_wanted(ranks)` is
        told which have not, and raises when that is in vain. Raises `SwarmTimeout` when it takes too long,
        `PublishFailed` when a rank cannot.
        """
        deadline = time.monotonic() + COPIED_WITHIN_S

        def encode(block: int) -> Found | None:
            new = self._copies.block(slot, block)
            delta = replica.encode_block(block, new, coder)
            return None if delta is None else (delta, int(np.count_nonzero(replica.block(block) != new)))

        running: deque[Future[Found | None]] = deque()
        left = iter(self.blocks.tolist())
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
    """The error of a wait for the weights of `ranks`."""
    return (
        f"{named(ranks, world).capitalize()} {have(ranks)} not published {what} within {COPIED_WITHIN_S:.0f} s of this "
        "rank. Every rank must publish each step."
    )


def _load_kernels(dtypes: Sequence[str]) -> None:
    for name in dtypes:
        warm_up(DTYPES[name])
