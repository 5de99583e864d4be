"""The formats of a seed: computed in full when the swarm begins, and for what each version changes before its seal.

The codes are functions of the bits of the base alone (`codec.formats`), so no trainer is asked. Only the formats that
the seed was started with are computed, so no member can make it compute more.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import structlog

from codec import BlockDelta, Layout, Replica, StagedBlock
from codec.chunk import CODER_RAW, BlockEntry
from codec.formats.coding import encode_format_block
from codec.formats.part import Change, FormatBlock, FormatPart, reader_of
from codec.formats.share import formats_of
from codec.formats.spec import FORMATS, MAX_FORMATS, FormatTensor
from codec.staging import block_hash, decode
from swarm.runtime import in_thread

__all__ = ["CLASSES", "BaseChanges", "FormatDelta", "FormatParts", "compute_formats"]

CLASSES: Final = 1 << MAX_FORMATS

_log = structlog.get_logger(__name__)
_KEPT_BYTES: Final = 512 << 20
"""Lists of what a version changes in the base that are kept until its seal; beyond it they are decoded again."""
_DECODED: Final = 8
"""Decoded blocks that are kept: a run of rows lies in a few."""
_AT_A_TIME: Final = 16
"""Blocks of a format that one call to a worker thread computes."""
_PROGRESS_BLOCKS: Final = 1024
"""Computed blocks after which the log says how far it is."""


def compute_formats(replica: Replica) -> None:
    """Compute every format that the replica's layout has from the base's bits in it, on all cores."""
    parts = [FormatPart(replica.layout, FORMATS[name]) for name in formats_of(replica.layout)]
    work = [(part, tensor) for part in parts for tensor in part.tensors]
    total = sum(tensor.codes.n_blocks + tensor.scales.n_blocks for _, tensor in work)
    done, lock, read = 0, threading.Lock(), reader_of(replica)
    names = ", ".join(formats_of(replica.layout))

    def compute(part: FormatPart, tensor: FormatTensor) -> None:
        nonlocal done
        for found in part.compute(tensor, read):
            replica.write_block(found.block, found.new.tobytes(), block_hash(found.new))
            with lock:
                done += 1
                if done % _PROGRESS_BLOCKS == 0:
                    _log.info("computing_formats", formats=names, done=round(100 * done / total))

    if work:
        _log.info("computing_formats", formats=names, done=0)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for _ in pool.map(compute, *zip(*work, strict=True)):
                pass


class BaseChanges(Mapping[int, Change]):
    """What the open version changes in blocks of the base, for worker threads.

    `payload(block)`: the entry and payload of a block in a chunk that was sent, from the store.
    """

    def __init__(
        self, replica: Replica, payload: Callable[[int], tuple[BlockEntry, bytes | memoryview] | None]
    ) -> None:
        self._replica = replica
        self._payload = payload
        self._listed: dict[int, StagedBlock | None] = {}
        self._nbytes = 0
        self._decoded: OrderedDict[int, Change] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, block: int, known: StagedBlock | None) -> None:
        """A block of the base is changed. `known`: how, if the trainer has listed it."""
        if known is not None:
            self._nbytes += known.positions.nbytes + known.bits.nbytes
        self._listed[block] = known if self._nbytes <= _KEPT_BYTES else None

    def __getitem__(self, block: int) -> Change:
        listed = self._listed[block]
        if listed is not None:
            return listed
        with self._lock:
            if block in self._decoded:
                return self._decoded[block]
        found = self._decode(block)
        with self._lock:
            self._decoded[block] = found
            while len(self._decoded) > _DECODED:
                self._decoded.popitem(last=False)
        return found

    def __contains__(self, block: object) -> bool:
        return block in self._listed  # the inherited method would decode it

    def __iter__(self) -> Iterator[int]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)

    def _decode(self, block: int) -> Change:
        sent = self._payload(block)
        assert sent is not None, f"block {block} of the open version is not in the store"
        entry, payload = sent
        old, dtype = self._replica.block(block), self._replica.layout.block(block).dtype
        decoded = decode(entry, memoryview(payload), old, dtype)
        if decoded is None:
            raise RuntimeError(f"block {block} of the open version cannot be decoded")
        return StagedBlock(block, *decoded, self._replica.hashes[block].tobytes(), entry.new_hash)


class FormatDelta(NamedTuple):
    """A changed block of a format. `known`: what it changes; None for a raw block, whose payload is its bits."""

    delta: BlockDelta
    known: StagedBlock | None


class FormatParts:
    """The formats of one model, at the seed."""

    def __init__(self, layout: Layout) -> None:
        self._parts = [FormatPart(layout, FORMATS[name]) for name in formats_of(layout)]
        self._quantising = np.zeros(layout.n_blocks, np.uint8)
        """By block of the base: a bit for each format that quantises it."""
        for number, part in enumerate(self._parts):
            for tensor in part.tensors:
                blocks = layout.blocks_of(tensor.base.name)
                self._quantising[blocks.start : blocks.stop] |= 1 << number

    def __bool__(self) -> bool:
        return bool(self._parts)

    def is_source(self, block: int) -> bool:
        """Whether formats depend on this block."""
        return bool(self._quantising[block])

    def class_of(self, block: int) -> int:
        """A number below `CLASSES`, equal for blocks of the base that the same formats quantise: members with a format
        hold all blocks of a class, or none."""
        return int(self._quantising[block])

    async def deltas(
        self, replica: Replica, changes: BaseChanges, coder: int
    ) -> AsyncGenerator[list[FormatDelta], None]:
        """What a version changes in all formats, some blocks at a time. `replica`: at the parent version."""
        found = self._deltas(replica, changes, coder)
        while some := await in_thread(_next_deltas, found):
            yield some

    def _deltas(self, replica: Replica, changes: BaseChanges, coder: int) -> Iterator[FormatDelta]:
        read = reader_of(replica)
        for part in self._parts:
            for tensor in part.touched(changes):
                for block in part.update(tensor, read, changes):
                    delta = _encoded(replica, block, coder)
                    if delta is not None:
                        yield delta


def _next_deltas(deltas: Iterator[FormatDelta]) -> list[FormatDelta]:
    return list(islice(deltas, _AT_A_TIME))


def _encoded(replica: Replica, block: FormatBlock, coder: int) -> FormatDelta | None:
    assert block.old is not None
    dtype = replica.layout.block(block.block).dtype
    encoded = encode_format_block(block.block, block.old, block.new, dtype, coder)
    if encoded is None:
        return None
    if encoded.positions is None or encoded.delta.coder == CODER_RAW:
        return FormatDelta(encoded.delta, None)
    old_hash = replica.hashes[block.block].tobytes()
    bits = block.new[encoded.positions]
    return FormatDelta(
        encoded.delta, StagedBlock(block.block, encoded.positions, bits, old_hash, encoded.delta.new_hash)
    )
