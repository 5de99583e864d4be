"""Sends changed blocks to the seed, several in a message: through the ring if the seed reads it, else in it."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from codec.chunk import CODER_RAW
from node.trainers.connection.link import Link
from node.trainers.errors import SwarmTimeout
from node.trainers.messages import Delta, PublishBlocks, PublishOpened, PublishShared, SharedDelta
from node.trainers.publish.encoding import FoundBlock

__all__ = ["BlockBatches"]

TAKEN_WITHIN_S: Final = 300.0
"""The seed reads blocks as fast as its store writes them. A seed that reads none for this long is stuck."""


class BlockBatches:
    """The blocks of one attempt, on their way to the seed."""

    def __init__(self, link: Link, opened: PublishOpened, still_wanted: Callable[[Sequence[int]], None]) -> None:
        """`still_wanted([])` is called while the seed is behind; it waits a moment, and raises when waiting is
        useless."""
        self._channel, self._batch_bytes, self._still_wanted = link.channel, opened.batch_bytes, still_wanted
        self._ring = link.ring if opened.ring else None
        self._deltas: list[Delta] = []
        self._shared: list[SharedDelta] = []
        self._bytes = 0

    def add(self, found: FoundBlock) -> None:
        """Queue a block; send what is queued when it fills a batch. Raises `SwarmTimeout`, and what `still_wanted`
        raises."""
        delta = found.encoded.delta
        if self._ring is None:
            self._deltas.append(Delta(delta.block, delta.coder, delta.new_hash, bytes(delta.payload)))
        else:
            shared = self._put(found)  # which may send what is queued
            self._shared.append(shared)
        self._bytes += len(delta.payload)
        if self._bytes >= self._batch_bytes:
            self.flush()

    def flush(self) -> None:
        """Send what is queued."""
        if self._deltas:
            self._channel.send(PublishBlocks(tuple(self._deltas)), timeout_s=TAKEN_WITHIN_S)
        if self._shared:
            self._channel.send(PublishShared(tuple(self._shared)), timeout_s=TAKEN_WITHIN_S)
        self._deltas, self._shared, self._bytes = [], [], 0

    def _put(self, found: FoundBlock) -> SharedDelta:
        assert self._ring is not None
        delta, positions, bits = found.encoded.delta, found.encoded.positions, found.bits
        parts: list[bytes | memoryview] = [delta.payload]
        listed = 0
        if delta.coder != CODER_RAW and positions is not None and bits is not None:
            parts = [positions.view(np.uint8).data, bits.view(np.uint8).data, delta.payload]
            listed = positions.size
        if (at := self._ring.put(parts)) is None:
            at = self._put_when_there_is_room(parts)
        return SharedDelta(delta.block, delta.coder, delta.new_hash, at, len(delta.payload), listed)

    def _put_when_there_is_room(self, parts: list[bytes | memoryview]) -> int:
        assert self._ring is not None
        self.flush()
        deadline = time.monotonic() + TAKEN_WITHIN_S
        while (at := self._ring.put(parts)) is None:
            self._still_wanted([])
            if time.monotonic() > deadline:
                raise SwarmTimeout(f"The seed has read no block for {TAKEN_WITHIN_S:.0f} s.")
        return at
