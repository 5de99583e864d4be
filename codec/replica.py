"""The replica: the bits of one version in memory that engines can map, and the hash of every block.

The trainer diffs against it; a node applies deltas to it and serves blocks from it. One thread may write at a time, any
number may read. Each block has a sequence number (a seqlock), which is odd while the block is written and larger
afterwards, so that a reader in this or another process detects a torn read. The sequence numbers lie in the same memory
after the tensors.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec import shared
from codec.bits import Bits
from codec.block_files import BlockFiles
from codec.checkpoint import Checkpoint
from codec.chunk import CODER_RICE, BlockDelta, ChunkHeader
from codec.errors import PeerError, UsageError
from codec.kernels.scan import scatter
from codec.layered import Layered
from codec.layout import Layout
from codec.manifest import state_root
from codec.slot_memory import SlotMemory
from codec.staging import (
    EncodedBlock,
    StagedBlock,
    StagedChunk,
    Torn,
    block_hash,
    check_block,
    encode,
    encode_changes,
    stage_chunk,
)
from codec.zeros import are_zeros, zero_hashes

__all__ = ["Replica"]

_PAGE: Final = 4096
_MAX_READ_TRIES: Final = 1 << 20
"""Tries to read a block that is being written: they take seconds, where writing a block takes a millisecond."""

Run = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]
"""`map`, or a thread pool's `map`, since hashing and copying release the GIL."""


class Replica:
    """The bits of one version. Construct it with `create`, `from_checkpoint` or `attach`.

    `hashes`: uint8 (n_blocks, 32), the hash of each block's current bits; zeros for a block without a version. `fd`:
    the memfd or file; None where the system has no memfds. `path`: the file, or None for memory.

    `held`: for each block, whether its bits are here; None: all are. Of a block that is not held only the hash is
    known, as the authority signed it. Its bits are a hole of the memory, which takes no room while nobody reads it.

    Adapters' slots lie in a memfd of their own (`codec.slot_memory`): a slot that becomes empty gives its memory back.
    """

    def __init__(
        self,
        layout: Layout,
        hashes: NDArray[np.uint8],
        fd: int | None,
        memory: Any,
        path: Path | None = None,
        held: NDArray[np.bool_] | None = None,
        offset: int = 0,
        slots: SlotMemory | None = None,
    ) -> None:
        """`offset`: of the first tensor in `memory`, bytes. `slots`: where the blocks of adapters' slots are; None: in
        `memory`, as all others."""
        self.layout = layout
        self.hashes = hashes
        self.held = held
        self.fd = fd
        self.path = path
        self.base_values = layout.base_blocks < layout.n_blocks
        """Whether raw payloads of the base's blocks may be coded by `codec.values`; those of other blocks always may.
        Every member of a swarm with other parts can read them."""
        self._readers_fd: int | None = None
        self._memory = memory
        self._offset = offset
        self._bytes = np.frombuffer(memory, np.uint8)[offset:]
        self._slots = slots
        tail = _sequence_offset(layout)
        self._sequence = self._bytes[tail : tail + 4 * layout.n_blocks].view(np.uint32)
        if fd is not None:
            self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, layout: Layout, path: Path | None = None, held: NDArray[np.bool_] | None = None) -> "Replica":
        """A replica of zeros, hashes included: a block that was never written has no version. Blocks beyond the base
        have the hash of zeros (`codec.zeros`). `held`: the blocks that it is to have; None: all.

        `path`: keep the bits in this file instead of memory, where memory is short. That suits a short time only, since
        each version changes nearly every page; `codec.layered` is for longer. Raises `UsageError` if memory or disk
        space is too small.
        """
        nbytes = _sequence_offset(layout) + 4 * layout.n_blocks
        if path is None:
            fd, memory = shared.reserve("swarm-replica", nbytes)
        else:
            path.unlink(missing_ok=True)
            fd, memory = shared.map_file(path, nbytes)
        hashes = np.zeros((layout.n_blocks, 32), np.uint8)
        hashes[layout.base_blocks :] = zero_hashes(layout)
        slots = SlotMemory.reserve(layout) if path is None else None
        return cls(layout, hashes, fd, memory, path, held, slots=slots)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, layout: Layout | None = None, run: Run = map) -> "Replica":
        """A replica in memory with the checkpoint's bits: see `load`. `layout`: default the checkpoint's own."""
        replica = cls.create(layout or checkpoint.layout)
        replica.load(checkpoint, run)
        return replica

    def load(self, checkpoint: Checkpoint, run: Run = map) -> None:
        """Copy the checkpoint's bits and hash every block, also those that are not held.

        A tensor that the checkpoint does not have with the same shape and dtype stays unchanged. Raises `UsageError` if
        it has none of the tensors.
        """
        layout = self.layout
        try:
            files = BlockFiles.matching(layout, checkpoint)
            if layout.tensors and not files.names:
                raise UsageError(
                    f"{checkpoint.path} is another model: it has no tensor of this one. Give the folder of the base "
                    "model."
                )

            def load(block: int) -> None:
                spec = layout.block(block)
                if block >= layout.base_blocks:  # into a hole only what is not zeros
                    bits = np.empty(spec.count, spec.dtype.bits)
                    files.read(spec, bits)
                    if bits.any():
                        self._writable(block)[:] = bits
                        self.hashes[block] = np.frombuffer(block_hash(bits), np.uint8)
                    return
                words = self._writable(block) if self.holds(block) else np.empty(spec.count, spec.dtype.bits)
                files.read(spec, words)
                self.hashes[block] = np.frombuffer(block_hash(words), np.uint8)

            for _ in run(load, (block for name in sorted(files.names) for block in layout.blocks_of(name))):
                pass
        except OSError as error:
            raise UsageError(f"Cannot read {checkpoint.path}: {error.strerror or error}.") from error

    @classmethod
    def attach(cls, fd: int, layout: Layout, hashes: NDArray[np.uint8], offset: int = 0) -> "Replica":
        """Map another process's replica read-only and take ownership of `fd`. Raises `PeerError` for a wrong size.

        `layout` may be that of a part (`codec.parts`) of the other replica, which begins at byte `offset` of it. A part
        has no sequence numbers, so `read`, which relies on them, must not be called then.
        """
        size, own = os.fstat(fd).st_size, _sequence_offset(layout) + 4 * layout.n_blocks
        if size < max(1, own) if not offset else size < offset + layout.nbytes:
            raise PeerError("replica.size: not a replica of this layout")
        assert hashes.shape == (layout.n_blocks, 32)
        return cls(layout, hashes, fd, shared.map_readonly(fd), offset=offset)

    def seal_for_readers(self, offset: int = 0) -> int:
        """A descriptor that other processes can map for reading only; this process can still write. `offset`: of a byte
        that they want, since adapters' slots have a descriptor of their own. Offsets are the same in both.

        Raises `UsageError` if the system has no memfds, or its kernel is older than Linux 5.1.
        """
        if self.fd is None:
            raise shared.no_sharing()
        if self.path is not None:  # a file is shared through a read-only descriptor
            if self._readers_fd is None:
                self._readers_fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, self._readers_fd)
            return self._readers_fd
        try:
            if self._slots is not None and offset in self._slots.span:
                return self._slots.readers_fd()
            shared.seal_for_readers(self.fd)
        except OSError as error:
            raise UsageError("This kernel cannot seal shared memory; Linux 5.1 or later can.") from error
        return self.fd

    @property
    def root(self) -> bytes:
        """The state root (32 bytes) of the current bits."""
        return state_root(self.layout.hash, self.hashes)

    def bits(self, name: str) -> Bits:
        """A flat, read-only view of a tensor; it changes when the replica does. Raises `KeyError`."""
        tensor = self.layout.tensor(name)
        return self._view(self.layout.offset(name), tensor.nbytes, tensor.type.bits)

    def block(self, block: int) -> Bits:
        """A flat, read-only view of a block; it changes when the replica does. Raises `IndexError`."""
        spec = self.layout.block(block)
        return self._view(spec.offset, spec.nbytes, spec.dtype.bits)

    @contextmanager
    def visiting(self, block: int) -> Iterator[None]:
        """Map a block's pages in one go, and unmap them at the end: for a process that reads each block once, and
        should not be charged with the memory of all of them."""
        spec = self.layout.block(block)
        first = self._offset + spec.offset
        start = first // _PAGE * _PAGE
        size = -(-(first + spec.nbytes) // _PAGE) * _PAGE - start
        shared.populate(self._memory, start, size)
        try:
            yield
        finally:
            shared.unmap(self._memory, start, size)

    def _view(self, offset: int, nbytes: int, dtype: np.dtype[Any]) -> Bits:
        view = self._raw(offset, nbytes).view(dtype)
        view.flags.writeable = False
        return view

    def _writable(self, block: int) -> Bits:
        spec = self.layout.block(block)
        return self._raw(spec.offset, spec.nbytes).view(spec.dtype.bits)

    def _raw(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A writable view of bytes of one tensor."""
        if self._slots is not None and offset in self._slots.span:
            return self._slots.raw(offset, nbytes)
        return self._bytes[offset : offset + nbytes]

    def holds(self, block: int) -> bool:
        """Whether the bits of a block are here."""
        return self.held is None or bool(self.held[block])

    def note_hashes(self, hashes: Iterable[tuple[int, bytes]]) -> None:
        """Set the hashes, (block, hash), of those blocks that are not held."""
        for block, digest in hashes:
            if not self.holds(block):
                self.hashes[block] = np.frombuffer(digest, np.uint8)

    def read(self, block: int) -> tuple[bytes, bytes]:
        """(bytes, hash) of a block at one version, also while another thread writes. Raises `IndexError`, and `Torn`
        also for a block that is not held."""
        spec = self.layout.block(block)
        if not self.holds(block):
            raise Torn((block,))
        for _ in range(_MAX_READ_TRIES):
            before = int(self._sequence[block])
            if before & 1:
                os.sched_yield()
                continue
            if are_zeros(self.layout, block, digest := self.hashes[block].tobytes()):
                return bytes(spec.nbytes), digest  # reading a hole would fill it
            data = self._raw(spec.offset, spec.nbytes).tobytes()
            digest = self.hashes[block].tobytes()
            if int(self._sequence[block]) == before:
                return data, digest
        raise Torn((block,))

    def read_block(self, block: int) -> bytes:
        """A block's bytes at one version. Raises `IndexError`, `Torn`."""
        return self.read(block)[0]

    @contextmanager
    def _writing(self, block: int, new_hash: bytes) -> Iterator[Bits]:
        """Write to a block's elements; on exit it has `new_hash`. After an error inside it has no version (zeros)."""
        words = self._writable(block)
        self._sequence[block] += 1 + (self._sequence[block] & 1)  # odd, also if an error ended the last write
        self.hashes[block] = 0
        yield words
        if self._slots is not None and are_zeros(self.layout, block, new_hash):
            spec = self.layout.block(block)
            if spec.offset in self._slots.span and not words.any():
                self._slots.give_back(spec.offset, spec.nbytes)
        self.hashes[block] = np.frombuffer(new_hash, np.uint8)
        self._sequence[block] += 1

    def write_block(self, block: int, data: bytes, expected_hash: bytes) -> None:
        """Write a whole block. Raises `PeerError` unless `data` has the right length and `expected_hash`, and the block
        is held."""
        new = check_block(self.layout, block, data, expected_hash)
        if not self.holds(block):
            raise PeerError(f"block: {block} is not of the shard that is held here")
        with self._writing(block, expected_hash) as words:
            words[:] = new

    def encode_block(self, block: int, new: Bits, coder: int = CODER_RICE) -> BlockDelta | None:
        """The delta from a block to `new` (flat, `dtype.bits`); None if equal. Raw if `coder` is no shorter."""
        new_values = self.base_values or block >= self.layout.base_blocks
        return encode(block, self.block(block), new, self.layout.block(block).dtype, coder, new_values=new_values)

    def encode_changes(self, block: int, new: Bits, coder: int = CODER_RICE) -> EncodedBlock | None:
        """As `encode_block`, with the positions of the changes."""
        new_values = self.base_values or block >= self.layout.base_blocks
        return encode_changes(
            block, self.block(block), new, self.layout.block(block).dtype, coder, new_values=new_values
        )

    def stage(self, header: ChunkHeader, body: bytes | bytearray | memoryview) -> StagedChunk:
        """Decode a verified chunk; see `codec.staging.stage_chunk`. Raises `Torn`, `PeerError`."""
        return stage_chunk(self, header, body, self.holds)

    def predicted_hashes(self, stageds: Iterable[StagedChunk]) -> NDArray[np.uint8]:
        """The block hashes after `scatter(stageds)`: uint8 (n_blocks, 32)."""
        hashes = self.hashes.copy()
        for staged in stageds:
            for block in staged:
                hashes[block.block] = np.frombuffer(block.new_hash, np.uint8)
        return hashes

    def predicted_root(self, stageds: Iterable[StagedChunk]) -> bytes:
        """The root (32 bytes) after `scatter(stageds)`."""
        return state_root(self.layout.hash, self.predicted_hashes(stageds))

    def scatter(self, stageds: Sequence[StagedChunk]) -> None:
        """Write staged changes. Calling it again changes nothing.

        Raises `Torn`, before any write, for blocks that have changed since they were staged.
        """
        pending: list[StagedBlock] = []
        torn: list[int] = []
        for staged in stageds:
            for block in staged:
                current = self.hashes[block.block].tobytes()
                if current == block.old_hash:
                    pending.append(block)
                elif current != block.new_hash:
                    torn.append(block.block)
        if torn:
            raise Torn(torn)
        for block in pending:
            with self._writing(block.block, block.new_hash) as words:
                if block.positions.size == words.size:  # ascending, so it names every element
                    words[:] = block.bits
                else:
                    scatter(words, block.positions, block.bits)

    def take_from(self, source: Layered, run: Run = map, *, believed: bool = False) -> tuple[int, ...]:
        """Copy from `source` every block whose hash differs.

        Returns the blocks, ascending, whose bits do not have the hash that `source` lists: each gets the hash of its
        bits, or zeros if it could not be read. `believed`: skip hashing; the caller must hash the blocks later.
        """
        wrong: list[int] = []

        def copy_block(block: int) -> None:
            expected = source.hashes[block].tobytes()
            if self.hashes[block].tobytes() == expected:
                return
            if not self.holds(block):
                self.hashes[block] = source.hashes[block]
                return
            try:
                with self._writing(block, expected) as words:
                    source.block(block, words)
            except Torn:
                wrong.append(block)
                return
            if not believed and (digest := block_hash(words)) != expected:
                self.hashes[block] = np.frombuffer(digest, np.uint8)
                wrong.append(block)

        for _ in run(copy_block, range(self.layout.n_blocks)):
            pass
        return tuple(sorted(wrong))

    def empty_file(self) -> None:
        """Give the disk space of a replica in a file back: all bits are zeros and no block has a version, also for the
        processes that have mapped it. `refill_file` must be called before anything is written."""
        assert self.path is not None
        assert self.fd is not None
        if shared.punch(self.fd, self._bytes.nbytes):
            self.hashes[: self.layout.base_blocks] = 0
            self.hashes[self.layout.base_blocks :] = zero_hashes(self.layout)

    def refill_file(self) -> None:
        """Allocate the file's disk space again. Raises `UsageError` when there is too little."""
        assert self.fd is not None
        try:
            os.posix_fallocate(self.fd, 0, self._bytes.nbytes)
        except OSError as error:
            raise shared.no_room(self._bytes.nbytes, self.path, error) from error

    def rehash(self, run: Run = map) -> list[int]:
        """Hash every block again and correct `hashes`. Returns the ids of the blocks whose hash was wrong."""
        wrong: list[int] = []

        def check(block: int) -> None:
            if not self.holds(block):
                return
            digest = block_hash(self.block(block))
            if digest != self.hashes[block].tobytes():
                self.hashes[block] = np.frombuffer(digest, np.uint8)
                wrong.append(block)

        for _ in run(check, range(self.layout.n_blocks)):
            pass
        return sorted(wrong)


def _sequence_offset(layout: Layout) -> int:
    """Offset of the sequence numbers: after the tensors, on a page of their own."""
    return -(-layout.nbytes // _PAGE) * _PAGE
