"""The default coder: what changed in a block, class by class, in Rice codes.

Small weights change more often than large ones: the probability doubles with each binade down. So elements are sorted
into sixteen classes by the exponent of their *old* bits, and the gap between two changes is counted within a class,
where it is nearly geometric, which is what Rice codes are made for. The difference of the ordinals is +-1 nine times in
ten. At 1 % density this takes about 7.1 bits a change; the best that these statistics allow is 6.9. `docs/codec.md`
specifies the bytes.

Elements of eight bytes, which no policy ships in bulk, are listed plainly.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits, DType
from codec.errors import PeerError
from codec.lanes import CLASSES, LANES
from codec.layout import BLOCK_ELEMENTS
from codec.planes import FIELDS, read_planes, read_values, write_planes, write_values
from codec.scan import (
    NEVER,
    TILE_WORDS,
    count_values,
    find_top,
    list_changes,
    merge_values,
    scan_decode,
    scan_encode,
    scatter,
    sort_values,
)

__all__ = [
    "changed_positions",
    "decode_block",
    "decode_onto",
    "decode_plainly",
    "decode_values",
    "encode_block",
    "encode_changes",
    "encode_plainly",
    "encode_values",
    "warm_up",
]

Positions = NDArray[np.uint32]


class _Scratch:
    """Arrays for one block at a time, reused: fresh pages would cost more than the coding.

    The rows for the classes hold a whole block each, 136 MiB of address space, of which only what is written to becomes
    memory: about 9 bytes a changed element of the busiest block so far.
    """

    _free: list["_Scratch"] = []  # noqa: RUF012

    def __init__(self) -> None:
        # Rows a power of two apart would fall on the same cache sets.
        row = BLOCK_ELEMENTS + 272
        self.gaps = np.empty((CLASSES, row), np.uint32)
        self.diffs = np.empty((CLASSES, row), np.int32)
        self.numbers = np.empty((3, row), np.uint32)
        self.positions = np.empty(BLOCK_ELEMENTS + LANES, np.uint32)
        self.bits = np.empty(BLOCK_ELEMENTS + LANES, np.uint32)
        self.words = np.zeros(BLOCK_ELEMENTS * 40 // 64 + 256, np.uint64)
        self.state = np.empty((3, CLASSES), np.int64)
        self.masks = np.empty(TILE_WORDS * CLASSES, np.uint64)
        self.seen = np.empty((TILE_WORDS + 1) * CLASSES, np.int64)
        self.pending = np.empty(TILE_WORDS * LANES, np.int32)
        self.histogram = np.empty(256, np.int64)
        self.tails = np.empty((3, LANES), np.uint32)

    def __enter__(self) -> "_Scratch":
        return self

    def __exit__(self, *error: object) -> None:
        self._free.append(self)

    @classmethod
    def take(cls) -> "_Scratch":
        """One that no other thread is using; `with` gives it back. Lists are safe to share between threads."""
        try:
            return cls._free.pop()
        except IndexError:
            return cls()


def _kernel_arguments(dtype: DType) -> tuple[int, int, int]:
    """(shift, mask, flip): where the exponent is, and which bits a negative number's ordinal inverts."""
    flip = (1 << (dtype.width - 1)) - 1 if dtype.is_float else 0
    return dtype.exponent_shift or 0, dtype.exponent_mask or 0, flip


def _choose_top(scratch: _Scratch, old: Bits, dtype: DType) -> int:
    """The largest exponent that, with those above it, at least 2 % of a sample have; they share class 0.

    Rarer ones need no class of their own, and every class below is then one exponent wide.
    """
    shift, mask, _ = _kernel_arguments(dtype)
    if mask == 0:
        return 0
    return find_top(scratch.bits.view(dtype.bits), old.ctypes.data, old.size, shift, mask, scratch.histogram)


def _tail(scratch: _Scratch, row: int, values: Bits, dtype: DType) -> Bits:
    """The last, incomplete word of `values`, padded with zeros to 64 elements."""
    padded = scratch.tails[row].view(dtype.bits)[:LANES]
    left = values.size % LANES
    padded[:left] = values[values.size - left :]
    padded[left:] = 0
    return padded


def _check(old: Bits, dtype: DType) -> None:
    assert old.ndim == 1
    assert old.dtype == dtype.bits
    assert old.size <= BLOCK_ELEMENTS
    assert old.flags.c_contiguous


def encode_block(old: Bits, new: Bits, dtype: DType) -> bytes | None:
    """The changes from `old` to `new`, or None if there are none.

    `old`, `new`: flat arrays of `dtype.bits`, of the same size, at most a block. The result may be longer than the raw
    bits: the caller compares.
    """
    coded = encode_changes(old, new, dtype)
    return None if coded is None else coded[0]


def encode_changes(old: Bits, new: Bits, dtype: DType) -> tuple[bytes, Positions] | None:
    """As `encode_block`, with the positions of the changes (uint32, ascending)."""
    _check(old, dtype)
    _check(new, dtype)
    if dtype.itemsize == 8:
        return encode_plainly(old, new)
    with _Scratch.take() as scratch:
        top = _choose_top(scratch, old, dtype)
        state, positions, words = scratch.state[:2], scratch.positions, scratch.words
        state[:] = 0
        scratch.seen[:CLASSES] = 0
        like = scratch.bits.view(dtype.bits)
        shift, mask, flip = _kernel_arguments(dtype)
        rest = (shift, mask, top, flip, scratch.masks, scratch.seen, state, scratch.gaps, scratch.diffs, positions)
        whole = old.size // LANES
        found = scan_encode(like, old.ctypes.data, new.ctypes.data, whole, 0, *rest, 0)
        if old.size % LANES:
            before, after = _tail(scratch, 0, old, dtype), _tail(scratch, 1, new, dtype)
            found = scan_encode(like, before.ctypes.data, after.ctypes.data, 1, whole * LANES, *rest, found)
        if found == 0:
            return None
        words[0] = top
        end = write_planes(words, words.size * 64 - 64, 8, scratch.gaps, scratch.diffs, state[1], scratch.numbers)
        payload = _taken(words, end)
        return payload, positions[:found].copy()


def changed_positions(old: Bits, new: Bits, dtype: DType) -> Positions:
    """Where `new` differs from `old` (uint32, ascending): as `np.flatnonzero(old != new)`, several times as fast."""
    _check(old, dtype)
    _check(new, dtype)
    if dtype.itemsize == 8:
        return np.flatnonzero(old != new).astype(np.uint32)
    with _Scratch.take() as scratch:
        positions, like = scratch.positions, scratch.bits.view(dtype.bits)
        whole = old.size // LANES
        found = list_changes(like, old.ctypes.data, new.ctypes.data, whole, 0, positions, 0)
        if old.size % LANES:
            before, after = _tail(scratch, 0, old, dtype), _tail(scratch, 1, new, dtype)
            found = list_changes(like, before.ctypes.data, after.ctypes.data, 1, whole * LANES, positions, found)
        return positions[:found].copy()


def decode_block(payload: bytes | memoryview, old: Bits, dtype: DType) -> tuple[Positions, Bits]:
    """Positions (uint32, ascending) and new bits of the changes in `payload`, relative to `old`.

    Raises `PeerError` naming the field for bytes that no encoder wrote. A wrong `old` is not noticed: the block's hash
    tells.
    """
    _check(old, dtype)
    if dtype.itemsize == 8:
        return decode_plainly(payload, old)
    return _decode(payload, old, None, dtype)


def decode_onto(payload: bytes | memoryview, old: Bits, copy: Bits, dtype: DType) -> tuple[Positions, Bits]:
    """As `decode_block`; `copy`, of the same size, receives the block as it is after the changes."""
    _check(old, dtype)
    _check(copy, dtype)
    assert copy.size == old.size
    assert copy.flags.writeable
    if dtype.itemsize == 8:
        positions, bits = decode_plainly(payload, old)
        copy[:] = old
        copy[positions] = bits
        return positions, bits
    return _decode(payload, old, copy, dtype)


def _taken(words: NDArray[np.uint64], end: int) -> bytes:
    """The first `end` bits of `words` as bytes; `words` is all zeros again."""
    assert end > 0, "more than 40 bits an element: see _Scratch.words"
    used = (end + 63) >> 6
    payload = words[:used].view(np.uint8)[: (end + 7) >> 3].tobytes()
    words[: used + 1] = 0
    return payload


def _read(scratch: _Scratch, payload: bytes | memoryview, planes: Callable[[NDArray[np.uint64], int], int]) -> None:
    """Have `planes(words, end)` read the payload after its first byte. Raises `PeerError` unless it takes all of it."""
    words = scratch.words
    if not 2 <= len(payload) <= words.nbytes - 16:
        raise PeerError(f"rice.length: {len(payload)} bytes")
    end = 8 * len(payload)
    used = (end + 63) >> 6
    words.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
    try:
        at = planes(words, end)
    finally:
        words[: used + 1] = 0  # the encoder counts on zeros, and so does whoever reads a last word half filled
    if at < 0:
        raise PeerError(f"rice.{FIELDS[-at]}: not what an encoder writes")
    if (at + 7) >> 3 != len(payload):
        raise PeerError(f"rice.end: {len(payload)} bytes, of which {(at + 7) >> 3} say something")
    if at & 7 and payload[-1] >> (at & 7):
        raise PeerError("rice.padding: not zero")


def _decode(payload: bytes | memoryview, old: Bits, copy: Bits | None, dtype: DType) -> tuple[Positions, Bits]:
    with _Scratch.take() as scratch:
        rows = (scratch.gaps, scratch.diffs, scratch.state[2], scratch.numbers)
        most = 1 << (dtype.width - 1)
        _read(scratch, payload, lambda words, end: read_planes(words, 8, end, *rows, old.size, most))
        return _replay(scratch, payload[0], old, copy, dtype)


def _replay(scratch: _Scratch, top: int, old: Bits, copy: Bits | None, dtype: DType) -> tuple[Positions, Bits]:
    """Gaps within classes to positions, differences to bits."""
    state = scratch.state
    total = int(state[2].sum())
    if total == 0:
        raise PeerError("rice.count: no changes")
    state[0] = np.where(state[2] > 0, scratch.gaps[:, 0].astype(np.int64), NEVER)
    state[1] = 0
    scratch.seen[:CLASSES] = 0
    positions = np.empty(total + 2, np.uint32)
    bits = np.empty(total, dtype.bits)
    shift, mask, flip = _kernel_arguments(dtype)
    tiles = (scratch.masks, scratch.seen, scratch.pending)
    rest = (shift, mask, top, flip, *tiles, state, scratch.gaps, scratch.diffs, positions, bits)
    whole = old.size // LANES
    to = 0 if copy is None else copy.ctypes.data
    found = scan_decode(bits, old.ctypes.data, to, whole, 0, *rest, 0)
    left = old.size % LANES
    if left:
        before, after = _tail(scratch, 0, old, dtype), scratch.tails[1].view(dtype.bits)[:LANES]
        found = scan_decode(bits, before.ctypes.data, after.ctypes.data, 1, whole * LANES, *rest, found)
        if copy is not None:
            copy[-left:] = after[:left]
    if found != total or positions[total - 1] >= old.size:
        raise PeerError("rice.gaps: a change beyond the end of its class")
    return positions[:total], bits


def encode_plainly(old: Bits, new: Bits) -> tuple[bytes, Positions] | None:
    """Elements of 64 bits: (positions as u32, then new bits; the positions), or None if nothing changed."""
    positions = np.flatnonzero(old != new).astype("<u4")
    if positions.size == 0:
        return None
    return positions.tobytes() + new[positions].tobytes(), positions


def decode_plainly(payload: bytes | memoryview, old: Bits) -> tuple[Positions, Any]:
    """The other way. Raises `PeerError` naming the field."""
    count, rest = divmod(len(payload), 4 + old.itemsize)
    if rest or not 0 < count <= old.size:
        raise PeerError(f"rice.length: {len(payload)} bytes are no list of changes")
    positions = np.frombuffer(payload, "<u4", count).copy()
    if positions[-1] >= old.size or np.any(positions[1:] <= positions[:-1]):
        raise PeerError("rice.positions: not ascending within the block")
    return positions, np.frombuffer(payload, old.dtype, count, 4 * count).copy()


def encode_values(old: Bits, new: Bits, positions: Positions, dtype: DType) -> bytes:
    """The differences at `positions`, class by class, for a decoder that has the positions from elsewhere."""
    _check(old, dtype)
    _check(new, dtype)
    with _Scratch.take() as scratch:
        top, like, words = _choose_top(scratch, old, dtype), scratch.bits.view(dtype.bits), scratch.words
        shift, mask, flip = _kernel_arguments(dtype)
        fill = scratch.state[1]
        fill[:] = 0
        arguments = (old.ctypes.data, new.ctypes.data, positions, shift, mask, top, flip, fill, scratch.diffs)
        sort_values(like, *arguments)
        words[0] = top
        return _taken(words, write_values(words, words.size * 64 - 64, 8, scratch.diffs, fill, scratch.numbers))


def decode_values(payload: bytes, old: Bits, positions: Positions, dtype: DType) -> Bits:
    """The new bits at `positions`, which the caller has bounded. Raises `PeerError` naming the field."""
    _check(old, dtype)
    with _Scratch.take() as scratch:
        like = scratch.bits.view(dtype.bits)
        shift, mask, flip = _kernel_arguments(dtype)
        fill = scratch.state[2]
        fill[:] = 0
        top = payload[0] if payload else 0
        count_values(like, old.ctypes.data, positions, shift, mask, top, fill)
        most = 1 << (dtype.width - 1)
        _read(
            scratch, payload, lambda words, end: read_values(words, 8, end, scratch.diffs, fill, scratch.numbers, most)
        )
        bits = np.empty(positions.size, dtype.bits)
        fill[:] = 0
        merge_values(like, old.ctypes.data, positions, shift, mask, top, flip, fill, scratch.diffs, bits)
        return bits


def warm_up(dtype: DType) -> None:
    """Compile (or load from the cache) every kernel that this dtype needs, so that no measured or awaited call does."""
    old = np.arange(LANES + 1, dtype=dtype.bits)
    payload = encode_block(old, old ^ dtype.bits.type(1), dtype)
    assert payload is not None
    positions, bits = decode_onto(payload, old, old.copy(), dtype)
    decode_values(encode_values(old, old ^ dtype.bits.type(1), positions, dtype), old, positions, dtype)
    changed_positions(old, old, dtype)
    decode_block(payload, old, dtype)
    scatter(old, positions, bits)
