"""Reads blocks out of a checkpoint's files by system calls, without mapping them.

A bad sector, or a file that another program cuts off, raises `OSError`; on a mapped file it would kill the process with
SIGBUS. Reading into memory that exists is also cheaper than copying from a map, which faults in each page twice.
"""

import os
import weakref
from pathlib import Path

import numpy as np

from codec.bits import Bits
from codec.checkpoint import Checkpoint
from codec.errors import PeerError
from codec.layout import BlockSpec, Layout

__all__ = ["BlockFiles"]


class BlockFiles:
    """The blocks of a layout in open files. Any number of threads may read. `names`: the tensors that are there.

    Blocks of other tensors are zeros (`codec.zeros`).
    """

    def __init__(self, places: dict[str, tuple[Path, int]]) -> None:
        """`places`: by tensor, its file and the offset of its first byte. Raises `OSError`."""
        files: dict[Path, int] = {}
        self._places: dict[str, tuple[int, int]] = {}
        for name, (path, offset) in places.items():
            if path not in files:
                files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, files[path])
            self._places[name] = files[path], offset
        self.names = frozenset(places)

    @classmethod
    def whole(cls, layout: Layout, checkpoint: Checkpoint) -> "BlockFiles":
        """All tensors of `layout`. Raises `KeyError` or `PeerError` unless `checkpoint` has them under these names with
        the same dtype and shape, `OSError`. Tensors beyond the base may be absent: they are zeros then."""
        places = {}
        for tensor in layout.tensors:
            if tensor.name >= "~" and not checkpoint.has(tensor.name):
                continue
            spec, path, offset = checkpoint.place(tensor.name)
            if (spec.dtype, spec.shape) != (tensor.dtype, tensor.shape):
                raise PeerError(f"checkpoint: {tensor.name!r} has another dtype or shape")
            places[tensor.name] = path, offset
        return cls(places)

    @classmethod
    def matching(cls, layout: Layout, checkpoint: Checkpoint) -> "BlockFiles":
        """Those tensors of `layout` that `checkpoint` has with the same dtype and shape, under any name of a tied
        tensor. Raises `OSError`."""
        available = {name: tensor for tensor in checkpoint.layout.tensors for name in (tensor.name, *tensor.aliases)}
        places = {}
        for tensor in layout.tensors:
            found = available.get(tensor.name)
            if found is not None and (found.dtype, found.shape) == (tensor.dtype, tensor.shape):
                _, path, offset = checkpoint.place(found.name)
                places[tensor.name] = path, offset
        return cls(places)

    def read(self, spec: BlockSpec, into: Bits) -> None:
        """Read a block into `into`. Raises `OSError` if the disk does not return all of it."""
        if spec.name not in self._places:
            into[:] = 0
            return
        fd, offset = self._places[spec.name]
        view = into.view(np.uint8).data
        at = offset + spec.start * into.itemsize
        while view:
            count = os.preadv(fd, [view], at)
            if count == 0:
                raise OSError(f"{spec.name}: the file is cut off")
            view, at = view[count:], at + count
