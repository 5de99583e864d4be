"""The blocks of a checkpoint's files, or of any file, read one at a time into memory that is used again.

Nothing is mapped: a file that is cut short while it is read gives an error and not a SIGBUS, a block has the same bits
in the coded form as in its hash, and the process needs the memory of some blocks only.
"""

import contextlib
import os
import threading
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from codec.bits import DTYPES, Bits
from codec.checkpoint import Checkpoint
from codec.errors import UsageError
from codec.layout import BlockSpec, Layout
from codec.parts import draft_blocks
from node.host.raw import LENGTH, raw_parts
from node.host.stamp import Stamp, stamp
from node.trainers.tensors.rounding import bring
from node.trainers.tensors.weights import untied

__all__ = ["CheckpointBlocks", "DraftedBlocks", "RawBlocks"]


class _Read(NamedTuple):
    """`data`: uint8; the first `filled` bytes are of the file."""

    data: Any
    filled: int


class FileReader:
    """Reads parts of the files of `path`, in several threads, and tells whether one was written to meanwhile."""

    def __init__(self, path: Path, before: Stamp) -> None:
        """`before`: the files of `path` as they are to be read."""
        self._path, self._before = path, before
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._memories = threading.local()
        """Of each thread: its memory, by whether it is a second one."""

    def read(self, file: Path, offset: int, size: int, *, room: int = 0, second: bool = False) -> "_Read":
        """Read `size` bytes, fewer at the end of the file, into memory of at least `room`. It is valid until the same
        thread reads again with the same `second`. Raises `UsageError`."""
        room = max(room, size)
        memories: dict[bool, Any] | None = getattr(self._memories, "by_second", None)
        if memories is None:
            memories = self._memories.by_second = {}
        memory = memories.get(second)
        if memory is None or len(memory) < room:
            memory = memories[second] = np.empty(room, np.uint8)
        done = 0
        try:
            while done < size and (n := os.preadv(self._descriptor(file), [memory[done:size].data], offset + done)):
                done += n
        except OSError as error:
            raise UsageError(f"Cannot read {file}: {error.strerror}.") from error
        return _Read(memory[:room], done)

    def check_unchanged(self) -> None:
        """Raises `UsageError` when a file has changed since `before`."""
        try:
            unchanged = stamp(self._path) == self._before
        except OSError:  # the folder is gone, and perhaps not all of it was read
            unchanged = False
        if not unchanged:
            raise self.changed()

    def changed(self) -> UsageError:
        return UsageError(f"{self._path} was written to while it was read; nothing was published.")

    def close(self) -> None:
        """Close the files."""
        for fd in self._open.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self._open.clear()

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._open:
                self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return self._open[file]


class _Stored(NamedTuple):
    """Where a tensor is: its dtype, its file, and the offset of its first byte."""

    dtype: str
    file: Path
    offset: int


class CheckpointBlocks:
    """A checkpoint of the base's model as blocks of the base's layout, rounded or widened where its dtype is another.

    A `node.trainers.publish.encoding.BlockSource`. `nbytes`: 0, since nobody knows yet how much differs.
    """

    nbytes: Final = 0

    def __init__(self, checkpoint: Checkpoint, base: Layout, before: Stamp) -> None:
        """`before`: the checkpoint's files as they are to be read."""
        self._base = base
        self._reader = FileReader(checkpoint.path, before)
        self._stored, self._second = _places(checkpoint, base)

    def block(self, block: int) -> Bits:
        spec = self._base.block(block)
        name = self._base.tensors[spec.tensor].name
        bits = self._read(name, self._stored[name], spec)
        if (second := self._second.get(name)) is not None:
            other, stored = second
            if not np.array_equal(bits, self._read(other, stored, spec, second=True)):
                raise untied(self._base.tensor(name), other)
        return bits

    def check_unchanged(self) -> None:
        self._reader.check_unchanged()

    def close(self) -> None:
        self._reader.close()

    def _read(self, name: str, stored: _Stored, spec: BlockSpec, *, second: bool = False) -> Bits:
        dtype = DTYPES[stored.dtype].bits
        size = spec.count * dtype.itemsize
        data, filled = self._reader.read(stored.file, stored.offset + spec.start * dtype.itemsize, size, second=second)
        if filled < size:
            raise self._reader.changed()
        return bring(name, data.view(dtype), stored.dtype, self._base.tensors[spec.tensor].dtype)


class DraftedBlocks:
    """The blocks of two checkpoints: of a policy and of its draft model.

    A `node.trainers.publish.encoding.BlockSource`. `layout`: of both (`codec.parts.policy_part`).
    """

    nbytes: Final = 0

    def __init__(self, base: CheckpointBlocks, draft: CheckpointBlocks, layout: Layout) -> None:
        self._base, self._draft = base, draft
        self._first = draft_blocks(layout).start

    def block(self, block: int) -> Bits:
        return self._base.block(block) if block < self._first else self._draft.block(block - self._first)

    def check_unchanged(self) -> None:
        self._base.check_unchanged()
        self._draft.check_unchanged()

    def close(self) -> None:
        self._base.close()
        self._draft.close()


def _places(checkpoint: Checkpoint, base: Layout) -> tuple[Mapping[str, _Stored], Mapping[str, tuple[str, _Stored]]]:
    """By name of the base: where its bits are; and the checkpoint's second tensor of two that the base has tied."""
    stored = {
        spec.name: _Stored(*_place(checkpoint, checkpoint.layout.tensor(spec.name).name)) for spec in base.tensors
    }
    second = {
        spec.name: (alias, _Stored(*_place(checkpoint, alias)))
        for spec in base.tensors
        for alias in spec.aliases
        if alias in checkpoint.names
    }
    return stored, second


def _place(checkpoint: Checkpoint, name: str) -> tuple[str, Path, int]:
    spec, file, offset = checkpoint.place(name)
    return spec.dtype, file, offset


class RawBlocks:
    """Any file as blocks of a raw swarm's layout; see `node.host.raw`. A `node.trainers.publish.encoding.BlockSource`.

    `nbytes`: of the file.
    """

    def __init__(self, file: Path, layout: Layout) -> None:
        """Raises `UsageError` when the file is too large or cannot be read, or the swarm carries a policy."""
        parts = raw_parts(layout)
        try:
            before = stamp(file)
            self.nbytes = file.stat().st_size
        except OSError as error:
            raise UsageError(f"Cannot read {file}: {error.strerror}.") from error
        capacity = sum(parts.values())
        if self.nbytes > capacity:
            raise UsageError(
                f"{file} has {self.nbytes:,} bytes; this swarm takes files of at most {capacity:,} (--raw-mb)."
            )
        self._file, self._layout = file, layout
        self._starts = dict(zip(parts, accumulate(parts.values(), initial=0), strict=False))
        self._reader = FileReader(file, before)

    def block(self, block: int) -> Bits:
        spec = self._layout.block(block)
        name = self._layout.tensors[spec.tensor].name
        if name == LENGTH:
            return np.array([self.nbytes], np.uint64)
        at = self._starts[name] + spec.start
        wanted = max(0, min(spec.count, self.nbytes - at))
        memory = self._reader.read(self._file, at, wanted, room=spec.count)
        if memory.filled < wanted:
            raise self._reader.changed()
        memory.data[wanted : spec.count] = 0
        return memory.data[: spec.count]

    def check_unchanged(self) -> None:
        self._reader.check_unchanged()

    def close(self) -> None:
        self._reader.close()
