"""How a version's changes reach an engine in another process: one sealed memfd, (tensor, flat index, new bits).

New bits, not differences: patching twice does no harm. The bytes, all little endian: magic, then for each entry a head
(name length, element size, number of changes, first element: u16, u16, u32, u64; the hashes that the block has before
and afterwards, 32 bytes each), the name, padding to 8, positions (u32, relative to the first element, ascending),
padding to 8, bits, padding to 8. A head of zeros ends it.
"""

import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec import shared
from codec.bits import Bits
from codec.errors import PeerError
from codec.layout import BLOCK_ELEMENTS, Layout
from codec.staging import Staged, StagedBlock

__all__ = ["patch_hashes", "read_patch", "write_patch"]

_MAGIC: Final = b"SWP2\0\0\0\0"
_HEAD: Final = struct.Struct("<HHIQ32s32s")
_GROUP: Final = 1 << 22
"""Changes handed out at once: 32 MiB of indices, however large or dense the tensor."""


def _padded(n: int) -> int:
    return -(-n // 8) * 8


def _entry_bytes(name: bytes, block: StagedBlock) -> int:
    return _HEAD.size + _padded(len(name)) + _padded(block.positions.nbytes) + _padded(block.bits.nbytes)


def write_patch(stageds: Iterable[Staged], layout: Layout) -> tuple[int, int]:
    """(descriptor of a sealed memfd, its bytes): pass the descriptor on, then close it.

    Raises `UsageError` when there is no memory for it, or no memfds here.
    """
    blocks = sorted((block for staged in stageds for block in staged), key=lambda block: block.block)
    names = [layout.block(block.block).name.encode() for block in blocks]
    sizes = (_entry_bytes(name, block) for name, block in zip(names, blocks, strict=True))
    nbytes = len(_MAGIC) + sum(sizes) + _HEAD.size
    fd, memory = shared.reserve("swarm-patch", nbytes)
    if fd is None:
        raise shared.no_sharing()
    memory[: len(_MAGIC)] = _MAGIC
    at = len(_MAGIC)

    def put(data: bytes | memoryview) -> None:
        nonlocal at
        memory[at : at + len(data)] = data
        at += _padded(len(data))

    for name, block in zip(names, blocks, strict=True):
        spec = layout.block(block.block)
        put(
            _HEAD.pack(len(name), spec.dtype.itemsize, block.positions.size, spec.start, block.old_hash, block.new_hash)
        )
        put(name)
        put(block.positions.view(np.uint8).data)
        put(np.ascontiguousarray(block.bits).view(np.uint8).data)
    memory.close()
    shared.seal_forever(fd)
    return fd, nbytes


def read_patch(fd: int) -> Iterator[tuple[str, NDArray[np.int64], Bits]]:
    """(tensor name, flat indices, new bits) by and by: indices int64, ascending; bits uintN.

    A large tensor comes in several parts, in order. `fd` stays open. Raises `PeerError` for what `write_patch` never
    writes.
    """
    data = _mapped(fd)
    group: list[tuple[NDArray[np.int64], Bits]] = []
    current: tuple[str, Any] | None = None
    for name, _, indices, bits, _, _ in _entries(data):
        if current != (name, bits.dtype) or sum(part[0].size for part in group) >= _GROUP:
            if current is not None:
                yield _joined(current[0], group)
            current, group = (name, bits.dtype), []
        elif indices[0] <= group[-1][0][-1]:
            raise PeerError(f"patch.positions: of {name!r} not ascending")
        group.append((indices, bits))
    if current is not None:
        yield _joined(current[0], group)


def patch_hashes(fd: int, layout: Layout) -> Iterator[tuple[int, bytes, bytes]]:
    """(block, the hashes that it has before and after the patch) by and by. `fd` stays open.

    Raises `PeerError` for what `write_patch` never writes, or writes for another layout.
    """
    for name, start, _, bits, old_hash, new_hash in _entries(_mapped(fd)):
        try:
            block = layout.blocks_of(name)[start // BLOCK_ELEMENTS]
        except (KeyError, IndexError) as error:
            raise PeerError(f"patch.name: {name!r} has no block at {start}") from error
        spec = layout.block(block)
        if spec.start != start or spec.dtype.bits != bits.dtype:
            raise PeerError(f"patch.head: not a block of {name!r}")
        yield block, old_hash, new_hash


def _mapped(fd: int) -> memoryview:
    if os.fstat(fd).st_size < len(_MAGIC) + _HEAD.size:
        raise PeerError("patch: too short")
    data = memoryview(shared.map_readonly(fd))
    if data[: len(_MAGIC)] != _MAGIC:
        raise PeerError("patch.magic: not a patch of this version")
    return data


def _joined(name: str, group: list[tuple[NDArray[np.int64], Bits]]) -> tuple[str, NDArray[np.int64], Bits]:
    if len(group) == 1:
        return name, *group[0]
    return name, np.concatenate([part[0] for part in group]), np.concatenate([part[1] for part in group])


def _entries(data: memoryview) -> Iterator[tuple[str, int, NDArray[np.int64], Bits, bytes, bytes]]:
    """(tensor name, first element of the block, flat indices, new bits, old and new hash of the block)."""
    at = len(_MAGIC)

    def take(length: int, field: str) -> memoryview:
        nonlocal at
        if length > len(data) - at:
            raise PeerError(f"patch.{field}: ends too soon")
        part = data[at : at + length]
        at += _padded(length)
        return part

    while True:
        name_length, itemsize, count, start, old_hash, new_hash = _HEAD.unpack(take(_HEAD.size, "head"))
        if name_length == itemsize == count == start == 0:
            if at != len(data):
                raise PeerError("patch.end: bytes too many")
            return
        if itemsize not in (1, 2, 4, 8) or not 0 < count <= BLOCK_ELEMENTS or start >= 1 << 50:
            raise PeerError("patch.head: impossible")
        try:
            name = bytes(take(name_length, "name")).decode()
        except UnicodeDecodeError as error:
            raise PeerError("patch.name: not UTF-8") from error
        positions = np.frombuffer(take(4 * count, "positions"), "<u4")
        if positions[-1] >= BLOCK_ELEMENTS or np.any(positions[1:] <= positions[:-1]):
            raise PeerError(f"patch.positions: of {name!r} not ascending within a block")
        bits = np.frombuffer(take(itemsize * count, "bits"), f"<u{itemsize}")
        yield name, start, positions.astype(np.int64) + start, bits, old_hash, new_hash
