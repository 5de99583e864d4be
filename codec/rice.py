"""The default coder: the changes of a block in Rice codes, in classes by exponent.

Small weights change more often than large ones: the probability doubles with each binade down. So the exponent of its
*old* bits puts each element into one of sixteen classes, and the gap between two changes is counted within a class.
There it is nearly geometric, the distribution for which Rice codes are optimal. The difference of the ordinals is +1 or
-1 in nine of ten changes. At 1 % density this takes about 7.1 bits per change; the entropy of these statistics is 6.9.
`docs/codec.md` specifies the bytes.

Elements of 8 bytes are rare in policies and are listed without coding.
"""

from typing import Any

import numpy as np

from codec.bits import Bits, DType
from codec.errors import PeerError
from codec.kernels.lanes import CLASSES, LANES
from codec.kernels.planes import read_planes, write_planes
from codec.kernels.scan import NEVER, gather, list_changes, scan_decode, scan_encode, scatter
from codec.scratch import Positions, Scratch, check, choose_top, exponent_of, read_payload, tail, take_payload

__all__ = [
    "bits_at",
    "changed_positions",
    "decode_block",
    "decode_onto",
    "decode_plainly",
    "encode_block",
    "encode_changes",
    "encode_plainly",
    "warm_up",
]


def encode_block(old: Bits, new: Bits, dtype: DType) -> bytes | None:
    """The coded changes from `old` to `new`, or None if there are none.

    `old`, `new`: flat arrays of `dtype.bits`, of the same size, at most a block. The result may be longer than the raw
    bits, so the caller must compare.
    """
    coded = encode_changes(old, new, dtype)
    return None if coded is None else coded[0]


def encode_changes(old: Bits, new: Bits, dtype: DType) -> tuple[bytes, Positions] | None:
    """As `encode_block`, with the positions of the changes (uint32, ascending)."""
    check(old, dtype)
    check(new, dtype)
    if dtype.itemsize == 8:
        return encode_plainly(old, new)
    with Scratch.take() as scratch:
        top = choose_top(scratch, old, dtype)
        state, positions, words = scratch.state[:2], scratch.positions, scratch.words
        state[:] = 0
        scratch.seen[:CLASSES] = 0
        like = scratch.bits.view(dtype.bits)
        shift, mask, flip = exponent_of(dtype)
        rest = (shift, mask, top, flip, scratch.masks, scratch.seen, state, scratch.gaps, scratch.diffs, positions)
        whole = old.size // LANES
        found = scan_encode(like, old.ctypes.data, new.ctypes.data, whole, 0, *rest, 0)
        if old.size % LANES:
            before, after = tail(scratch, 0, old, dtype), tail(scratch, 1, new, dtype)
            found = scan_encode(like, before.ctypes.data, after.ctypes.data, 1, whole * LANES, *rest, found)
        if found == 0:
            return None
        words[0] = top
        end = write_planes(words, words.size * 64 - 64, 8, scratch.gaps, scratch.diffs, state[1], scratch.numbers)
        payload = take_payload(words, end)
        return payload, positions[:found].copy()


def changed_positions(old: Bits, new: Bits, dtype: DType) -> Positions:
    """The positions where `new` differs from `old` (uint32, ascending); several times as fast as `np.flatnonzero`."""
    check(old, dtype)
    check(new, dtype)
    if dtype.itemsize == 8:
        return np.flatnonzero(old != new).astype(np.uint32)
    with Scratch.take() as scratch:
        positions, like = scratch.positions, scratch.bits.view(dtype.bits)
        whole = old.size // LANES
        found = list_changes(like, old.ctypes.data, new.ctypes.data, whole, 0, positions, 0)
        if old.size % LANES:
            before, after = tail(scratch, 0, old, dtype), tail(scratch, 1, new, dtype)
            found = list_changes(like, before.ctypes.data, after.ctypes.data, 1, whole * LANES, positions, found)
        return positions[:found].copy()


def bits_at(new: Bits, positions: Positions, dtype: DType) -> Bits:
    """`new[positions]`, twice as fast or more. `positions`: within `new`, as `changed_positions` returns them."""
    check(new, dtype)
    if dtype.itemsize == 8:
        return new[positions]
    bits = np.empty(positions.size, dtype.bits)
    gather(new.ctypes.data, positions, bits)
    return bits


def decode_block(payload: bytes | memoryview, old: Bits, dtype: DType) -> tuple[Positions, Bits]:
    """Decode `payload`: the positions (uint32, ascending) of the changes against `old`, and the new bits there.

    Raises `PeerError` naming the field for bytes that no encoder writes. It may not detect a wrong `old`; only the
    block's hash does.
    """
    check(old, dtype)
    if dtype.itemsize == 8:
        return decode_plainly(payload, old)
    return _decode(payload, old, None, dtype)


def decode_onto(payload: bytes | memoryview, old: Bits, copy: Bits, dtype: DType) -> tuple[Positions, Bits]:
    """As `decode_block`, and write the block after the changes to `copy`, which has the size of `old`."""
    check(old, dtype)
    check(copy, dtype)
    assert copy.size == old.size
    assert copy.flags.writeable
    if dtype.itemsize == 8:
        positions, bits = decode_plainly(payload, old)
        copy[:] = old
        copy[positions] = bits
        return positions, bits
    return _decode(payload, old, copy, dtype)


def _decode(payload: bytes | memoryview, old: Bits, copy: Bits | None, dtype: DType) -> tuple[Positions, Bits]:
    with Scratch.take() as scratch:
        rows = (scratch.gaps, scratch.diffs, scratch.state[2], scratch.numbers)
        most = 1 << (dtype.width - 1)
        read_payload("rice", scratch, payload, lambda words, end: read_planes(words, 8, end, *rows, old.size, most))
        return _replay(scratch, payload[0], old, copy, dtype)


def _replay(scratch: Scratch, top: int, old: Bits, copy: Bits | None, dtype: DType) -> tuple[Positions, Bits]:
    """Turn the gaps within classes in `scratch` into positions, and the differences into new bits."""
    state = scratch.state
    total = int(state[2].sum())
    if total == 0:
        raise PeerError("rice.count: no changes")
    state[0] = np.where(state[2] > 0, scratch.gaps[:, 0].astype(np.int64), NEVER)
    state[1] = 0
    scratch.seen[:CLASSES] = 0
    positions = np.empty(total + 2, np.uint32)
    bits = np.empty(total, dtype.bits)
    shift, mask, flip = exponent_of(dtype)
    tiles = (scratch.masks, scratch.seen, scratch.pending)
    rest = (shift, mask, top, flip, *tiles, state, scratch.gaps, scratch.diffs, positions, bits)
    whole = old.size // LANES
    to = 0 if copy is None else copy.ctypes.data
    found = scan_decode(bits, old.ctypes.data, to, whole, 0, *rest, 0)
    left = old.size % LANES
    if left:
        before, after = tail(scratch, 0, old, dtype), scratch.tails[1].view(dtype.bits)[:LANES]
        found = scan_decode(bits, before.ctypes.data, after.ctypes.data, 1, whole * LANES, *rest, found)
        if copy is not None:
            copy[-left:] = after[:left]
    if found != total or positions[total - 1] >= old.size:
        raise PeerError("rice.gaps: a change beyond the end of its class")
    return positions[:total], bits


def encode_plainly(old: Bits, new: Bits) -> tuple[bytes, Positions] | None:
    """For 8-byte elements: (payload, positions), or None if nothing changed. The payload: u32 positions, then bits."""
    positions = np.flatnonzero(old != new).astype("<u4")
    if positions.size == 0:
        return None
    return positions.tobytes() + new[positions].tobytes(), positions


def decode_plainly(payload: bytes | memoryview, old: Bits) -> tuple[Positions, Any]:
    """The inverse of `encode_plainly`: (positions, new bits). Raises `PeerError` naming the field."""
    count, rest = divmod(len(payload), 4 + old.itemsize)
    if rest or not 0 < count <= old.size:
        raise PeerError(f"rice.length: {len(payload)} bytes are not a list of changes")
    positions = np.frombuffer(payload, "<u4", count).copy()
    if positions[-1] >= old.size or np.any(positions[1:] <= positions[:-1]):
        raise PeerError("rice.positions: not ascending within the block")
    return positions, np.frombuffer(payload, old.dtype, count, 4 * count).copy()


def warm_up(dtype: DType) -> None:
    """Compile or load every kernel that this coder needs for `dtype`, so that no later call waits for it."""
    old = np.arange(LANES + 1, dtype=dtype.bits)
    payload = encode_block(old, old ^ dtype.bits.type(1), dtype)
    assert payload is not None
    positions, bits = decode_onto(payload, old, old.copy(), dtype)
    changed_positions(old, old, dtype)
    decode_block(payload, old, dtype)
    bits_at(old, positions, dtype)
    scatter(old, positions, bits)
