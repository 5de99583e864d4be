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
from node.trainers.copies import Copies, await_true
from node.trainers.shares import Shares

__all__ = ["Encoder"]

COPIED_WITHIN_S: Final = 300.0
"""Another rank copies its weights as fast as this one does; one that takes so much longer is stuck."""
LOOK_EVERY_S: Final = 0.1
"""How often a rank that waits for another's bits asks whether the version is still wanted."""

Found = tuple[BlockDelta, int]


class Encoder:
    """One rank's encoders. `blocks`: those that it encodes, ascending."""

    def __init__(self, copies: Copies, shares: Shares, rank: int, threads: int, layout: Layout) -> None:
        self._copies, self._shares = copies, shares
        self.blocks = shares.blocks_of(rank)
        self._ahead = 2 * threads
        self._pool = ThreadPoolExecutor(threads, "swarm-encode")
        self._warm = self._pool.submit(_load_kernels, sorted({spec.dtype for spec in layout.tensors}))

    def await_ready(self) -> None:
        """Until the kernels are loaded, a quarter of a second after the start as a rule: a version that is begun before
        keeps every node waiting for that long."""
        self._warm.result()

    def deltas(
        self, replica: Replica, slot: int, publish: int, coder: int, still_wanted: Callable[[], None] = lambda: None
    ) -> Iterator[Found]:
        """(delta, elements changed) of each of our blocks that differs from the replica. `coder`: of `codec.chunk`.

        Waits for the bits of a block until every rank that has some of it has written them; `still_wanted()` raises
        when that is in vain. Raises `SwarmTimeout` when it takes too long, `PublishFailed` when a rank cannot.
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
                    self._await_bits(slot, publish, block, replica.layout.block(block).tensor, deadline, still_wanted)
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
        self, slot: int, publish: int, block: int, tensor: int, deadline: float, still_wanted: Callable[[], None]
    ) -> None:
        ranks = self._shares.touching(block)
        look_at = time.monotonic() + LOOK_EVERY_S

        def there() -> bool:
            nonlocal look_at
            if time.monotonic() >= look_at:
                still_wanted()
                look_at = time.monotonic() + LOOK_EVERY_S
            return self._copies.written(slot, publish, ranks, tensor)

        await_true(there, deadline, "A rank did not copy its weights in time.")


def _load_kernels(dtypes: Sequence[str]) -> None:
    for name in dtypes:
        warm_up(DTYPES[name])
