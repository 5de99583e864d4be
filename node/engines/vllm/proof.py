"""Compares an engine's live bits with the hashes that they must have, block by block, over all its ranks.

The driver fills one scratch memory with the inverse of the replica's bits, which is wrong everywhere. Every rank writes
its live bits into it, in checkpoint order. Then every rank compares its live bits with the scratch, so that two ranks
with different copies of a weight are found. Then the driver hashes the blocks. All of it runs while the engine
generates: only a commit changes weights, and the caller holds commits back.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec import Layout, Replica, shared
from node.engines.vllm.links import PluginLink, wait
from node.engines.vllm.plugin.swarm_vllm.messages import Compare, Did, Differs, Gather, Part

__all__ = ["wrong_blocks"]

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


def _groups(layout: Layout, ranges: Iterable[_Range]) -> Iterator[list[tuple[_Range, Part]]]:
    """Ranges that share a scratch, each with its place in it."""
    group: list[tuple[_Range, Part]] = []
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
    replica: Replica, ranks: Sequence[PluginLink], group: list[tuple[_Range, Part]], expected: NDArray[np.uint8]
) -> set[int]:
    layout, last = replica.layout, group[-1][1]
    nbytes = last.at + last.count * layout.tensor(last.name).type.itemsize
    fd, memory = shared.reserve("swarm-scratch", nbytes)
    if fd is None:
        raise shared.no_sharing()
    try:
        scratch = np.frombuffer(memory, np.uint8)
        for rows, part in group:
            bits = replica.bits(rows.name)[rows.start : rows.end]
            np.invert(bits, out=_view(scratch, part, bits.dtype))
        parts = tuple(part for _, part in group)
        asked = [rank.ask(lambda n: Gather(n, parts), [fd]) for rank in ranks]
        for answer in asked:
            wait(answer, Did, WITHIN_S)
        asked = [rank.ask(lambda n: Compare(n, parts), [fd]) for rank in ranks]
        differing = {name for answer in asked for name in wait(answer, Differs, WITHIN_S).names}
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            found = pool.map(lambda pair: _wrong_in_range(layout, scratch, pair, expected), group)
            wrong = {block for blocks in found for block in blocks}
        wrong |= {block for rows, _ in group if rows.name in differing for block in rows.blocks}
        return wrong
    finally:
        os.close(fd)


def _wrong_in_range(
    layout: Layout, scratch: NDArray[np.uint8], pair: tuple[_Range, Part], expected: NDArray[np.uint8]
) -> list[int]:
    rows, part = pair
    wrong: list[int] = []
    for block in rows.blocks:
        spec = layout.block(block)
        bits = _view(scratch, part, spec.dtype.bits)[spec.start - rows.start :][: spec.count]
        if blake3(bits.view(np.uint8).data).digest() != expected[block].tobytes():
            wrong.append(block)
    return wrong


def _view(scratch: NDArray[np.uint8], part: Part, dtype: np.dtype[Any]) -> NDArray[Any]:
    return scratch[part.at : part.at + part.count * dtype.itemsize].view(dtype)
