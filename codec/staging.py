"""Verify early: decode a verified chunk into scratch, and predict the hash of each block, touching nothing.

What comes out can be written at the seal in a moment (`codec.replica`), or sent to an engine (`codec.patch`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec import pco, rice
from codec.bits import Bits, DType
from codec.chunk import CODER_PCO, CODER_RAW, CODER_RICE, BlockDelta, BlockEntry, ChunkHeader, ChunkKey
from codec.errors import PeerError, SwarmError
from codec.layout import BLOCK_ELEMENTS, Layout
from codec.scan import scatter

__all__ = ["Source", "Staged", "StagedBlock", "Torn", "block_hash", "decode", "encode", "forward", "stage_chunk"]


_PROBE_ELEMENTS: Final = 1 << 13
"""Long enough for the coder's statistics, and a hundredth of a block."""


class Torn(SwarmError):
    """Blocks that hold neither the version before nor the one after: fetch them whole from a peer.

    `blocks`: their ids.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        self.blocks = tuple(blocks)
        shown = ", ".join(map(str, self.blocks[:8])) + (", ..." if len(self.blocks) > 8 else "")
        super().__init__(f"blocks {shown} hold no known version")


@dataclass(frozen=True, slots=True, eq=False)
class StagedBlock:
    """New bits for one block. `positions`: uint32 within the block, ascending; `bits`: uintN, one for each."""

    block: int
    positions: NDArray[np.uint32]
    bits: Bits
    old_hash: bytes
    new_hash: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A chunk, decoded: the blocks that it changes, in ascending order. Blocks that were already there are left out.

    `key`: the chunk's; None for what never was one.
    """

    blocks: tuple[StagedBlock, ...]
    key: ChunkKey | None = None

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(block.positions.nbytes + block.bits.nbytes + 128 for block in self.blocks)

    @property
    def changed(self) -> int:
        """Elements changed."""
        return sum(block.positions.size for block in self.blocks)

    def __iter__(self) -> Iterator[StagedBlock]:
        return iter(self.blocks)


class Source(Protocol):
    """Whatever holds one version of a model's blocks: a replica, or a mapped checkpoint."""

    @property
    def layout(self) -> Layout: ...

    @property
    def hashes(self) -> NDArray[np.uint8]:
        """uint8 (n_blocks, 32)."""
        ...

    def block(self, block: int) -> Bits:
        """The block's elements, flat."""
        ...


def block_hash(bits: Bits) -> bytes:
    """BLAKE3 of a block's bytes, little endian: which version it holds."""
    return blake3(bits.view(np.uint8).data).digest()


def encode(block: int, old: Bits, new: Bits, dtype: DType, coder: int = CODER_RICE) -> BlockDelta | None:
    """The block's change with `coder`, or raw where that is shorter; None if nothing changed."""
    code = (pco if coder == CODER_PCO else rice).encode_block
    raw = coder == CODER_RAW or all(_rewritten(code, old[part], new[part], dtype) for part in _probes(new.size))
    payload = new.tobytes() if raw else code(old, new, dtype)
    if payload is None or (coder == CODER_RAW and np.array_equal(old, new)):
        return None
    if raw or len(payload) >= new.nbytes:
        coder, payload = CODER_RAW, new.tobytes()
    return BlockDelta(block, coder, block_hash(new), payload)


def _probes(size: int) -> Iterator[slice]:
    """Three short stretches of a block."""
    return (slice(at, at + _PROBE_ELEMENTS) for at in (0, size // 2, max(0, size - _PROBE_ELEMENTS)))


def _rewritten(code: Callable[[Bits, Bits, DType], bytes | None], old: Bits, new: Bits, dtype: DType) -> bool:
    """Coding a stretch gains nothing: where all of a block is so, coding the whole of it is time lost, and much of it
    (a first version, a file)."""
    if 2 * np.count_nonzero(old != new) < new.size or not new.size:
        return False
    payload = code(old, new, dtype)
    return payload is not None and len(payload) >= new.nbytes


class _Copies:
    """Blocks of scratch, reused."""

    _free: list[NDArray[np.uint64]] = []  # noqa: RUF012

    def __enter__(self) -> NDArray[np.uint64]:
        try:
            self._copy = self._free.pop()
        except IndexError:
            self._copy = np.empty(BLOCK_ELEMENTS, np.uint64)
        return self._copy

    def __exit__(self, *error: object) -> None:
        self._free.append(self._copy)


def decode(entry: BlockEntry, payload: memoryview, old: Bits, dtype: DType) -> tuple[NDArray[np.uint32], Bits] | None:
    """Positions and new bits, or None when the block would not get the hash that the header promises.

    `payload`: verified, so bytes that cannot be decoded mean that `old` is not what they were made against.
    """
    with _Copies() as scratch:
        copy = scratch.view(dtype.bits)[: old.size]
        try:
            if entry.coder == CODER_RAW:
                if len(payload) != old.nbytes:
                    raise PeerError(f"raw.length: {len(payload)} bytes, not {old.nbytes}")
                copy[:] = np.frombuffer(payload, dtype.bits)
                positions, bits = _changes(old, copy, dtype)
            elif entry.coder == CODER_PCO:
                positions, bits = pco.decode_block(payload, old, dtype)
                copy[:] = old
                scatter(copy, positions, bits)
            else:
                positions, bits = rice.decode_onto(payload, old, copy, dtype)
        except PeerError:
            return None
        return (positions, bits) if block_hash(copy) == entry.new_hash else None


@cache
def _everywhere() -> NDArray[np.uint32]:
    """The position of every element of a block, for reading."""
    positions = np.arange(BLOCK_ELEMENTS, dtype=np.uint32)
    positions.flags.writeable = False
    return positions


def _changes(old: Bits, new: Bits, dtype: DType) -> tuple[NDArray[np.uint32], Bits]:
    """Positions and bits that make `new` of `old`. Where most have changed it is all of them, whose list there is
    already: four bytes of fresh memory for each element would take longer than the bits."""
    if 2 * np.count_nonzero(old != new) > new.size:
        return _everywhere()[: new.size], new.copy()
    positions = rice.changed_positions(old, new, dtype)
    return positions, new[positions]


def forward(entry: BlockEntry, payload: bytes, bits: Bits, dtype: DType) -> None:
    """Change a block's `bits` in place as the payload says. Raises `PeerError` when it cannot be decoded against them;
    whether the result is the block that was meant, only its hash can say."""
    if entry.coder == CODER_RAW:
        if len(payload) != bits.nbytes:
            raise PeerError(f"raw.length: {len(payload)} bytes, not {bits.nbytes}")
        bits[:] = np.frombuffer(payload, dtype.bits)
    else:
        positions, new = (pco if entry.coder == CODER_PCO else rice).decode_block(payload, bits, dtype)
        scatter(bits, positions, new)


def stage_chunk(source: Source, header: ChunkHeader, body: bytes | bytearray | memoryview) -> Staged:
    """Decode every block of a verified chunk against `source`; nothing is written.

    A block that has its new hash already is skipped. Raises `Torn` when a block would not get its hash: its bits are
    not those of the chunk's parent. Raises `PeerError` for another model's chunk, or one that lists a block twice over.
    """
    layout = source.layout
    if header.layout_hash != layout.hash:
        raise PeerError("chunk.layout hash: of another model")
    if header.blocks[-1].block >= layout.n_blocks:
        raise PeerError(f"chunk.block: {header.blocks[-1].block} of {layout.n_blocks}")
    staged: list[StagedBlock] = []
    torn: list[int] = []
    for entry, payload in zip(header.blocks, header.payloads(body), strict=True):
        old_hash = source.hashes[entry.block].tobytes()
        if old_hash == entry.new_hash:
            continue
        dtype = layout.block(entry.block).dtype
        decoded = decode(entry, payload, source.block(entry.block), dtype)
        if decoded is None:
            torn.append(entry.block)
        else:
            staged.append(StagedBlock(entry.block, *decoded, old_hash, entry.new_hash))
    if torn:
        raise Torn(torn)
    return Staged(tuple(staged), header.key)
