"""Weight patches: the changes of a version for an engine in another process, in one sealed memfd.

A patch lists (tensor, flat index, new bits). It holds new bits and not differences, so applying it twice does no harm.
All integers are little endian. After the magic, each block has a head (name length u16, element size u16, number of
changes u32, first element u64, then the block's hashes before and after, 32 bytes each), the name, the positions (u32,
relative to the first element, ascending) and the bits; each of the three is padded to 8 bytes. A head of zeros ends the
patch.
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
from codec.staging import StagedBlock, StagedChunk

__all__ = ["patch_hashes", "read_patch", "write_patch"]

_MAGIC: Final = b"SWP2\0\0\0\0"
_HEAD: Final = struct.Struct("<HHIQ32s32s")
_GROUP: Final = 1 << 22
"""Changes that `read_patch` yields at once: bounds the indices to 32 MiB, however large or dense the tensor is."""


def _padded(n: int) -> int:
    return -(-n // 8) * 8


def _entry_bytes(name: bytes, block: StagedBlock) -> int:
    return _HEAD.size + _padded(len(name)) + _padded(block.positions.nbytes) + _padded(block.bits.nbytes)


def write_patch(stageds: Iterable[StagedChunk], layout: Layout) -> tuple[int, int]:
    """Write a patch; (descriptor of a sealed memfd, its size in bytes). The caller closes the descriptor.

    Raises `UsageError` if there is too little memory, or the system has no memfds.
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
    """Yield (tensor name, flat indices, new bits): indices int64, ascending; bits unsigned, as wide as the dtype.

    A large tensor comes in several parts, in order. `fd` stays open. Raises `PeerError` for bytes that `write_patch`
    does not write.
    """
    data = _map(fd)
    group: list[tuple[NDArray[np.int64], Bits]] = []
    current: tuple[str, Any] | None = None
    for name, _, indices, bits, _, _ in _entries(data):
        if current != (name, bits.dtype) or sum(part[0].size for part in group) >= _GROUP:
            if current is not None:
                yield _concatenate(current[0], group)
            current, group = (name, bits.dtype), []
        elif indices[0] <= group[-1][0][-1]:
            raise PeerError(f"patch.positions: those of {name!r} are not ascending")
        group.append((indices, bits))
    if current is not None:
        yield _concatenate(current[0], group)


def patch_hashes(fd: int, layout: Layout) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (block, its hash before the patch, its hash after). `fd` stays open.

    Raises `PeerError` for bytes that `write_patch` does not write, or writes for another layout.
    """
    for name, start, _, bits, old_hash, new_hash in _entries(_map(fd)):
        try:
            block = layout.blocks_of(name)[start // BLOCK_ELEMENTS]
        except (KeyError, IndexError) as error:
            raise PeerError(f"patch.name: {name!r} has no block at {start}") from error
        spec = layout.block(block)
        if spec.start != start or spec.dtype.bits != bits.dtype:
            raise PeerError(f"patch.head: not a block of {name!r}")
        yield block, old_hash, new_hash


def _map(fd: int) -> memoryview:
    if os.fstat(fd).st_size < len(_MAGIC) + _HEAD.size:
        raise PeerError("patch: too short")
    data = memoryview(shared.map_readonly(fd))
    if data[: len(_MAGIC)] != _MAGIC:
        raise PeerError("patch.magic: not a patch of this version")
    return data


def _concatenate(name: str, group: list[tuple[NDArray[np.int64], Bits]]) -> tuple[str, NDArray[np.int64], Bits]:
    if len(group) == 1:
        return name, *group[0]
    return name, np.concatenate([part[0] for part in group]), np.concatenate([part[1] for part in group])


def _entries(data: memoryview) -> Iterator[tuple[str, int, NDArray[np.int64], Bits, bytes, bytes]]:
    """Yield (tensor name, first element of the block, flat indices, new bits, old and new hash of the block)."""
    at = len(_MAGIC)

    def read(length: int, field: str) -> memoryview:
        nonlocal at
        if length > len(data) - at:
            raise PeerError(f"patch.{field}: ends too soon")
        part = data[at : at + length]
        at += _padded(length)
        return part

    while True:
        name_length, itemsize, count, start, old_hash, new_hash = _HEAD.unpack(read(_HEAD.size, "head"))
        if name_length == itemsize == count == start == 0:
            if at != len(data):
                raise PeerError("patch.end: bytes follow the last entry")
            return
        if itemsize not in (1, 2, 4, 8) or not 0 < count <= BLOCK_ELEMENTS or start >= 1 << 50:
            raise PeerError("patch.head: a field is out of bounds")
        try:
            name = bytes(read(name_length, "name")).decode()
        except UnicodeDecodeError as error:
            raise PeerError("patch.name: not UTF-8") from error
        positions = np.frombuffer(read(4 * count, "positions"), "<u4")
        if positions[-1] >= BLOCK_ELEMENTS or np.any(positions[1:] <= positions[:-1]):
            raise PeerError(f"patch.positions: those of {name!r} are not ascending within a block")
        bits = np.frombuffer(read(itemsize * count, "bits"), f"<u{itemsize}")
        yield name, start, positions.astype(np.int64) + start, bits, old_hash, new_hash
