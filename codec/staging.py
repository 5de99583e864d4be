"""Staging: decode a verified chunk into scratch memory and check the hash of each block, before anything is written.

Staged changes can be written quickly once the version is sealed (`codec.replica`), or sent to an engine
(`codec.patch`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec import pco, rice, values
from codec.bits import Bits, DType
from codec.chunk import CODER_PCO, CODER_RAW, CODER_RICE, BlockDelta, BlockEntry, ChunkHeader, ChunkKey
from codec.errors import PeerError, SwarmError
from codec.kernels.scan import scatter
from codec.layout import BLOCK_ELEMENTS, Layout

__all__ = [
    "BlockSource",
    "EncodedBlock",
    "StagedBlock",
    "StagedChunk",
    "Torn",
    "all_positions",
    "block_hash",
    "check_block",
    "decode",
    "encode",
    "encode_changes",
    "forward",
    "raw_bits",
    "stage_chunk",
    "warm_up",
]


_PROBE_ELEMENTS: Final = 1 << 13
"""Elements per probe in `encode`: enough for the coder's statistics, and under a hundredth of a block."""


_LONG_BITS: Final = 7
"""Bits a change; a dense step of small changes takes fewer."""
_LONG_BYTE_BITS: Final = 4
"""The same for elements of one byte: new int8 codes take 6 to 7 bits."""


class Torn(SwarmError):
    """Some blocks hold neither the version before nor the one after. Fetch them whole from a peer.

    `blocks`: their ids.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        self.blocks = tuple(blocks)
        shown = ", ".join(map(str, self.blocks[:8])) + (", ..." if len(self.blocks) > 8 else "")
        super().__init__(f"blocks {shown} hold no known version")


@dataclass(frozen=True, slots=True, eq=False)
class StagedBlock:
    """New bits for one block. `positions`: uint32 within the block, ascending; `bits`: the new bits there."""

    block: int
    positions: NDArray[np.uint32]
    bits: Bits
    old_hash: bytes
    new_hash: bytes


@dataclass(frozen=True, slots=True, eq=False)
class StagedChunk:
    """A decoded chunk: the blocks that it changes, in ascending order, without those that had their new hash already.

    `key`: the chunk's key; None for changes that were never a chunk.
    """

    blocks: tuple[StagedBlock, ...]
    key: ChunkKey | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return sum(block.positions.nbytes + block.bits.nbytes + 128 for block in self.blocks)

    @property
    def changed(self) -> int:
        """The number of changed elements."""
        return sum(block.positions.size for block in self.blocks)

    def __iter__(self) -> Iterator[StagedBlock]:
        return iter(self.blocks)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBlock:
    """A block's delta, and what it changes. `changed`: elements. `positions`: theirs, uint32, ascending; None for a raw
    block that was not compared element by element."""

    delta: BlockDelta
    changed: int
    positions: NDArray[np.uint32] | None


class BlockSource(Protocol):
    """The blocks of one version of a model: a replica, in memory or layered."""

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
    """BLAKE3 (32 bytes) of a block's bytes, little endian: it identifies the version that the block holds."""
    return blake3(bits.view(np.uint8).data).digest()


def check_block(layout: Layout, block: int, data: bytes, expected_hash: bytes) -> Bits:
    """The elements of a whole block. Raises `PeerError` unless `data` has the right length and `expected_hash`."""
    spec = layout.block(block)
    if len(data) != spec.nbytes:
        raise PeerError(f"block.length: {len(data)} bytes, not {spec.nbytes}")
    bits = np.frombuffer(data, spec.dtype.bits)
    if block_hash(bits) != expected_hash:
        raise PeerError(f"block.hash: block {block} does not have the expected hash")
    return bits


def encode(
    block: int, old: Bits, new: Bits, dtype: DType, coder: int = CODER_RICE, *, new_values: bool = False
) -> BlockDelta | None:
    """The delta of a block from `old` to `new` with `coder`, or raw if that is no longer; None if nothing changed.

    `new_values`: whether a raw payload may be coded by `codec.values`.
    """
    encoded = encode_changes(block, old, new, dtype, coder, new_values=new_values)
    return None if encoded is None else encoded.delta


def encode_changes(
    block: int, old: Bits, new: Bits, dtype: DType, coder: int = CODER_RICE, *, new_values: bool = False
) -> EncodedBlock | None:
    """As `encode`, with the positions of the changes."""
    code = (pco if coder == CODER_PCO else rice).encode_changes
    if coder == CODER_RAW or all(_is_incompressible(code, old[part], new[part], dtype) for part in _probes(new.size)):
        changed = int(np.count_nonzero(old != new))
        payload = (values.encode_block(old, new, dtype) if new_values and changed else None) or new.tobytes()
        return EncodedBlock(BlockDelta(block, CODER_RAW, block_hash(new), payload), changed, None) if changed else None
    coded = code(old, new, dtype)
    if coded is None:
        return None
    payload, positions = coded
    if new_values and _may_be_new(len(payload), positions.size, new):
        other = values.encode_block(old, new, dtype)
        if other is not None and len(other) < len(payload):
            coder, payload = CODER_RAW, other
    if len(payload) >= new.nbytes:
        coder, payload = CODER_RAW, new.tobytes()
    return EncodedBlock(BlockDelta(block, coder, block_hash(new), payload), positions.size, positions)


def _may_be_new(nbytes: int, changed: int, new: Bits) -> bool:
    """Whether values might be shorter than the changes, which take `nbytes`: long codes of many changes, or of so few
    that a try costs nothing."""
    bits = 8 * nbytes / changed
    if 8 * changed > new.size:
        return bits > (_LONG_BITS if new.itemsize > 1 else _LONG_BYTE_BITS)
    return bits > 2 * _LONG_BITS or (bits > _LONG_BITS and changed <= _PROBE_ELEMENTS)


def _probes(size: int) -> Iterator[slice]:
    """Three short ranges of a block: at its start, middle and end."""
    return (slice(at, at + _PROBE_ELEMENTS) for at in (0, size // 2, max(0, size - _PROBE_ELEMENTS)))


def _is_incompressible(
    code: Callable[[Bits, Bits, DType], tuple[bytes, NDArray[np.uint32]] | None], old: Bits, new: Bits, dtype: DType
) -> bool:
    """Whether coding this range is no shorter than its raw bits.

    If that holds for all probes of a block (a first version, a file), coding the whole block would cost much time for
    nothing.
    """
    if 2 * np.count_nonzero(old != new) < new.size or not new.size:
        return False
    coded = code(old, new, dtype)
    return coded is not None and len(coded[0]) >= new.nbytes


class _ScratchBlock:
    """Reused scratch memory of one block each, for `with`."""

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
    """Positions and new bits, or None if the block would not have the hash that the header lists.

    `payload`: verified, so a payload that cannot be decoded means that `old` is not the block that it was coded
    against.
    """
    with _ScratchBlock() as scratch:
        copy = scratch.view(dtype.bits)[: old.size]
        try:
            if entry.coder == CODER_RAW:
                _write_raw(payload, old, copy, dtype)
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
def all_positions() -> NDArray[np.uint32]:
    """The positions of all elements of a block, read-only."""
    positions = np.arange(BLOCK_ELEMENTS, dtype=np.uint32)
    positions.flags.writeable = False
    return positions


def _changes(old: Bits, new: Bits, dtype: DType) -> tuple[NDArray[np.uint32], Bits]:
    """Positions and bits that change `old` into `new`.

    If most elements have changed, all positions are returned: that list is shared, whereas allocating 4 bytes per
    element would take longer than copying the bits.
    """
    if 2 * np.count_nonzero(old != new) > new.size:
        return all_positions()[: new.size], new.copy()
    positions = rice.changed_positions(old, new, dtype)
    return positions, rice.bits_at(new, positions, dtype)


def raw_bits(payload: bytes | memoryview, old: Bits, dtype: DType) -> Bits:
    """The block's elements after a raw payload. `old`: the block before. Raises `PeerError`."""
    new = np.empty_like(old)
    _write_raw(payload, old, new, dtype)
    return new


def _write_raw(payload: bytes | memoryview, old: Bits, new: Bits, dtype: DType) -> None:
    """Write the block after a raw payload to `new`, which may be `old`: a shorter one is of `codec.values`."""
    if len(payload) == new.nbytes:
        new[:] = np.frombuffer(payload, dtype.bits)
        return
    if new is not old:
        new[:] = old
    values.decode_onto(payload, new, dtype)


def forward(entry: BlockEntry, payload: bytes, bits: Bits, dtype: DType) -> None:
    """Apply a payload to a block's `bits` in place.

    Raises `PeerError` if it cannot be decoded against them. The result is not checked: the caller compares its hash.
    """
    if entry.coder == CODER_RAW:
        _write_raw(payload, bits, bits, dtype)
    else:
        positions, new = (pco if entry.coder == CODER_PCO else rice).decode_block(payload, bits, dtype)
        scatter(bits, positions, new)


def stage_chunk(
    source: BlockSource,
    header: ChunkHeader,
    body: bytes | bytearray | memoryview,
    holds: Callable[[int], bool] = lambda block: True,
) -> StagedChunk:
    """Decode every block of a verified chunk that `source` holds against it; nothing is written.

    A block that already has its new hash is skipped. Raises `Torn` for blocks that would not have their new hash,
    because their bits are not those of the chunk's parent. Raises `PeerError` for a chunk of another model, or with a
    block that the model does not have.
    """
    layout = source.layout
    if header.layout_hash != layout.hash:
        raise PeerError("chunk.layout hash: belongs to another model")
    if header.blocks[-1].block >= layout.n_blocks:
        raise PeerError(f"chunk.block: {header.blocks[-1].block} of {layout.n_blocks}")
    staged: list[StagedBlock] = []
    torn: list[int] = []
    for entry, payload in zip(header.blocks, header.payloads(body), strict=True):
        old_hash = source.hashes[entry.block].tobytes()
        if old_hash == entry.new_hash or not holds(entry.block):
            continue
        dtype = layout.block(entry.block).dtype
        decoded = decode(entry, payload, source.block(entry.block), dtype)
        if decoded is None:
            torn.append(entry.block)
        else:
            staged.append(StagedBlock(entry.block, *decoded, old_hash, entry.new_hash))
    if torn:
        raise Torn(torn)
    return StagedChunk(tuple(staged), header.key)


def warm_up(dtype: DType) -> None:
    """Compile or load the kernels of rice and of new values for `dtype`, so that no later call waits for them."""
    rice.warm_up(dtype)
    values.warm_up(dtype)
