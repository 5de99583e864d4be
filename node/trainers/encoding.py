"""Diff and code the blocks that are ours, by several threads, in order, each as soon as its bits are there."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from codec import BlockDelta, Replica
from node.trainers.copies import Copies, await_true
from node.trainers.shares import Shares

__all__ = ["deltas"]

COPIED_WITHIN_S: Final = 300.0
"""Another rank copies its weights as fast as this one does; one that takes so much longer is stuck."""

Found = tuple[BlockDelta, int]


def deltas(
    replica: Replica,
    copies: Copies,
    shares: Shares,
    blocks: NDArray[np.int64],
    slot: int,
    publish: int,
    pool: ThreadPoolExecutor,
    ahead: int,
    coder: int,
) -> Iterator[Found]:
    """(delta, elements changed) of each of `blocks` that differs from the replica. `ahead`: blocks begun at a time.
    `coder`: of `codec.chunk`.

    Waits for the bits of a block until every rank that has some of it has written them. Raises `SwarmTimeout` when that
    takes too long, `PublishFailed` when a rank cannot.
    """
    deadline = time.monotonic() + COPIED_WITHIN_S

    def encode(block: int) -> Found | None:
        new = copies.block(slot, block)
        delta = replica.encode_block(block, new, coder)
        return None if delta is None else (delta, int(np.count_nonzero(replica.block(block) != new)))

    def await_bits(block: int) -> None:
        ranks, tensor = shares.touching(block), replica.layout.block(block).tensor
        await_true(
            lambda: copies.written(slot, publish, ranks, tensor), deadline, "A rank did not copy its weights in time."
        )

    running: deque[Future[Found | None]] = deque()
    left = iter(blocks.tolist())
    try:
        while True:
            while len(running) < ahead and (block := next(left, None)) is not None:
                await_bits(block)
                running.append(pool.submit(encode, block))
            if not running:
                return
            if (found := running.popleft().result()) is not None:
                yield found
    finally:
        for future in running:
            future.cancel()
