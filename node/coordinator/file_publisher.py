"""Publishes checkpoint folders and raw files in the seed's own process, when a command asks for it.

    PublishFiles (the command) --> FilePublisher.converse --> FileEncoder (worker threads) --> Publisher

The seed has the replica mapped and the coder loaded, so it saves what a process of its own would spend on both. The
threads hold the interpreter for fractions of a millisecond a block: reading, comparing, coding and hashing release it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import trio
from numpy.typing import NDArray

from codec import BlockDelta, Layout, StagedBlock, chunk_target, state_root
from codec.chunk import CODER_RAW, CODER_RICE
from codec.errors import SwarmError
from codec.part_view import PartView
from codec.parts import BASE, base_layout, draft_blocks
from codec.rice import bits_at
from node.coordinator.publisher import Attempt, Publisher
from node.coordinator.turns import Turns
from node.host.stamp import stamp
from node.ipc.async_channel import AsyncChannel
from node.ipc.channel import ChannelClosed
from node.ipc.sockets import process_named
from node.trainers.attach import default_threads
from node.trainers.file_messages import FilesEncoded, FilesOpened, FilesPublished, FilesUnread, PublishFiles
from node.trainers.publish.encoding import LISTED_SHARE
from node.trainers.publish_here import folder_blocks
from node.trainers.tensors.file_blocks import CheckpointBlocks, RawBlocks
from swarm.runtime import in_thread

__all__ = ["TURNS", "FileEncoder", "FilePublisher"]

ABANDON_WITHIN_S: Final = 10.0
"""To drop the open version."""
TURNS: Final = 32
MAX_TURN_BYTES: Final = 256 << 10
"""A thread that has coded a 32nd of the version, but no more than these bytes, interrupts its work and takes a turn of
the seed's loop, which lets the first chunks leave. With a turn for each chunk of 64 KiB, a version took a tenth more
processor time."""

Blocks = CheckpointBlocks | RawBlocks


class FilePublisher:
    """Answers `PublishFiles`. `is_ready()`: the default coder is loaded; compiling one would stop the seed for
    seconds."""

    def __init__(self, publisher: Publisher, turns: Turns, is_ready: Callable[[], bool]) -> None:
        self._publisher, self._turns = publisher, turns
        self._is_ready = is_ready

    async def converse(self, channel: AsyncChannel, asked: PublishFiles) -> None:
        """Publish the files, and tell the command at the other end. When it hangs up before everything is read, the
        version is abandoned.

        Raises `UsageError` for files that cannot be published, `Busy`, `ChannelClosed`.
        """
        path = Path(asked.path)
        is_ready = self._is_ready() and self._publisher.seed.coder() == CODER_RICE
        if not is_ready or not await in_thread(_is_as_told, path, asked):
            await channel.send(FilesUnread())
            return
        layout = base_layout(self._publisher.blocks_of(BASE).layout)
        blocks = await in_thread(_open, path, asked, layout)
        encoder = FileEncoder(self._publisher, blocks, asked.step)
        error: SwarmError | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_stop_at_hang_up, channel, encoder)
                try:
                    await self._publish(channel, encoder)
                except SwarmError as found:  # raised below, alone and not in a group
                    error = found
                nursery.cancel_scope.cancel()
        finally:
            blocks.close()
        if error is not None:
            raise error

    async def _publish(self, channel: AsyncChannel, encoder: "FileEncoder") -> None:
        began = time.perf_counter()
        turn = await self._turns.take(BASE, process_named(channel.pid))
        try:
            await self._publish_now(channel, encoder, began)
        finally:
            turn.end()

    async def _publish_now(self, channel: AsyncChannel, encoder: "FileEncoder", began: float) -> None:
        attempt = await self._publisher.begin(
            expected_bytes=encoder.blocks.nbytes, trainer_step=encoder.trainer_step or None
        )
        opened = time.perf_counter()
        try:
            await channel.send(FilesOpened(attempt.epoch, attempt.version))
            await encoder.run(attempt)
            layout = encoder.view.layout
            root = encoder.root
            elements = sum(spec.elements for spec in layout.tensors)
            encoded = time.perf_counter()
            await channel.send(FilesEncoded(self._publisher.root, encoder.changed, elements, layout.full_bytes))
            sealed = await self._publisher.end(encoder.changed, root)
        except BaseException:
            with trio.CancelScope(shield=True), trio.move_on_after(ABANDON_WITHIN_S):
                await self._publisher.abandon()
            raise
        seconds = {"queue": opened - began, "encode": encoded - opened, "seal": time.perf_counter() - encoded}
        await channel.send(FilesPublished(sealed.payload_bytes, seconds))


@dataclass(slots=True)
class FileEncoder:
    """Compares files with the base of the replica, block by block in several threads, and gives the publisher what
    differs. A draft model stays as it is.

    `changed`: elements that differ so far. `stop`: set it from any thread to end the run with `ChannelClosed`.
    """

    publisher: Publisher
    blocks: Blocks
    trainer_step: int = 0
    changed: int = 0
    stop: bool = False
    view: PartView = field(init=False)
    """The base, as the seed has it."""
    _hashes: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 32), np.uint8))
    """Block hashes of the files, uint8 (n_blocks, 32)."""
    _adding: trio.Lock = field(default_factory=trio.Lock)

    def __post_init__(self) -> None:
        self.view = self.publisher.view(BASE)

    @property
    def root(self) -> bytes:
        """The root of the files' bits, from the hashes that this encoder computed: the publisher compares it with that
        of the blocks which reached it."""
        return state_root(self.view.layout.hash, self._hashes)

    async def run(self, attempt: Attempt) -> None:
        """Encode every block. Raises `UsageError` when a file has changed meanwhile, and what the publisher raises."""
        self._hashes = self.view.hashes.copy()
        left = iter(range(self.view.layout.n_blocks - len(draft_blocks(self.view.layout))))
        expected = attempt.expected_bytes
        batch_bytes = max(chunk_target(expected), min(MAX_TURN_BYTES, expected // TURNS))
        work = partial(self._encode, left, self.publisher.seed.coder(), batch_bytes)
        errors: list[SwarmError] = []

        async def thread() -> None:
            try:
                await in_thread(work)
            except SwarmError as error:  # raised below, alone and not in a group
                self.stop = True
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(default_threads(1)):
                nursery.start_soon(thread)
        if errors:
            raise errors[0]
        await in_thread(self.blocks.check_unchanged)

    def _encode(self, left: Iterator[int], coder: int, batch_bytes: int) -> None:
        """In a worker thread: blocks from `left` until there are none."""
        replica = self.view
        deltas: list[BlockDelta] = []
        known: list[StagedBlock] = []
        changed = size = 0
        for block in left:
            if self.stop:
                raise ChannelClosed("the command that published has ended")
            new = self.blocks.block(block)
            encoded = replica.encode_changes(block, new, coder)
            if encoded is None:
                continue
            delta, positions = encoded.delta, encoded.positions
            deltas.append(delta)
            self._hashes[block] = np.frombuffer(delta.new_hash, np.uint8)
            changed += encoded.changed
            size += len(delta.payload)
            if delta.coder != CODER_RAW and positions is not None and positions.size <= LISTED_SHARE * new.size:
                old_hash, dtype = replica.hashes[block].tobytes(), replica.layout.block(block).dtype
                known.append(StagedBlock(block, positions, bits_at(new, positions, dtype), old_hash, delta.new_hash))
            if size >= batch_bytes:
                trio.from_thread.run(self._add, deltas, known, changed)
                deltas, known, changed, size = [], [], 0, 0
        if deltas:
            trio.from_thread.run(self._add, deltas, known, changed)

    async def _add(self, deltas: list[BlockDelta], known: list[StagedBlock], changed: int) -> None:
        async with self._adding:
            await self.publisher.add(deltas, known)
        self.changed += changed


async def _stop_at_hang_up(channel: AsyncChannel, encoder: FileEncoder) -> None:
    try:
        with contextlib.suppress(SwarmError):
            await channel.recv()  # the command says nothing more
    finally:  # also when the seed ends: its threads would read to the end of the files
        encoder.stop = True


def _is_as_told(path: Path, asked: PublishFiles) -> bool:
    try:
        return path.is_absolute() and stamp(path) == asked.files
    except (OSError, ValueError):  # no such file; not even a path
        return False


def _open(path: Path, asked: PublishFiles, layout: Layout) -> Blocks:
    return RawBlocks(path, layout) if asked.raw else folder_blocks(path, layout, asked.files)
