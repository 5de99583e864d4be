"""Compares an engine's live bits with the hashes that they must have, block by block, over all its ranks.

The driver fills one scratch memory with the inverse of the replica's bits, which is wrong everywhere. Every rank writes
its live bits into it, in checkpoint order. Then every rank compares its live bits with the scratch, so that two ranks
with different copies of a weight are found. Then the driver hashes the blocks. All of it runs while the engine
generates: only a commit changes weights, and the caller holds commits back.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec import Layout, Replica, shared
from codec.bits import Bits
from node.engines.vllm.links import PluginLink, wait
from node.engines.vllm.plugin.swarm_vllm.messages import Compare, Did, Differs, Gather, Part

__all__ = ["live_blocks", "wrong_blocks"]

SCRATCH_BYTES: Final = 256 << 20
"""Weights that are read back at a time."""
WITHIN_S: Final = 300.0
"""For the ranks to write or compare one scratch."""


@dataclass(slots=True)
class _Range:
    """Whole rows of a tensor, elements [start, end), and the blocks that lie in them."""

    name: str
    start: int
    end: int
    blocks: list[int] = field(default_factory=list)


_Group = list[tuple[_Range, Part]]
"""Ranges that share a scratch, each with its place in it."""


def wrong_blocks(
    replica: Replica, ranks: Sequence[PluginLink], blocks: Iterable[int], expected: NDArray[np.uint8]
) -> set[int]:
    """The blocks whose live bits do not hash to `expected`, or of which two ranks hold different copies.

    `blocks`: ascending. `expected`: uint8, (n_blocks, 32). Raises `EngineError` when a rank does not answer.
    """
    wrong: set[int] = set()
    layout = replica.layout
    for group in _groups(layout, _ranges(layout, blocks)):
        wrong |= _wrong_in_group(replica, ranks, group, expected)
    return wrong


def live_blocks(layout: Layout, ranks: Sequence[PluginLink], blocks: Sequence[int]) -> Iterator[tuple[int, Bits]]:
    """(block, its live bits) of `blocks`, ascending; the bits last until the next one is asked for.

    They are zeros where two ranks hold different copies. Raises `EngineError` when a rank does not answer.
    """
    for group in _groups(layout, _ranges(layout, blocks)):
        with _scratch(layout, group) as (fd, scratch):
            differing = _gather(ranks, group, fd)
            for rows, part in group:
                for block in rows.blocks:
                    bits = _of_block(layout, scratch, rows, part, block)
                    yield block, np.zeros_like(bits) if rows.name in differing else bits


def _ranges(layout: Layout, blocks: Iterable[int]) -> Iterator[_Range]:
    """The blocks, widened to whole rows and joined where they meet, each range at most as large as the scratch."""
    current: _Range | None = None
    for block in blocks:
        spec = layout.block(block)
        tensor = layout.tensors[spec.tensor]
        row = prod(tensor.shape[1:]) or 1
        start, end = spec.start // row * row, -(-(spec.start + spec.count) // row) * row
        fits = current is not None and (end - current.start) * spec.dtype.itemsize <= SCRATCH_BYTES
        if current is not None and current.name == spec.name and start <= current.end and fits:
            current.end = end
        else:
            if current is not None:
                yield current
            current = _Range(spec.name, start, end)
        current.blocks.append(block)
    if current is not None:
        yield current


def _groups(layout: Layout, ranges: Iterable[_Range]) -> Iterator[_Group]:
    """Ranges that share a scratch, each with its place in it."""
    group: _Group = []
    at = 0
    for rows in ranges:
        nbytes = -(-(rows.end - rows.start) * layout.tensor(rows.name).type.itemsize // 64) * 64
        if group and at + nbytes > SCRATCH_BYTES:
            yield group
            group, at = [], 0
        group.append((rows, Part(rows.name, rows.start, rows.end - rows.start, at)))
        at += nbytes
    if group:
        yield group


def _wrong_in_group(
    replica: Replica, ranks: Sequence[PluginLink], group: _Group, expected: NDArray[np.uint8]
) -> set[int]:
    layout = replica.layout
    with _scratch(layout, group) as (fd, scratch):
        for rows, part in group:
            bits = replica.bits(rows.name)[rows.start : rows.end]
            np.invert(bits, out=_view(scratch, part, bits.dtype))
        differing = _gather(ranks, group, fd)
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            found = pool.map(lambda pair: _wrong_in_range(layout, scratch, pair, expected), group)
            wrong = {block for blocks in found for block in blocks}
        wrong |= {block for rows, _ in group if rows.name in differing for block in rows.blocks}
        return wrong


@contextmanager
def _scratch(layout: Layout, group: _Group) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(descriptor, memory) of a scratch of zeros for `group`."""
    last = group[-1][1]
    fd, memory = shared.reserve("swarm-scratch", last.at + last.count * layout.tensor(last.name).type.itemsize)
    if fd is None:
        raise shared.no_sharing()
    try:
        yield fd, np.frombuffer(memory, np.uint8)
    finally:
        os.close(fd)


def _gather(ranks: Sequence[PluginLink], group: _Group, fd: int) -> set[str]:
    """Have every rank write its live bits into the scratch. Returns the tensors of which two ranks' copies differ."""
    parts = tuple(part for _, part in group)
    asked = [rank.ask(lambda n: Gather(n, parts), [fd]) for rank in ranks]
    for answer in asked:
        wait(answer, Did, WITHIN_S)
    asked = [rank.ask(lambda n: Compare(n, parts), [fd]) for rank in ranks]
    return {name for answer in asked for name in wait(answer, Differs, WITHIN_S).names}


def _wrong_in_range(
    layout: Layout, scratch: NDArray[np.uint8], pair: tuple[_Range, Part], expected: NDArray[np.uint8]
) -> list[int]:
    rows, part = pair
    wrong: list[int] = []
    for block in rows.blocks:
        bits = _of_block(layout, scratch, rows, part, block)
        if blake3(bits.view(np.uint8).data).digest() != expected[block].tobytes():
            wrong.append(block)
    return wrong


def _of_block(layout: Layout, scratch: NDArray[np.uint8], rows: _Range, part: Part, block: int) -> Bits:
    spec = layout.block(block)
    return _view(scratch, part, spec.dtype.bits)[spec.start - rows.start :][: spec.count]


def _view(scratch: NDArray[np.uint8], part: Part, dtype: np.dtype[Any]) -> NDArray[Any]:
    return scratch[part.at : part.at + part.count * dtype.itemsize].view(dtype)
