"""Holding an engine's live bits against what they must be, block by block, over all its ranks.

Every rank writes what it has into one scratch memory, in checkpoint order, over bits that are wrong everywhere; then
each compares what it has with what stands there, so that two copies of one weight cannot differ unseen; then the
blocks are hashed. Weights are read while the engine generates: only a commit changes them, and it waits its turn.
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
from node.engines.vllm.links import Link, wait
from node.engines.vllm.plugin.swarm_vllm.messages import Compare, Did, Differs, Gather, Part

__all__ = ["wrong_blocks"]

SCRATCH_BYTES: Final = 256 << 20
"""Weights looked at in one go."""
WITHIN_S: Final = 300.0


@dataclass(slots=True)
class _Range:
    """Whole rows of a tensor, and the blocks that lie in them."""

    name: str
    start: int
    end: int
    blocks: list[int] = field(default_factory=list)


def wrong_blocks(
    layout: Layout, replica: Replica, ranks: Sequence[Link], blocks: Iterable[int], expected: NDArray[np.uint8]
) -> set[int]:
    """Those of `blocks` (ascending) whose live bits do not hash to `expected` (uint8, (n_blocks, 32)), or of which two
    ranks hold different copies. Raises `EngineError` when a rank does not answer."""
    wrong: set[int] = set()
    for group in _groups(layout, _ranges(layout, blocks)):
        wrong |= _wrong_of(layout, replica, ranks, group, expected)
    return wrong


def _ranges(layout: Layout, blocks: Iterable[int]) -> Iterator[_Range]:
    """The blocks, widened to whole rows and joined where they meet, up to the size of a scratch."""
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
    """Ranges that share a scratch, each with its place there."""
    group: list[tuple[_Range, Part]] = []
    at = 0
    for each in ranges:
        nbytes = -(-(each.end - each.start) * layout.tensor(each.name).type.itemsize // 64) * 64
        if group and at + nbytes > SCRATCH_BYTES:
            yield group
            group, at = [], 0
        group.append((each, Part(each.name, each.start, each.end - each.start, at)))
        at += nbytes
    if group:
        yield group


def _wrong_of(
    layout: Layout, replica: Replica, ranks: Sequence[Link], group: list[tuple[_Range, Part]],
    expected: NDArray[np.uint8],
) -> set[int]:  # fmt: skip
    last = group[-1][1]
    nbytes = last.at + last.count * layout.tensor(last.name).type.itemsize
    fd, memory = shared.reserve("swarm-scratch", nbytes)
    if fd is None:
        raise shared.no_sharing()
    try:
        scratch = np.frombuffer(memory, np.uint8)
        for each, part in group:
            bits = replica.bits(each.name)[each.start : each.end]
            np.invert(bits, out=_of(scratch, part, bits.dtype))
        parts = tuple(part for _, part in group)
        asked = [rank.ask(lambda n: Gather(n, parts), [fd]) for rank in ranks]
        for answer in asked:
            wait(answer, Did, WITHIN_S)
        asked = [rank.ask(lambda n: Compare(n, parts), [fd]) for rank in ranks]
        differing = {name for answer in asked for name in wait(answer, Differs, WITHIN_S).names}
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            found = pool.map(lambda pair: _wrong_in(layout, scratch, pair, expected), group)
            wrong = {block for blocks in found for block in blocks}
        wrong |= {block for each, _ in group if each.name in differing for block in each.blocks}
        return wrong
    finally:
        os.close(fd)


def _wrong_in(
    layout: Layout, scratch: NDArray[np.uint8], pair: tuple[_Range, Part], expected: NDArray[np.uint8]
) -> list[int]:
    each, part = pair
    wrong: list[int] = []
    for block in each.blocks:
        spec = layout.block(block)
        bits = _of(scratch, part, spec.dtype.bits)[spec.start - each.start :][: spec.count]
        if blake3(bits.view(np.uint8).data).digest() != expected[block].tobytes():
            wrong.append(block)
    return wrong


def _of(scratch: NDArray[np.uint8], part: Part, dtype: np.dtype[Any]) -> NDArray[Any]:
    return scratch[part.at : part.at + part.count * dtype.itemsize].view(dtype)
