"""A replica where memory is short: a checkpoint on disk, and what came since as it came, coded.

A version costs no write: its chunks are on disk already, to be given to others, so all that is noted is which of them
change which block. A block is made whenever somebody reads it: read from the checkpoint, and brought forward chunk by
chunk. Written in place instead, a version that changes 1 % of the elements changes every page, hence the whole file.

What is made is believed only when it has the block's hash, since a disk may lie.
"""

import copy
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits
from codec.checkpoint import Checkpoint
from codec.chunk import BlockEntry, ChunkHeader, ChunkKey
from codec.errors import PeerError
from codec.layout import BlockSpec, Layout
from codec.manifest import state_root
from codec.staging import Staged, StagedBlock, Torn, block_hash, forward, stage_chunk

__all__ = ["Layered"]

Payload = Callable[[ChunkKey, int], tuple[BlockEntry, bytes] | None]
"""What a chunk says of a block; None when that is not (or no longer) kept."""


class _Base:
    """A checkpoint's files, read block by block: a bad sector is an error then, where it would kill who maps them."""

    def __init__(self, layout: Layout, checkpoint: Checkpoint) -> None:
        files: dict[Path, int] = {}
        self._places: dict[str, tuple[int, int]] = {}
        for tensor in layout.tensors:
            spec, path, offset = checkpoint.place(tensor.name)
            if (spec.dtype, spec.shape) != (tensor.dtype, tensor.shape):
                raise PeerError(f"checkpoint: {tensor.name!r} is of another dtype or shape")
            if path not in files:
                files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, files[path])
            self._places[tensor.name] = files[path], offset

    def read(self, spec: BlockSpec, into: Bits) -> None:
        """Raises `OSError` when the disk does not give all of it."""
        fd, offset = self._places[spec.name]
        view = into.view(np.uint8).data
        at = offset + spec.start * into.itemsize
        while view:
            count = os.preadv(fd, [view], at)
            if count == 0:
                raise OSError(f"{spec.name}: the file is cut off")
            view, at = view[count:], at + count


class _At(NamedTuple):
    """A block at one version: where its bits come from, and their hash."""

    base: _Base
    chain: tuple[ChunkKey, ...]
    digest: bytes


_GONE: Final = "layered.chunk: no longer kept"


class Layered:
    """Bits of one version. `layout`; `hashes`: uint8 (n_blocks, 32), which the bits must have. Any number of threads
    may read, one at a time writes."""

    def __init__(self, layout: Layout, checkpoint: Checkpoint, hashes: NDArray[np.uint8], payload: Payload) -> None:
        """`hashes`: those of the checkpoint's blocks. `payload(chunk, block)`: from the chunks that are kept.

        Raises `PeerError` or `KeyError` when the checkpoint is not of this layout, `OSError`.
        """
        assert hashes.shape == (layout.n_blocks, 32)
        self.layout = layout
        self.hashes = hashes
        self._payload = payload
        base = _Base(layout, checkpoint)
        self._blocks = [_At(base, (), digest.tobytes()) for digest in hashes]

    @property
    def root(self) -> bytes:
        """The state root of the bits as they must be (32 bytes)."""
        return state_root(self.layout.hash, self.hashes)

    # ------------------------------------------------------------ reading

    def block(self, block: int, into: Bits | None = None) -> Bits:
        """A block's elements, flat, made for the caller, or `into`; not hashed. Raises `IndexError`, `Torn`."""
        return self._made(block, into, hashed=False)[0]

    def read(self, block: int) -> tuple[bytes, bytes]:
        """(bytes, hash) of a block at one version, which have been compared. Raises `IndexError`, `Torn`."""
        bits, at = self._made(block, None, hashed=True)
        return bits.tobytes(), at.digest

    def read_block(self, block: int) -> bytes:
        """A block's bytes, which have its hash. Raises `IndexError`, `Torn`."""
        return self.read(block)[0]

    def parts(self, name: str) -> Iterator[Bits]:
        """A tensor, block by block, each of which has its hash. Raises `KeyError`, `Torn`."""
        for block in self.layout.blocks_of(name):
            yield self._made(block, None, hashed=True)[0]

    def bits(self, name: str) -> Bits:
        """A tensor, flat, made for the caller: as much memory as it is large. Raises `KeyError`, `Torn`."""
        parts = list(self.parts(name))
        return np.concatenate(parts) if parts else np.empty(0, self.layout.tensor(name).type.bits)

    def wrong(self, block: int) -> bool:
        """Whether a block cannot be made, or has not its hash."""
        try:
            self._made(block, None, hashed=True)
        except Torn:
            return True
        return False

    def _made(self, block: int, into: Bits | None, *, hashed: bool) -> tuple[Bits, _At]:
        spec = self.layout.block(block)
        bits = np.empty(spec.count, spec.dtype.bits) if into is None else into
        while True:
            at = self._blocks[block]
            try:
                at.base.read(spec, bits)
                for key in at.chain:
                    found = self._payload(key, block)
                    if found is None:
                        raise PeerError(_GONE)
                    forward(*found, bits, spec.dtype)
                if not hashed or block_hash(bits) == at.digest:
                    return bits, at
            except (PeerError, OSError):
                pass
            if self._blocks[block] is at:  # else it became another version meanwhile, or has a new checkpoint under it
                raise Torn((block,))

    # ------------------------------------------------------------ writing

    def stage(self, header: ChunkHeader, body: bytes | bytearray | memoryview) -> Staged:
        """Decode a verified chunk; see `codec.staging.stage_chunk`. Raises `Torn`, `PeerError`."""
        return stage_chunk(self, header, body)

    def scatter(self, stageds: Sequence[Staged]) -> None:
        """Take note of what was staged, which is to be found in its chunks from now on. Twice changes nothing.

        Raises `Torn` (before anything is noted) for blocks that have changed since they were staged.
        """
        todo: list[tuple[ChunkKey, StagedBlock]] = []
        torn: list[int] = []
        for staged in stageds:
            assert staged.key is not None
            for block in staged:
                have = self.hashes[block.block].tobytes()
                if have == block.old_hash:
                    todo.append((staged.key, block))
                elif have != block.new_hash:
                    torn.append(block.block)
        if torn:
            raise Torn(torn)
        for key, block in todo:
            self._note(key, block.block, block.new_hash)

    def follow(self, headers: Sequence[ChunkHeader]) -> None:
        """Take note of a version's chunks without a look at any bits: `hashes` are what the chunks promise then."""
        for header in headers:
            for entry in header.blocks:
                if self.hashes[entry.block].tobytes() != entry.new_hash:
                    self._note(header.key, entry.block, entry.new_hash)

    def _note(self, key: ChunkKey, block: int, new_hash: bytes) -> None:
        base, chain, _ = self._blocks[block]
        self._blocks[block] = _At(base, (*chain, key), new_hash)  # all at once, so nobody reads a mix
        self.hashes[block] = np.frombuffer(new_hash, np.uint8)

    # ------------------------------------------------------------ a new checkpoint

    def frozen(self) -> "Layered":
        """The same bits, which stay what they are. The chunks must be kept as long as it is used."""
        twin = copy.copy(self)
        twin.hashes, twin._blocks = self.hashes.copy(), list(self._blocks)
        return twin

    def rebase(self, checkpoint: Checkpoint, frozen: "Layered") -> None:
        """`checkpoint` holds the bits of `frozen`: what led there is not needed any more. Raises as the making does."""
        base = _Base(self.layout, checkpoint)
        for block, (now, then) in enumerate(zip(self._blocks, frozen._blocks, strict=True)):
            self._blocks[block] = _At(base, now.chain[len(then.chain) :], now.digest)
