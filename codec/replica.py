"""The replica: the bits of one version, in memory that engines may map, and the hash of every block.

The trainer diffs against it; a node applies deltas to it and serves blocks of it. One thread writes at a time; any
number read. A block's sequence number is odd while it is being written and differs afterwards, so a reader (in this
process or another) never takes a mix for a block. The numbers lie in the same memory, behind the tensors.
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
from codec.checkpoint import Checkpoint
from codec.chunk import CODER_RICE, BlockDelta, ChunkHeader
from codec.errors import PeerError, UsageError
from codec.layout import Layout
from codec.manifest import state_root
from codec.scan import scatter
from codec.staging import Staged, StagedBlock, Torn, block_hash, encode, stage_chunk

__all__ = ["Replica"]

_PAGE: Final = 4096
_PATIENCE: Final = 1 << 20
"""Times that a reader looks again at a block that is being written: seconds, where a write takes a millisecond."""

Run = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]
"""`map`, or the `map` of a thread pool: hashing and copying release the GIL."""


class Replica:
    """Bits of one version. Make one with `create`, `from_checkpoint` or `attach`.

    `layout`; `hashes`: uint8 (n_blocks, 32), of the bits as they are; `fd`: the memfd or file, or None where there are
    no memfds.
    """

    def __init__(
        self, layout: Layout, hashes: NDArray[np.uint8], fd: int | None, memory: Any, path: Path | None = None
    ) -> None:
        self.layout = layout
        self.hashes = hashes
        self.fd = fd
        self._path = path
        self._readers_fd: int | None = None
        self._bytes = np.frombuffer(memory, np.uint8)
        tail = _sequence_offset(layout)
        self._sequence = self._bytes[tail : tail + 4 * layout.n_blocks].view(np.uint32)
        if fd is not None:
            self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, layout: Layout, path: Path | None = None) -> "Replica":
        """All zeros, hashes included: a block that was never written has no version.

        `path`: keep the bits in this file instead of memory, where memory is short. At 1 % density nearly every page
        changes each step, so that the whole file is written each step. Raises `UsageError`: no memory, or disk full.
        """
        nbytes = _sequence_offset(layout) + 4 * layout.n_blocks
        if path is None:
            fd, memory = shared.reserve("swarm-replica", nbytes)
        else:
            path.unlink(missing_ok=True)
            fd, memory = shared.map_file(path, nbytes)
        return cls(layout, np.zeros((layout.n_blocks, 32), np.uint8), fd, memory, path)

    @classmethod
    def reopen(cls, path: Path, layout: Layout, hashes: NDArray[np.uint8]) -> "Replica":
        """The file that a replica was kept in. `hashes`: what they were; after a crash call `rehash`.

        Raises `PeerError` when the file is not of this layout, `UsageError` when there is none.
        """
        if not path.is_file():
            raise UsageError(f"{path} is gone. Join again without it.")
        if path.stat().st_size != max(1, _sequence_offset(layout) + 4 * layout.n_blocks):
            raise PeerError("replica.size: not a replica of this layout")
        replica = cls(layout, hashes, *shared.map_file(path, path.stat().st_size), path)
        replica._sequence[:] = 0  # nobody is writing now
        return replica

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, layout: Layout | None = None, run: Run = map, path: Path | None = None
    ) -> "Replica":
        """The checkpoint's bits, every block hashed. `path`: as for `create`.

        `layout`: the swarm's; tensors that the checkpoint lacks, or has in another shape or dtype, stay without a hash.
        Raises `UsageError` when it has none of them.
        """
        layout = layout or checkpoint.layout
        theirs = {name: tensor for tensor in checkpoint.layout.tensors for name in (tensor.name, *tensor.aliases)}
        usable = {
            tensor.name
            for tensor in layout.tensors
            if tensor.name in theirs
            and (theirs[tensor.name].dtype, theirs[tensor.name].shape) == (tensor.dtype, tensor.shape)
        }
        if layout.tensors and not usable:
            raise UsageError(
                f"{checkpoint.path} is another model: it has no tensor of this one. Give the base's folder."
            )
        replica = cls.create(layout, path)

        def load(block: int) -> None:
            spec = layout.block(block)
            new = checkpoint.bits(spec.name)[spec.start : spec.start + spec.count]
            replica._writable(block)[:] = new
            replica.hashes[block] = np.frombuffer(block_hash(replica._writable(block)), np.uint8)

        blocks = (block for name in sorted(usable) for block in layout.blocks_of(name))
        for _ in run(load, blocks):
            pass
        return replica

    @classmethod
    def attach(cls, fd: int, layout: Layout, hashes: NDArray[np.uint8]) -> "Replica":
        """Map a replica of another process, read-only. Takes over `fd`. Raises `PeerError` when the size is another."""
        if os.fstat(fd).st_size < max(1, _sequence_offset(layout) + 4 * layout.n_blocks):
            raise PeerError("replica.size: not a replica of this layout")
        assert hashes.shape == (layout.n_blocks, 32)
        return cls(layout, hashes, fd, shared.map_readonly(fd))

    def seal_for_readers(self) -> int:
        """The descriptor, sealed so that whoever receives it can map it for reading only; ours still writes.

        Raises `UsageError` where the system has no memfds, or its kernel is older than 5.1.
        """
        if self.fd is None:
            raise shared.no_sharing()
        if self._path is not None:  # a file is shared by a descriptor that can only read
            if self._readers_fd is None:
                self._readers_fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, self._readers_fd)
            return self._readers_fd
        try:
            shared.seal_for_readers(self.fd)
        except OSError as error:
            raise UsageError("This kernel cannot seal shared memory; Linux 5.1 or later can.") from error
        return self.fd

    @property
    def on_disk(self) -> bool:
        """Its bits are in a file."""
        return self._path is not None

    @property
    def root(self) -> bytes:
        """The state root of the bits as they are (32 bytes)."""
        return state_root(self.layout.hash, self.hashes)

    def bits(self, name: str) -> Bits:
        """A tensor, flat and read-only; it changes when the replica does. Raises `KeyError`."""
        tensor = self.layout.tensor(name)
        return self._view(self.layout.offset(name), tensor.nbytes, tensor.type.bits)

    def block(self, block: int) -> Bits:
        """A block's elements, flat and read-only; they change when the replica does. Raises `IndexError`."""
        spec = self.layout.block(block)
        return self._view(spec.offset, spec.nbytes, spec.dtype.bits)

    def _view(self, offset: int, nbytes: int, dtype: np.dtype[Any]) -> Bits:
        view = self._bytes[offset : offset + nbytes].view(dtype)
        view.flags.writeable = False
        return view

    def _writable(self, block: int) -> Bits:
        spec = self.layout.block(block)
        return self._bytes[spec.offset : spec.offset + spec.nbytes].view(spec.dtype.bits)

    def read(self, block: int) -> tuple[bytes, bytes]:
        """(bytes, hash) of a block at one version, whatever is being written. Raises `IndexError`, `Torn`."""
        spec = self.layout.block(block)
        for _ in range(_PATIENCE):
            before = int(self._sequence[block])
            if before & 1:
                os.sched_yield()
                continue
            data = self._bytes[spec.offset : spec.offset + spec.nbytes].tobytes()
            digest = self.hashes[block].tobytes()
            if int(self._sequence[block]) == before:
                return data, digest
        raise Torn((block,))

    def read_block(self, block: int) -> bytes:
        """A block's bytes at one version. Raises `IndexError`, `Torn`."""
        return self.read(block)[0]

    @contextmanager
    def _writing(self, block: int, new_hash: bytes) -> Iterator[Bits]:
        """The block's elements to write to; afterwards it has `new_hash`. On an error it stays without version."""
        words = self._writable(block)
        self._sequence[block] += 1 + (self._sequence[block] & 1)  # odd, also after a write that an error cut short
        self.hashes[block] = 0
        yield words
        self.hashes[block] = np.frombuffer(new_hash, np.uint8)
        self._sequence[block] += 1

    def write_block(self, block: int, data: bytes, expected_hash: bytes) -> None:
        """Put a whole block in place. Raises `PeerError` when `data` is not what hashes to `expected_hash`."""
        spec = self.layout.block(block)
        if len(data) != spec.nbytes:
            raise PeerError(f"block.length: {len(data)} bytes, not {spec.nbytes}")
        new = np.frombuffer(data, spec.dtype.bits)
        if block_hash(new) != expected_hash:
            raise PeerError(f"block.hash: block {block} is not what was asked for")
        with self._writing(block, expected_hash) as words:
            words[:] = new

    def encode_block(self, block: int, new: Bits, coder: int = CODER_RICE) -> BlockDelta | None:
        """What changes a block into `new` (flat, `dtype.bits`), or None. Raw where `coder` would be longer."""
        spec = self.layout.block(block)
        return encode(block, self.block(block), new, spec.dtype, coder)

    def stage(self, header: ChunkHeader, body: bytes | bytearray | memoryview) -> Staged:
        """Decode a verified chunk; see `codec.staging.stage_chunk`. Raises `Torn`, `PeerError`."""
        return stage_chunk(self, header, body)

    def predicted_hashes(self, stageds: Iterable[Staged]) -> NDArray[np.uint8]:
        """The block hashes that `scatter(stageds)` will leave: uint8 (n_blocks, 32)."""
        hashes = self.hashes.copy()
        for staged in stageds:
            for block in staged:
                hashes[block.block] = np.frombuffer(block.new_hash, np.uint8)
        return hashes

    def predicted_root(self, stageds: Iterable[Staged]) -> bytes:
        """The root that `scatter(stageds)` will lead to."""
        return state_root(self.layout.hash, self.predicted_hashes(stageds))

    def scatter(self, stageds: Sequence[Staged]) -> None:
        """Write what was staged. Doing it again changes nothing.

        Raises `Torn` (before anything is written) for blocks that have changed since they were staged.
        """
        todo: list[StagedBlock] = []
        torn: list[int] = []
        for staged in stageds:
            for block in staged:
                have = self.hashes[block.block].tobytes()
                if have == block.old_hash:
                    todo.append(block)
                elif have != block.new_hash:
                    torn.append(block.block)
        if torn:
            raise Torn(torn)
        for block in todo:
            with self._writing(block.block, block.new_hash) as words:
                scatter(words, block.positions, block.bits)

    def rehash(self, run: Run = map) -> list[int]:
        """Hash every block anew; the ids of those whose hash was not what `hashes` said, now corrected."""
        wrong: list[int] = []

        def check(block: int) -> None:
            digest = block_hash(self.block(block))
            if digest != self.hashes[block].tobytes():
                self.hashes[block] = np.frombuffer(digest, np.uint8)
                wrong.append(block)

        for _ in run(check, range(self.layout.n_blocks)):
            pass
        return sorted(wrong)


def _sequence_offset(layout: Layout) -> int:
    """Where the sequence numbers start: behind the tensors, on a page of their own."""
    return -(-layout.nbytes // _PAGE) * _PAGE
