"""Reads a weight patch, in the format of `codec.patch`. A rank decodes it by itself, so it checks it again."""

import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["BadPatch", "entries"]

_MAGIC = b"SWP2\0\0\0\0"
_HEAD = struct.Struct("<HHIQ32s32s")


class BadPatch(Exception):
    """The bytes are not a patch."""


def entries(data: NDArray[np.uint8]) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.unsignedinteger]]]:
    """(tensor name, ascending flat indices, new bits) of each block in order. Raises `BadPatch`."""
    view = data.data
    if view[: len(_MAGIC)] != _MAGIC:
        raise BadPatch("the patch is of another version of swarm-node: install the plugin that came with it")
    at = len(_MAGIC)

    def take(length: int) -> memoryview:
        nonlocal at
        if length > len(view) - at:
            raise BadPatch("the patch ends too soon")
        part = view[at : at + length]
        at += -(-length // 8) * 8
        return part

    while True:
        length, itemsize, count, start, _, _ = _HEAD.unpack(take(_HEAD.size))
        if not itemsize:
            return
        if itemsize not in (1, 2, 4, 8):
            raise BadPatch(f"elements of {itemsize} bytes")
        name = bytes(take(length)).decode()
        positions = np.frombuffer(take(4 * count), "<u4")
        bits = np.frombuffer(take(itemsize * count), f"<u{itemsize}")
        yield name, positions.astype(np.int64) + start, bits
