"""The coder of new values: a block's new bits where they are no small change of the old ones.

A first publication, a rewritten tensor and the first step of a matrix that was zeros have nothing to gain from the old
bits. But few of the bits are random: of bf16 weights, exponents take about 2.6 bits instead of 8. Runs of elements
that keep their bits are left out. The others are cut into segments, and these into planes of a byte for each element,
exponents first. A plane is stored as it is, or in rANS codes (`codec.kernels.rans`) whose frequencies stand before it;
those of a lower plane may depend on the byte above. `docs/codec.md` specifies the bytes.

The payload does not depend on old values: decoding it twice, or onto other bits, gives the same new elements.
"""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits, DType
from codec.errors import PeerError
from codec.kernels.codes import get, get_count, get_numbers, put, put_count, put_numbers
from codec.kernels.rans import (
    SCALE,
    SYMBOLS,
    count_pairs,
    get_stream,
    get_table,
    join_planes,
    plan_table,
    put_runs,
    put_stream,
    put_table,
    split_planes,
)
from codec.rice import changed_positions
from codec.scratch import Positions, Scratch, check, take_payload

__all__ = ["decode_onto", "encode_block", "warm_up"]

_SEGMENTS: Final = range(13, 21)
"""log2 of the elements of a segment, in a payload. At least 13, so that a few bytes cannot name a thousand segments."""
_TRIED: Final = (13, 15, 17, 20)
"""Those that this encoder tries."""
_SAVED: Final = 1 / 32
"""The share of a plane that codes must save, since a plane without codes is read several times as fast."""
_KEPT: Final = 48
"""Elements without a change that end a run of new ones: a run costs some 20 bits."""
_RAW, _ONE_TABLE, _TABLES, _SAME = range(4)
"""The modes of a plane: its bytes; in codes of one table; of a table for each context; one byte for all elements."""
_MOST_NAMED: Final = 15
"""Bytes of the plane above that may have a context of their own. All others share the last."""

Plane = NDArray[np.uint8]
_NONE: Final = np.empty(0, np.uint8)


def encode_block(old: Bits, new: Bits, dtype: DType) -> bytes | None:
    """The new values, or None if nothing changed or the payload would be no shorter than the raw bits.

    `old`, `new`: flat arrays of `dtype.bits`, of the same size, at most a block. Elements of 8 bytes are not coded.
    """
    check(old, dtype)
    check(new, dtype)
    if dtype.itemsize == 8:
        return None
    changed = changed_positions(old, new, dtype)
    if changed.size == 0:
        return None
    firsts, ends = _runs(changed)
    values = np.concatenate([new[first:end] for first, end in zip(firsts, ends, strict=True)])
    planes = _planes(values, dtype)
    log2 = _segment_log2(planes)
    with Scratch.take() as scratch:
        writer = _Writer(scratch, 8 * new.nbytes)
        writer.field(log2, 8)
        writer.count(firsts.size)
        writer.numbers(firsts - np.concatenate(([0], ends[:-1])))
        writer.numbers(ends - firsts - 1)
        for part in _segments(values.size, log2):
            for level, plane in enumerate(planes):
                writer.plane(plane[part], planes[level - 1][part] if level else _NONE)
        return writer.finish()


def decode_onto(payload: bytes | memoryview, copy: Bits, dtype: DType) -> None:
    """Write the new values into `copy`, which has the old bits. Raises `PeerError` naming the field; `copy` is then of
    no use."""
    check(copy, dtype)
    assert copy.flags.writeable
    if dtype.itemsize == 8 or not 1 < len(payload) < copy.nbytes:
        raise PeerError(f"values.length: {len(payload)} bytes for {copy.nbytes}")
    with Scratch.take() as scratch:
        words = scratch.words
        used = (len(payload) + 7) >> 3
        words.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
        try:
            _read(_Reader(scratch, 8 * len(payload)), copy, dtype)
        finally:
            words[: used + 1] = 0  # as in `codec.scratch.read_payload`


def warm_up(dtype: DType) -> None:
    """Compile or load every kernel that this coder needs; see `codec.rice.warm_up`."""
    if dtype.itemsize == 8:
        return
    new = (np.arange(4096) % 7).astype(dtype.bits)
    old = np.full_like(new, 9)
    payload = encode_block(old, new, dtype)
    assert payload is not None
    decode_onto(payload, old, dtype)


def _runs(changed: Positions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first element of each run of new values, and the one after its last. `changed`: positions, ascending."""
    breaks = np.flatnonzero(np.diff(changed) > _KEPT)
    firsts = changed[np.concatenate(([0], breaks + 1))]
    ends = changed[np.concatenate((breaks, [changed.size - 1]))] + 1
    return firsts.astype(np.int64), ends.astype(np.int64)


def _segments(n: int, log2: int) -> Iterator[slice]:
    return (slice(at, min(at + (1 << log2), n)) for at in range(0, n, 1 << log2))


def _planes(values: Bits, dtype: DType) -> NDArray[np.uint8]:
    """The bytes of `values`: uint8 (itemsize, n), the most significant ones first. The sign of a float becomes its
    lowest bit, so that the first plane has the whole exponent."""
    planes = np.empty((dtype.itemsize, values.size), np.uint8)
    split_planes(values, int(dtype.is_float), planes)
    return planes


def _counts(symbols: Plane, above: Plane = _NONE, places: Plane = _NONE, n: int = 1) -> NDArray[np.int64]:
    """How often each symbol occurs in each of n contexts: int64 (n, 256)."""
    counts = np.zeros((n, SYMBOLS), np.int64)
    count_pairs(above, places, symbols, counts)
    return counts


def _segment_log2(planes: NDArray[np.uint8]) -> int:
    """The size of segments with which the planes take the fewest bits, about, with one table for each."""
    n = planes.shape[1]
    finest = np.array([[_counts(plane[part])[0] for part in _segments(n, _TRIED[0])] for plane in planes])
    best, chosen = math.inf, _TRIED[0]
    for log2 in _TRIED:
        counts = np.add.reduceat(finest, np.arange(0, finest.shape[1], 1 << (log2 - _TRIED[0])), axis=1)
        totals = counts.sum(axis=2)
        nats = (counts * np.log(np.maximum(counts, 1))).sum(axis=2)
        coded = (totals * np.log(totals) - nats) / math.log(2) + 6.0 * np.count_nonzero(counts, axis=2) + 200
        bits = float(np.minimum(8.0 * totals + 16, coded).sum())
        if bits < best:
            best, chosen = bits, log2
    return chosen


def _places(named: Plane) -> Plane:
    """The context of each byte above: its place in `named`, or that after the last. uint8 (256,)."""
    places = np.full(SYMBOLS, named.size, np.uint8)
    places[named] = np.arange(named.size)
    return places


class _Tables:
    """The tables of a plane. `bits`: what the plane takes with them, about."""

    def __init__(self, scratch: Scratch, counts: NDArray[np.int64]) -> None:
        self.frequencies = np.empty(counts.shape, np.uint32)
        self.forms: list[int] = []
        self.bits = 8.0 * 16 + 16
        for row, frequencies in zip(counts, self.frequencies, strict=True):
            form, bits = plan_table(row, frequencies, *scratch.numbers[1:])
            self.forms.append(form)
            self.bits += bits


class _Writer:
    """Appends the fields of a payload to `scratch.words`."""

    def __init__(self, scratch: Scratch, capacity: int) -> None:
        """`capacity`: bits that the payload must stay below; else it is given up."""
        self._scratch, self._words, self._capacity = scratch, scratch.words, capacity
        self._at = 0

    def field(self, value: int, width: int) -> None:
        if self._at >= 0:
            self._at = put(self._words, self._at, np.uint64(value), width)

    def count(self, value: int) -> None:
        if self._at >= 0:
            self._at = put_count(self._words, self._at, value)

    def numbers(self, values: NDArray[np.int64]) -> None:
        numbers = self._scratch.numbers
        numbers[0, : values.size] = values
        if self._at >= 0:
            self._at = put_numbers(self._words, self._capacity, self._at, numbers[0], values.size, *numbers[1:])

    def plane(self, plane: Plane, above: Plane) -> None:
        """Append a segment of a plane in its shortest mode. `above`: the same of the plane above, or empty."""
        if self._at < 0 or self._at + 8 * plane.size // 64 + 4096 > 8 * self._words.nbytes:
            self._at = -1
            return
        counts = _counts(plane)
        if np.count_nonzero(counts) == 1:
            self.field(_SAME, 2)
            self.field(int(plane[0]), 8)
            return
        one = _Tables(self._scratch, counts)
        mode, bits, tables, named = _ONE_TABLE, one.bits, one, _NONE
        if above.size:
            often = _counts(above)[0]
            order = np.argsort(-often, kind="stable")[:_MOST_NAMED]
            some = np.sort(order[often[order] > 0]).astype(np.uint8)
            many = _Tables(self._scratch, _counts(plane, above, _places(some), some.size + 1))
            if many.bits + 8 * some.size + 4 < bits:
                mode, bits, tables, named = _TABLES, many.bits + 8 * some.size + 4, many, some
        if bits >= (1 - _SAVED) * 8 * plane.size:
            self.field(_RAW, 2)
            self._append(plane)
            return
        self.field(mode, 2)
        if mode == _TABLES:
            self.field(named.size, 4)
            for symbol in named:
                self.field(int(symbol), 8)
        for form, frequencies in zip(tables.forms, tables.frequencies, strict=True):
            if self._at >= 0:
                self._at = put_table(
                    self._words, self._capacity, self._at, form, frequencies, *self._scratch.numbers[1:]
                )
        halves = np.empty(plane.size + 8, np.uint16)
        above = above if mode == _TABLES else _NONE
        start = put_stream(halves, plane, above, _places(named), tables.frequencies)
        self._append(halves[start:].view(np.uint8))

    def _append(self, data: Plane) -> None:
        """Append bytes from the next multiple of 16 bits on."""
        if self._at < 0:
            return
        start = (self._at + 15) // 16 * 2
        if 8 * (start + data.size) >= self._capacity:
            self._at = -1
            return
        self._words.view(np.uint8)[start : start + data.size] = data
        self._at = 8 * (start + data.size)

    def finish(self) -> bytes | None:
        """The payload; None if it is not shorter than the raw bits."""
        if self._at < 0 or (self._at + 7) // 8 >= self._capacity // 8:
            self._words[: self._capacity // 64 + 128] = 0
            return None
        return take_payload(self._words, self._at)


class _Reader:
    """Reads the fields of a payload, in `scratch.words`, back. Raises `PeerError` naming the field."""

    def __init__(self, scratch: Scratch, end: int) -> None:
        self._scratch, self._words, self._end = scratch, scratch.words, end
        self._at = 0

    def field(self, name: str, width: int) -> int:
        if self._at + width > self._end:
            raise PeerError(f"values.{name}: cut off")
        self._at += width
        return int(get(self._words, self._at - width, width))

    def count(self, name: str, most: int) -> int:
        found, self._at = get_count(self._words, self._at, self._end, most)
        if found < 1:
            raise PeerError(f"values.{name}: none, or more than {most}")
        return int(found)

    def numbers(self, name: str, n: int, most: int) -> NDArray[np.int64]:
        rows = self._scratch.numbers
        self._go(name, get_numbers(self._words, self._at, self._end, rows[0], n, *rows[1:], most))
        return rows[0, :n].astype(np.int64)

    def plane(self, into: Plane, above: Plane) -> None:
        """Read the next bytes of a plane. `above`: the same of the plane above, or empty."""
        mode = self.field("mode", 2)
        if mode == _SAME:
            into[:] = self.field("byte", 8)
            return
        if mode == _RAW:
            start = self._aligned() // 8
            self._go("bytes", 8 * (start + into.size))
            into[:] = self._words.view(np.uint8)[start : start + into.size]
            return
        named = _NONE
        if mode == _ONE_TABLE:
            above = _NONE
        elif above.size == 0:
            raise PeerError("values.mode: the first plane has none above it")
        else:
            named = np.array([self.field("context", 8) for _ in range(self.field("contexts", 4))], np.uint8)
            if np.any(named[1:] <= named[:-1]):
                raise PeerError("values.context: not ascending")
        slots, rows = np.empty((named.size + 1, SCALE), np.uint32), self._scratch.numbers
        for row in slots:
            self._go("table", get_table(self._words, self._at, self._end, row, *rows))
        halves = self._words.view(np.uint16)
        after = get_stream(halves, self._aligned() // 16, self._end // 16, into, above, _places(named), slots)
        self._go("stream", 16 * after if after >= 0 else -1)

    def ends(self) -> None:
        """Raise unless the payload ends here."""
        if (self._at + 7) // 8 != self._end // 8:
            raise PeerError(f"values.end: {self._end // 8} bytes, of which {(self._at + 7) // 8} are used")
        if self._at < self._end and self.field("padding", self._end - self._at):
            raise PeerError("values.padding: not zero")

    def _aligned(self) -> int:
        """Read zeros up to a multiple of 16 bits."""
        if (width := -self._at % 16) and self.field("padding", width):
            raise PeerError("values.padding: not zero")
        return self._at

    def _go(self, name: str, at: int) -> None:
        if not 0 <= at <= self._end:
            raise PeerError(f"values.{name}: not what an encoder writes")
        self._at = at


def _read(reader: _Reader, copy: Bits, dtype: DType) -> None:
    log2 = reader.field("segment", 8)
    if log2 not in _SEGMENTS:
        raise PeerError(f"values.segment: 2^{log2} elements")
    n = reader.count("runs", copy.size)
    kept, sizes = reader.numbers("kept", n, copy.size), reader.numbers("sizes", n, copy.size) + 1
    ends = np.cumsum(kept + sizes)
    if ends[-1] > copy.size:
        raise PeerError("values.runs: beyond the end of the block")
    total = int(sizes.sum())
    values = np.empty(total, dtype.bits)
    for part in _segments(total, log2):
        planes = np.empty((dtype.itemsize, part.stop - part.start), np.uint8)
        for level, plane in enumerate(planes):
            reader.plane(plane, planes[level - 1] if level else _NONE)
        join_planes(planes, int(dtype.is_float), values[part])
    reader.ends()
    put_runs(values, ends, sizes, copy)
