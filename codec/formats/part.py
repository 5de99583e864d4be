"""The part of a layout that holds one format: its blocks from the base's bits, all of them, one, or those of a version.

A tensor is read and computed in runs of whole rows of about a block each, so memory is bounded by a few rows of tiles
(`docs/formats.md`, section 6), however large the tensor is.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits
from codec.formats.quantise import Band, quantise, requantise
from codec.formats.spec import Format, FormatTensor, Matrix, quantised
from codec.layout import BLOCK_ELEMENTS, Layout, TensorSpec
from codec.staging import BlockSource

__all__ = ["Change", "FormatBlock", "FormatPart", "Read", "reader_of"]

Read = Callable[[str, int, int], Bits]
"""`read(tensor, start, count)`: elements of a tensor, flat, as unsigned integers. Not written to."""

_RUN_ELEMENTS: Final = BLOCK_ELEMENTS
"""Elements that are computed at a time, at least; rounded up to whole rows of tiles."""


class Change(Protocol):
    """What a version changes in one block of the base: `codec.staging.StagedBlock` is one. `positions`: uint32 within
    the block, ascending. `bits`: the new bits there."""

    @property
    def positions(self) -> NDArray[np.uint32]: ...

    @property
    def bits(self) -> Bits: ...


@dataclass(frozen=True, slots=True, eq=False)
class FormatBlock:
    """A block of a format's part. `block`: its id in the whole layout. `old`: its bits before the version, as they were
    read; None where a block is computed anew. `new`: its bits."""

    block: int
    old: Bits | None
    new: Bits


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows `first` to `last` - 1 of one plane; `first` begins a row of tiles."""

    plane: int
    first: int
    last: int


def reader_of(source: BlockSource) -> Read:
    """Reads ranges of tensors out of blocks; a range within one block is not copied."""
    layout = source.layout

    def read(name: str, start: int, count: int) -> Bits:
        blocks = layout.blocks_of(name)
        first, last = start // BLOCK_ELEMENTS, (start + count - 1) // BLOCK_ELEMENTS
        if first == last:
            at = start - first * BLOCK_ELEMENTS
            return source.block(blocks[first])[at : at + count]
        joined = np.empty(count, layout.tensor(name).type.bits)
        for index in range(first, last + 1):
            begin = index * BLOCK_ELEMENTS
            low, high = max(start, begin), min(start + count, begin + BLOCK_ELEMENTS)
            joined[low - start : high - start] = source.block(blocks[index])[low - begin : high - begin]
        return joined

    return read


class _Blocks:
    """Cuts the elements of one tensor of the part, given in order, into the layout's blocks."""

    def __init__(self, layout: Layout, spec: TensorSpec) -> None:
        self._first = layout.blocks_of(spec.name).start
        self._spec = spec
        self._bits = np.empty(min(BLOCK_ELEMENTS, spec.elements), spec.type.bits)
        self._at = 0

    def add(self, bits: Bits) -> Iterator[tuple[int, int, Bits]]:
        """The (block, first element, bits) of each block that `bits` completes. The bits are reused afterwards."""
        taken = 0
        while taken < bits.size:
            used = self._at % BLOCK_ELEMENTS
            n = min(bits.size - taken, self._bits.size - used)
            self._bits[used : used + n] = bits[taken : taken + n]
            taken += n
            self._at += n
            if self._at % BLOCK_ELEMENTS == 0 or self._at == self._spec.elements:
                block = (self._at - 1) // BLOCK_ELEMENTS
                start = block * BLOCK_ELEMENTS
                yield self._first + block, start, self._bits[: self._at - start]


class FormatPart:
    """One format of one model. `layout`: the whole one, with the format's part. Raises `UsageError` if the format
    quantises nothing of the base."""

    def __init__(self, layout: Layout, form: Format) -> None:
        self.layout = layout
        self.form = form
        self.tensors = quantised(layout, form)
        self._by_name = {spec.name: tensor for tensor in self.tensors for spec in (tensor.codes, tensor.scales)}

    def touched(self, base_blocks: Mapping[int, Change]) -> list[FormatTensor]:
        """The quantised tensors that have any of these blocks of the base."""
        return [
            tensor
            for tensor in self.tensors
            if any(block in base_blocks for block in self.layout.blocks_of(tensor.base.name))
        ]

    def compute(self, tensor: FormatTensor, read: Read) -> Iterator[FormatBlock]:
        """Every block of a tensor's codes and scales, from the base's bits. The bits are reused for the next block."""
        codes, scales = _Blocks(self.layout, tensor.codes), _Blocks(self.layout, tensor.scales)
        for run in self._runs(tensor):
            band = self._quantise(tensor, run, read)
            for blocks, bits, spec in ((codes, band.codes, tensor.codes), (scales, band.scales, tensor.scales)):
                yield from (FormatBlock(block, None, new) for block, _, new in blocks.add(bits.view(spec.type.bits)))

    def update(self, tensor: FormatTensor, read: Read, changes: Mapping[int, Change]) -> Iterator[FormatBlock]:
        """The blocks of a tensor's codes and scales that a version changes.

        `read`: the parent version, of the base and of this part. `changes`: by block of the base. The bits of one
        result are reused for the next.
        """
        codes, scales = _Blocks(self.layout, tensor.codes), _Blocks(self.layout, tensor.scales)
        for run in self._runs(tensor):
            before = self._stored(tensor, run, read)
            band = self._requantise(tensor, run, read, changes, before)
            for blocks, bits, spec in ((codes, band.codes, tensor.codes), (scales, band.scales, tensor.scales)):
                for block, start, new in blocks.add(bits.view(spec.type.bits)):
                    old = read(spec.name, start, new.size)
                    if not np.array_equal(old, new):
                        yield FormatBlock(block, old, new)

    def block(self, block: int, read: Read) -> Bits:
        """The bits of one block of the part, computed from the base's."""
        spec = self.layout.block(block)
        tensor = self._by_name[spec.name]
        matrix, form = tensor.matrix, tensor.form
        is_codes = spec.name == tensor.codes.name
        down, across = matrix.grid(form)
        # Elements of this tensor of the part that one row of tiles has, and how many of these rows the block touches.
        line = matrix.row_bytes(form) if is_codes else across
        per_plane = matrix.rows if is_codes else down
        first, last = spec.start // line, -(-(spec.start + spec.count) // line)
        found = np.empty(spec.count, spec.dtype.bits)
        for run in self._runs(tensor):
            top = run.plane * per_plane + (run.first if is_codes else run.first // form.tile_rows)
            rows = run.last - run.first if is_codes else -(-(run.last - run.first) // form.tile_rows)
            if top + rows <= first or top >= last:
                continue
            band = self._quantise(tensor, run, read)
            bits = (band.codes if is_codes else band.scales).view(spec.dtype.bits)
            start = top * line
            low, high = max(start, spec.start), min(start + bits.size, spec.start + spec.count)
            found[low - spec.start : high - spec.start] = bits[low - start : high - start]
        return found

    def _runs(self, tensor: FormatTensor) -> Iterator[_Run]:
        matrix, tile_rows = tensor.matrix, tensor.form.tile_rows
        rows = -(-_RUN_ELEMENTS // matrix.columns)
        rows = -(-rows // tile_rows) * tile_rows
        for plane in range(matrix.planes):
            for first in range(0, matrix.rows, rows):
                yield _Run(plane, first, min(first + rows, matrix.rows))

    def _range(self, matrix: Matrix, run: _Run) -> tuple[int, int]:
        """The run's first element in the base's tensor, and how many it has."""
        return (run.plane * matrix.rows + run.first) * matrix.columns, (run.last - run.first) * matrix.columns

    def _quantise(self, tensor: FormatTensor, run: _Run, read: Read) -> Band:
        return quantise(read(tensor.base.name, *self._range(tensor.matrix, run)), tensor.matrix, tensor.form)

    def _stored(self, tensor: FormatTensor, run: _Run, read: Read) -> Band:
        """The run's codes and scales, as they are stored."""
        matrix, form = tensor.matrix, tensor.form
        down, across = matrix.grid(form)
        rows, row_bytes = run.last - run.first, matrix.row_bytes(form)
        codes = read(tensor.codes.name, (run.plane * matrix.rows + run.first) * row_bytes, rows * row_bytes)
        tiles = -(-rows // form.tile_rows) * across
        scales = read(tensor.scales.name, (run.plane * down + run.first // form.tile_rows) * across, tiles)
        return Band(codes, scales)

    def _requantise(
        self, tensor: FormatTensor, run: _Run, read: Read, changes: Mapping[int, Change], before: Band
    ) -> Band:
        """The run's band after the version; `before` itself where nothing changed."""
        start, count = self._range(tensor.matrix, run)
        blocks = self.layout.blocks_of(tensor.base.name)
        near = range(start // BLOCK_ELEMENTS, (start + count - 1) // BLOCK_ELEMENTS + 1)
        places: list[NDArray[np.uint32]] = []
        values: list[Bits] = []
        for index in near:
            change = changes.get(blocks[index])
            if change is None:
                continue
            low = max(0, start - index * BLOCK_ELEMENTS)
            high = start + count - index * BLOCK_ELEMENTS
            here = slice(*np.searchsorted(change.positions, (low, high)))
            shift = index * BLOCK_ELEMENTS - start  # negative in the first block: computed in 64 bits
            places.append((change.positions[here].astype(np.int64) + shift).astype(np.uint32))
            values.append(change.bits[here])
        if not any(place.size for place in places):
            return before
        old = read(tensor.base.name, start, count)
        positions = np.concatenate(places)
        new = old.copy()
        new[positions] = np.concatenate(values)
        return requantise(old, new, positions, before, tensor.matrix, tensor.form)
