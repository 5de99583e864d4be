"""A replica for hosts with little memory: a checkpoint on disk, and the coded chunks of the versions since.

Applying a version writes nothing: the chunk store holds its chunks already, so only the list of chunks that change each
block grows. A reader of a block reads it from the checkpoint and decodes those chunks onto it. Writing in place would
rewrite the whole file for each version, because changing 1 % of the elements changes every page.

While a node catches up, each block is read from the file in which its bits are: the user's folder, an older checkpoint,
or the unfinished checkpoint in which fetched blocks are written.

With `live` the engine's memory is the replica's memory: blocks are read back out of the engine and proven by their
hash, and the disk is read only where the engine does not have them (`codec.live`).

A disk can return wrong data, so a block counts as read only when its bits have its hash.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits
from codec.block_files import BlockFiles
from codec.checkpoint import Checkpoint
from codec.chunk import BlockEntry, ChunkHeader, ChunkKey
from codec.errors import PeerError
from codec.layout import BlockSpec, Layout
from codec.live import LiveBlocks, LiveFirst, SnapshotBlocks
from codec.manifest import state_root
from codec.staging import BlockSource, StagedBlock, StagedChunk, Torn, block_hash, forward, stage_chunk
from codec.zeros import are_zeros, with_holes, zero_hashes

__all__ = ["Layered"]

Payload = Callable[[ChunkKey, int], tuple[BlockEntry, bytes] | None]
"""Maps (chunk, block) to the block's entry and payload in the chunk store; None if the chunk is not stored any more."""


class _Base(Protocol):
    """Where the bits of a block are before the chunks of its chain."""

    def read(self, spec: BlockSpec, into: Bits) -> None:
        """Read a block into `into`. Raises `OSError`."""
        ...


class _Nowhere:
    """The base of a block without a version."""

    def read(self, spec: BlockSpec, into: Bits) -> None:
        raise OSError(f"{spec.name}: not written yet")


class _Zeros:
    """The base of a block that was zeros (`codec.zeros`) before the chunks of its chain."""

    def read(self, spec: BlockSpec, into: Bits) -> None:
        into[:] = 0


_ZEROS: Final = _Zeros()


class _Memory:
    """The base of one block while its place in a file is being written."""

    def __init__(self, bits: Bits) -> None:
        self._bits = bits

    def read(self, spec: BlockSpec, into: Bits) -> None:
        into[:] = self._bits


class _BlockState(NamedTuple):
    """A block at one version: its base, the chunks to decode onto that in order, and the block's hash."""

    base: _Base
    chain: tuple[ChunkKey, ...]
    digest: bytes


_GONE: Final = "layered.chunk: not stored any more"


class Layered:
    """The bits of one version. `hashes`: uint8 (n_blocks, 32), the hashes that the bits must have.

    Any number of threads may read; only one may write at a time.
    """

    def __init__(self, layout: Layout, payload: Payload) -> None:
        """A replica without bits; blocks beyond the base are zeros. `payload(chunk, block)`: reads the chunk store."""
        self.layout = layout
        self.hashes = np.zeros((layout.n_blocks, 32), np.uint8)
        self.hashes[layout.base_blocks :] = zero_hashes(layout)
        self.live: LiveBlocks | None = None
        """The engine's memory, from which blocks are read first."""
        self._payload = payload
        self._blocks = [_BlockState(_Nowhere(), (), bytes(32))] * layout.base_blocks
        self._blocks += (_BlockState(_ZEROS, (), digest.tobytes()) for digest in self.hashes[layout.base_blocks :])

    @classmethod
    def on(cls, layout: Layout, checkpoint: Checkpoint, hashes: NDArray[np.uint8], payload: Payload) -> "Layered":
        """The bits of `checkpoint`, whose block hashes are `hashes`.

        Raises `PeerError` or `KeyError` if the checkpoint does not have this layout, `OSError` if it cannot be opened.
        """
        assert hashes.shape == (layout.n_blocks, 32)
        layered = cls(layout, payload)
        files = BlockFiles.whole(layout, checkpoint)
        for block, digest in enumerate(hashes):
            layered.place_block(block, files, digest.tobytes())
        return layered

    @property
    def root(self) -> bytes:
        """The state root (32 bytes) over `hashes`."""
        return state_root(self.layout.hash, self.hashes)

    # ------------------------------------------------------------ reading

    def block(self, block: int, into: Bits | None = None) -> Bits:
        """A block's elements from disk, flat, in `into` or a new array. Its hash is not checked. Raises `IndexError`,
        `Torn`."""
        return self._materialize(block, into, hashed=False)[0]

    def read(self, block: int) -> tuple[bytes, bytes]:
        """(bytes, hash) of a block at one version, from disk; the bytes have the hash. Raises `IndexError`, `Torn`."""
        bits, at = self._materialize(block, None, hashed=True)
        return bits.tobytes(), at.digest

    def read_block(self, block: int) -> bytes:
        """A block's bytes, checked against its hash. Raises `IndexError`, `Torn`."""
        return self._source([block], self._proven).block(block).tobytes()

    def parts(self, name: str) -> Iterator[Bits]:
        """A tensor block by block, each checked against its hash. Raises `KeyError`, `Torn`."""
        blocks = self.layout.blocks_of(name)
        source = self._source(blocks, self._proven)
        return (source.block(block) for block in blocks)

    def with_holes(self, name: str) -> Iterator[Bits | int]:
        """As `parts`; the number of its elements in place of a block of zeros (`codec.zeros`)."""
        source = self._source(self.layout.blocks_of(name), self._proven)
        return with_holes(self.layout, self.hashes, name, source.block)

    def _proven(self, block: int) -> Bits:
        """A block from disk, checked against its hash."""
        return self._materialize(block, None, hashed=True)[0]

    def _source(self, blocks: Iterable[int], from_disk: Callable[[int], Bits]) -> BlockSource:
        """Where to read `blocks` in this order: live, where that is right, else by `from_disk`."""
        return LiveFirst(self.live, self.layout, self.hashes, blocks, self._bring_forward, from_disk)

    def _bring_forward(self, block: int, bits: Bits) -> bool:
        """Bring live bits, of whichever version, to the block's present one, in place; whether they have its hash."""
        at, spec = self._blocks[block], self.layout.block(block)
        digest = block_hash(bits)
        if digest == at.digest:
            return True
        later: list[tuple[BlockEntry, bytes]] = []
        for key in reversed(at.chain):
            found = self._payload(key, block)
            if found is None:
                return False
            if found[0].new_hash == digest:
                break
            later.append(found)
        try:
            for entry, payload in reversed(later):
                forward(entry, payload, bits, spec.dtype)
        except PeerError:
            return False
        return bool(later) and block_hash(bits) == at.digest

    def bits(self, name: str) -> Bits:
        """A whole tensor, flat, in a new array. Raises `KeyError`, `Torn`."""
        parts = list(self.parts(name))
        return np.concatenate(parts) if parts else np.empty(0, self.layout.tensor(name).type.bits)

    def wrong(self, block: int) -> bool:
        """Whether a block cannot be read or does not have its hash."""
        if are_zeros(self.layout, block, self._blocks[block].digest):
            return False
        try:
            self._materialize(block, None, hashed=True)
        except Torn:
            return True
        return False

    def _materialize(self, block: int, into: Bits | None, *, hashed: bool) -> tuple[Bits, _BlockState]:
        """Read a block from the checkpoint and decode its chunks onto it; `hashed`: check the result's hash."""
        spec = self.layout.block(block)
        bits = np.empty(spec.count, spec.dtype.bits) if into is None else into
        while True:
            at = self._blocks[block]
            if are_zeros(self.layout, block, at.digest):
                bits[:] = 0
                return bits, at
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
            if self._blocks[block] is at:  # otherwise `scatter` or `rebase` changed it meanwhile: try again
                raise Torn((block,))

    # ------------------------------------------------------------ writing

    def stage(self, header: ChunkHeader, body: bytes | bytearray | memoryview) -> StagedChunk:
        """Decode a verified chunk; see `codec.staging.stage_chunk`. Raises `Torn`, `PeerError`."""
        return stage_chunk(self._source([entry.block for entry in header.blocks], self.block), header, body)

    def scatter(self, stageds: Sequence[StagedChunk]) -> None:
        """Make the staged chunks part of this version: their blocks are decoded from the chunk store from now on.

        Calling it again changes nothing. Raises `Torn`, before any change, for blocks that have changed since they were
        staged.
        """
        pending: list[tuple[ChunkKey, StagedBlock]] = []
        torn: list[int] = []
        for staged in stageds:
            assert staged.key is not None
            for block in staged:
                current = self.hashes[block.block].tobytes()
                if current == block.old_hash:
                    pending.append((staged.key, block))
                elif current != block.new_hash:
                    torn.append(block.block)
        if torn:
            raise Torn(torn)
        for key, block in pending:
            self._note(key, block.block, block.new_hash)

    def follow(self, headers: Sequence[ChunkHeader]) -> None:
        """Make the chunks of a version part of this one without decoding them. `hashes` become those in the headers."""
        for header in headers:
            for entry in header.blocks:
                if self.hashes[entry.block].tobytes() != entry.new_hash:
                    self._note(header.key, entry.block, entry.new_hash)

    def _note(self, key: ChunkKey, block: int, new_hash: bytes) -> None:
        base, chain, digest = self._blocks[block]
        if are_zeros(self.layout, block, digest):  # whatever a file has there
            base, chain = _ZEROS, ()
        self._blocks[block] = _BlockState(base, (*chain, key), new_hash)  # one assignment, so that no reader sees a mix
        self.hashes[block] = np.frombuffer(new_hash, np.uint8)

    def place_block(self, block: int, files: BlockFiles, digest: bytes) -> None:
        """From now on a block is what `files` has of it, whose hash is `digest`."""
        self._blocks[block] = _BlockState(files, (), digest)
        self.hashes[block] = np.frombuffer(digest, np.uint8)

    def rests_on(self, block: int, files: BlockFiles) -> bool:
        """Whether a block is what `files` has of it, without further chunks."""
        at = self._blocks[block]
        return at.base is files and not at.chain

    def move_block(self, block: int, write: Callable[[bytes], object], files: BlockFiles) -> None:
        """Have `write` write a block's bytes to its place in `files`, and read it there afterwards.

        The place may be the one that the block is read from now: readers get it from memory meanwhile. No version may
        be applied meanwhile. Raises `Torn`, and what `write` raises.
        """
        bits, at = self._materialize(block, None, hashed=True)
        self._blocks[block] = _BlockState(_Memory(bits), (), at.digest)
        write(bits.tobytes())
        self._blocks[block] = _BlockState(files, (), at.digest)

    # ------------------------------------------------------------ a new checkpoint

    def frozen(self) -> "Layered":
        """A snapshot, which later versions do not change. Keep the chunks in the store while it is in use."""
        twin = copy.copy(self)
        twin.hashes, twin._blocks = self.hashes.copy(), list(self._blocks)
        twin.live = None if self.live is None else SnapshotBlocks(self.live)
        return twin

    def rebase(self, checkpoint: Checkpoint, frozen: "Layered") -> None:
        """Continue from `checkpoint`, which holds the bits of `frozen`. Raises as the constructor does.

        The chunks up to `frozen` are not needed any more.
        """
        base = BlockFiles.whole(self.layout, checkpoint)
        for block, (now, then) in enumerate(zip(self._blocks, frozen._blocks, strict=True)):
            if are_zeros(self.layout, block, then.digest) or now.chain[: len(then.chain)] != then.chain:
                continue  # its chain begins with zeros, at `frozen` or later
            self._blocks[block] = _BlockState(base, now.chain[len(then.chain) :], now.digest)
