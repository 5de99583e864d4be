"""The base that the codes of a format stand for: bf16 bits in the base's layout, for engines that compute with bf16.

Quantised tensors are dequantised (`docs/formats.md`, section 5), all others are as they are stored. So an engine of a
member with a format is filled and updated as any other, and its live bits have a root of their own.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits
from codec.formats.part import Read
from codec.formats.quantise import Band, bf16_of, dequantise
from codec.formats.spec import Format, FormatTensor, quantised
from codec.layout import BLOCK_ELEMENTS, Layout
from codec.parts import base_layout
from codec.staging import StagedBlock

__all__ = ["DequantisedBase", "Touched"]


class Touched(NamedTuple):
    """Elements of one block of the base. `block`: its id. `positions`: uint32, ascending. `bits`: those of the whole
    block after the version."""

    block: int
    positions: NDArray[np.uint32]
    bits: Bits


class DequantisedBase:
    """The base of a model in one format. `layout`: the whole model's. Raises `UsageError` if there is nothing
    quantised."""

    def __init__(self, layout: Layout, form: Format) -> None:
        self.layout = base_layout(layout)
        self.files: Mapping[str, bytes] = {}
        """Small files of `layout` that differ from the model's: none."""
        self._whole = layout
        self._tensors = {tensor.base.name: tensor for tensor in quantised(self.layout, form)}
        self._by_stored = {
            spec.name: tensor for tensor in self._tensors.values() for spec in (tensor.codes, tensor.scales)
        }

    def block(self, block: int, read: Read) -> Bits:
        """The bits of one block of the base. `read`: of the format's part, and of the tensors that stay bf16."""
        spec = self.layout.block(block)
        tensor = self._tensors.get(spec.name)
        if tensor is None:
            return read(spec.name, spec.start, spec.count)
        columns = tensor.matrix.columns
        found = np.empty(spec.count, np.uint16)
        for first, last in self._bands(tensor, spec.start, spec.count):
            values = bf16_of(dequantise(self._band(tensor, first, last, read), tensor.matrix, tensor.form))
            start = first * columns
            low, high = max(start, spec.start), min(last * columns, spec.start + spec.count)
            found[low - spec.start : high - spec.start] = values[low - start : high - start]
        return found

    def touched(self, changes: Iterable[StagedBlock], read: Read) -> Iterator[Touched]:
        """What a version changes in the base. `changes`: in blocks of the format's part, and in tensors that stay bf16.
        `read`: the version itself, not the one before.

        An element counts as touched if its code or its scale has changed.
        """
        codes: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
        scales: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
        for change in changes:
            spec = self._whole.block(change.block)
            tensor = self._by_stored.get(spec.name)
            if tensor is None:
                if change.block < self.layout.n_blocks and spec.name not in self._tensors:
                    yield Touched(change.block, change.positions, read(spec.name, spec.start, spec.count))
                continue
            stored = codes if spec.name == tensor.codes.name else scales
            stored[tensor.base.name].append(change.positions.astype(np.int64) + spec.start)
        for name in sorted({*codes, *scales}):
            yield from self._touched_blocks(self._tensors[name], _joined(codes[name]), _joined(scales[name]), read)

    def _touched_blocks(
        self, tensor: FormatTensor, codes: NDArray[np.int64], tiles: NDArray[np.int64], read: Read
    ) -> Iterator[Touched]:
        """`codes`: indices of stored codes that have changed; `tiles`: of scales. Both ascending."""
        matrix, form = tensor.matrix, tensor.form
        row_bytes, columns, each = matrix.row_bytes(form), matrix.columns, form.codes_per_byte
        elements = codes // row_bytes * columns + codes % row_bytes * each
        if each == 2:
            odd = elements[codes % row_bytes * 2 + 1 < columns] + 1
            elements = np.sort(np.concatenate([elements, odd]))
        for index, block in enumerate(self.layout.blocks_of(tensor.base.name)):
            start = index * BLOCK_ELEMENTS
            count = self.layout.block(block).count
            mask = np.zeros(count, np.bool_)
            mask[elements[slice(*np.searchsorted(elements, (start, start + count)))] - start] = True
            for first, last in self._tiles(tensor, tiles, start, count):
                mask[first:last] = True
            positions = np.flatnonzero(mask).astype(np.uint32)
            if positions.size:
                yield Touched(block, positions, self.block(block, read))

    def _tiles(
        self, tensor: FormatTensor, tiles: NDArray[np.int64], start: int, count: int
    ) -> Iterator[tuple[int, int]]:
        """The ranges of elements, relative to `start`, that these tiles have in a block."""
        matrix, form = tensor.matrix, tensor.form
        down, across = matrix.grid(form)
        wide, rows = matrix.tile_columns(form), form.tile_rows
        first_row, last_row = start // matrix.columns, (start + count - 1) // matrix.columns
        for tile in map(int, tiles):
            plane, rest = divmod(tile, down * across)
            top = plane * matrix.rows + rest // across * rows
            bottom = min(top + rows, (plane + 1) * matrix.rows)
            left = rest % across * wide
            right = min(left + wide, matrix.columns)
            for row in range(max(top, first_row), min(bottom, last_row + 1)):
                low, high = row * matrix.columns + left - start, row * matrix.columns + right - start
                if low < count and high > 0:
                    yield max(low, 0), min(high, count)

    def _bands(self, tensor: FormatTensor, start: int, count: int) -> Iterator[tuple[int, int]]:
        """The rows (first, after the last; of all planes together) of the bands that hold a range of elements."""
        matrix, rows = tensor.matrix, tensor.form.tile_rows
        first, last = start // matrix.columns, -(-(start + count) // matrix.columns)
        while first < last:
            plane, row = divmod(first, matrix.rows)
            top = row // rows * rows
            bottom = min(-(-(min(last - plane * matrix.rows, matrix.rows)) // rows) * rows, matrix.rows)
            yield plane * matrix.rows + top, plane * matrix.rows + bottom
            first = plane * matrix.rows + bottom

    def _band(self, tensor: FormatTensor, first: int, last: int, read: Read) -> Band:
        matrix, form = tensor.matrix, tensor.form
        down, across = matrix.grid(form)
        row_bytes = matrix.row_bytes(form)
        codes = read(tensor.codes.name, first * row_bytes, (last - first) * row_bytes).view(np.uint8)
        plane, row = divmod(first, matrix.rows)
        tiles = -(-(last - first) // form.tile_rows) * across
        scales = read(tensor.scales.name, (plane * down + row // form.tile_rows) * across, tiles)
        return Band(codes, scales)


def _joined(found: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)
