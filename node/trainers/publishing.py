"""Publishing without waiting: the trainer copies its weights and goes on; a thread diffs, encodes and streams them.

The thread compares the copy with the truth replica, which the seed shares as memory, block by block, and sends what
changed as it finds it: the first chunk leaves while later tensors are still being compared. The replica holds the
parent until the seed says "sealed", so one version is encoded at a time; a second may wait as a copy.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from codec import BlockDelta, Layout, Replica, state_root
from codec.errors import SwarmError
from codec.shared import map_readonly
from node.local import Channel, close_fds
from node.trainers.errors import PublishFailed, SwarmBusy, SwarmDown, SwarmTimeout
from node.trainers.messages import (
    PROTOCOL,
    Attach,
    Attached,
    Delta,
    PublishBegin,
    PublishBlocks,
    PublishEnd,
    PublishOpened,
    PublishSealed,
)
from node.trainers.seedlink import dial, expect, speaking
from node.trainers.weights import HostCopy

__all__ = ["OnBusy", "Publication", "PublishLine"]

OnBusy = Literal["wait", "coalesce"]

BATCH_BYTES: Final = 256 << 10
"""Payload sent to the seed at once: a quarter of the largest chunk, so that filling one never waits long for blocks."""
SEALED_WITHIN_S: Final = 600.0
"""A seal waits for the disk and a scatter of the trainer's replica, never for a peer."""
TAKEN_WITHIN_S: Final = 300.0
"""The seed takes blocks as fast as its store does; one that takes none for this long is stuck."""
RECONNECT_S: Final = 60.0
"""A seed that is restarted within this costs nothing but the time."""


@dataclass(eq=False)
class Publication:
    """One version on its way. Fields are None (or empty) until they are known; `wait` waits for them all.

    `bytes`: payload of its chunks. `changed`: elements whose bits differ, `density` the share of all. `seconds` by
    stage: wait (for a free copy) and copy, both in `publish`; queue (until the version before was sealed), encode
    (diff, code, hash, stream) and seal, in the background. `error`: why it was not published. `superseded`: a newer one
    took its place before it began (`on_busy="coalesce"`).
    """

    step: int
    epoch: int | None = None
    version: int | None = None
    root: bytes | None = None
    bytes: int | None = None
    changed: int | None = None
    density: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    error: SwarmError | None = None
    superseded: bool = False
    _done: threading.Event = field(default_factory=threading.Event)
    _holders: Callable[["Publication"], float] = lambda publication: 0.0

    @property
    def sealed(self) -> bool:
        """It is durable and on its way to every node."""
        return self._done.is_set() and self.error is None and not self.superseded

    def wait(self, quorum: float = 0.0, timeout_s: float = 600.0) -> "Publication":
        """Wait until it is sealed and held, verified, by this share of the live nodes (0: sealed is enough).

        Raises its `error`, or `SwarmTimeout`. A superseded one returns at once: the newer holds all it would have.
        """
        deadline = time.monotonic() + timeout_s
        if not self._done.wait(timeout_s):
            raise SwarmTimeout(f"Step {self.step} was not sealed within {timeout_s:.0f} s.")
        if self.error is not None:
            raise self.error
        while quorum > 0.0 and not self.superseded:
            held = self._holders(self)
            if held >= quorum:
                break
            if time.monotonic() >= deadline:
                raise SwarmTimeout(f"Step {self.step}: {held:.0%} of the nodes hold it after {timeout_s:.0f} s.")
            time.sleep(0.1)
        return self


class _Link:
    """One attached connection: the seed's replica as it stands, and the hash of each of its blocks."""

    def __init__(self, home: Path) -> None:
        with speaking("this trainer attached"):
            self.channel: Channel = dial(home)
            try:
                self.channel.send(Attach(PROTOCOL))
                attached, fds = expect(self.channel, Attached)
            except BaseException:
                self.channel.close()
                raise
            replica_fd, hashes_fd = fds
            try:
                layout = Layout.from_bytes(attached.layout)
                table = np.frombuffer(map_readonly(hashes_fd), np.uint8)[: 32 * layout.n_blocks]
                self.hashes: NDArray[np.uint8] = table.reshape(-1, 32).copy()
            except BaseException:
                close_fds([replica_fd])
                raise
            finally:
                close_fds([hashes_fd])
        self.replica = Replica.attach(replica_fd, layout, self.hashes)  # owns the descriptor from here on
        self.epoch, self.version, self.root = attached.epoch, attached.version, attached.root


class PublishLine:
    """At most two versions that are not sealed: one being encoded, one waiting as a copy. Called from one thread."""

    def __init__(self, home: Path, threads: int | None, holders: Callable[[Publication], float]) -> None:
        """Attach to the seed. `threads`: encoders. Raises `SwarmDown`, `UsageError`."""
        self._home = home
        self._holders = holders
        self._link = _Link(home)
        self.layout = self._link.replica.layout
        self._pool = ThreadPoolExecutor(threads or max(1, min(4, (os.cpu_count() or 2) // 2)), "swarm-encode")
        self._spare = [HostCopy(self.layout), HostCopy(self.layout)]
        self._line: queue.Queue[tuple[Publication, HostCopy, float] | None] = queue.Queue()
        self._lock = threading.Condition()
        self._closed = False
        self.last_error: SwarmError | None = None
        self._thread = threading.Thread(target=self._work, name="swarm-publish", daemon=True)
        self._thread.start()

    @property
    def head(self) -> tuple[int, int]:
        """(epoch, version) that was sealed last, as far as this process knows."""
        return self._link.epoch, self._link.version

    def publish(self, source: Any, step: int, on_busy: OnBusy, timeout_s: float) -> Publication:
        """Copy `source`; see `Swarm.publish`."""
        if self._closed:
            raise SwarmDown("This swarm was closed.")
        started = time.perf_counter()
        publication = Publication(step, _holders=self._holders)
        copy = self._take_copy(on_busy, timeout_s)
        waited = time.perf_counter()
        try:
            copy.fill(source)
        except BaseException:
            self._give_copy(copy)
            raise
        publication.seconds["wait"] = waited - started
        publication.seconds["copy"] = time.perf_counter() - waited
        self._line.put((publication, copy, time.perf_counter()))
        return publication

    def _take_copy(self, on_busy: OnBusy, timeout_s: float) -> HostCopy:
        with self._lock:
            if not self._spare and on_busy == "coalesce":
                try:
                    entry = self._line.get_nowait()
                except queue.Empty:
                    entry = None  # its turn has just come
                if entry is not None:
                    entry[0].superseded = True
                    entry[0]._done.set()
                    return entry[1]
            if not self._lock.wait_for(lambda: bool(self._spare), timeout_s):
                raise SwarmBusy(f"Two versions are not sealed yet, after waiting {timeout_s:.0f} s for one of them.")
            return self._spare.pop()

    def _give_copy(self, copy: HostCopy) -> None:
        with self._lock:
            self._spare.append(copy)
            self._lock.notify()

    def close(self, timeout_s: float) -> None:
        """Let what was published go out, then hang up. What is not sealed by then is abandoned. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._line.put(None)
        self._thread.join(timeout_s)
        self._link.channel.close()
        self._thread.join(5.0)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        while (entry := self._line.get()) is not None:
            publication, copy, queued = entry
            publication.seconds["queue"] = time.perf_counter() - queued
            try:
                self._publish_through(publication, copy)
            except SwarmError as error:
                publication.error = self.last_error = error
            except Exception as error:  # our bug: whoever waits must hear of it, not wait for ever
                publication.error = self.last_error = PublishFailed(f"Publishing failed: {error!r}")
                publication.error.__cause__ = error
            finally:
                if publication.error is not None:
                    self._link.channel.close()  # in the middle of a conversation: the next version opens a new one
                self._give_copy(copy)
                publication._done.set()

    def _publish_through(self, publication: Publication, copy: HostCopy) -> None:
        """Publish, over a new connection if the seed was restarted meanwhile."""
        deadline = time.monotonic() + RECONNECT_S
        while True:
            try:
                with speaking(f"step {publication.step} was published"):
                    self._publish(publication, copy)
                return
            except SwarmDown:
                expected, publication.root = publication.root, None
                self._reconnect(deadline)
                if expected is not None and self._link.root == expected:  # sealed; only the answer was lost
                    publication.root = expected
                    publication.epoch, publication.version = self._link.epoch, self._link.version
                    return

    def _reconnect(self, deadline: float) -> None:
        self._link.channel.close()
        while True:
            try:
                link = _Link(self._home)
                break
            except SwarmDown:
                if self._closed or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        if link.replica.layout.hash != self.layout.hash:
            raise PublishFailed("The seed was restarted with another model. Attach again.")
        self._link = link

    def _publish(self, publication: Publication, copy: HostCopy) -> None:
        link = self._link
        started = time.perf_counter()
        link.channel.send(PublishBegin(publication.step))
        opened, _ = expect(link.channel, PublishOpened)
        publication.epoch, publication.version = opened.epoch, opened.version
        hashes, changed = link.hashes.copy(), 0
        batch: list[Delta] = []
        for delta, count in self._deltas(link.replica, copy):
            hashes[delta.block] = np.frombuffer(delta.new_hash, np.uint8)
            changed += count
            batch.append(Delta(delta.block, delta.coder, delta.new_hash, delta.payload))
            if sum(len(one.payload) for one in batch) >= BATCH_BYTES:
                link.channel.send(PublishBlocks(tuple(batch)), timeout_s=TAKEN_WITHIN_S)
                batch = []
        if batch:
            link.channel.send(PublishBlocks(tuple(batch)), timeout_s=TAKEN_WITHIN_S)
        encoded = time.perf_counter()
        publication.root = root = state_root(self.layout.hash, hashes)
        link.channel.send(PublishEnd(changed, root))
        sealed, _ = expect(link.channel, PublishSealed, SEALED_WITHIN_S)
        if sealed.root != root:
            raise PublishFailed("The seed sealed another root than this trainer's.")
        link.hashes[:] = hashes
        link.epoch, link.version, link.root = opened.epoch, opened.version, root
        publication.seconds |= {"encode": encoded - started, "seal": time.perf_counter() - encoded}
        publication.bytes, publication.changed = sealed.payload_bytes, changed
        publication.density = changed / max(1, sum(tensor.elements for tensor in self.layout.tensors))

    def _deltas(self, replica: Replica, copy: HostCopy) -> Iterator[tuple[BlockDelta, int]]:
        """(delta, elements changed) of each block that differs, encoded by several threads, in order."""

        def encode(block: int) -> tuple[BlockDelta, int] | None:
            new = copy.block(block)
            delta = replica.encode_block(block, new)
            return None if delta is None else (delta, int(np.count_nonzero(replica.block(block) != new)))

        running: deque[Future[tuple[BlockDelta, int] | None]] = deque()
        blocks = iter(range(self.layout.n_blocks))
        ahead = 2 * self._pool._max_workers
        try:
            while True:
                while len(running) < ahead and (block := next(blocks, None)) is not None:
                    running.append(self._pool.submit(encode, block))
                if not running:
                    return
                if (found := running.popleft().result()) is not None:
                    yield found
        finally:
            for future in running:
                future.cancel()
