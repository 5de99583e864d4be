"""The position coder: the positions of the changes in Golomb codes, their values in the planes of `codec.rice`.

It takes about 9.7 bits per change at 1 % density, where `codec.rice` takes 7.1. But its decoder finds the positions
without reading the old weights, so its time grows with the number of changes and not with the size of the model. Use it
for fast links and few cores. Golomb codes with any m, not only powers of two, are within 0.02 bits of the entropy of
gaps without a context. The coder is named after pcodec, which it replaced, and which takes 0.06 bits more and three
times as long.
"""

import numpy as np

from codec.bits import Bits, DType
from codec.errors import PeerError
from codec.kernels.planes import read_positions, read_values, write_positions, write_values
from codec.kernels.scan import count_values, merge_values, sort_values
from codec.layout import BLOCK_ELEMENTS
from codec.rice import changed_positions, decode_plainly, encode_plainly
from codec.scratch import Positions, Scratch, check, choose_top, exponent_of, read_payload, take_payload

__all__ = ["decode_block", "encode_block", "encode_changes", "warm_up"]


def encode_block(old: Bits, new: Bits, dtype: DType) -> bytes | None:
    """The coded changes from `old` to `new` (flat arrays of `dtype.bits`, at most a block); None if there are none."""
    coded = encode_changes(old, new, dtype)
    return None if coded is None else coded[0]


def encode_changes(old: Bits, new: Bits, dtype: DType) -> tuple[bytes, Positions] | None:
    """As `encode_block`, with the positions of the changes (uint32, ascending)."""
    check(old, dtype)
    check(new, dtype)
    if dtype.itemsize == 8:
        return encode_plainly(old, new)
    positions = changed_positions(old, new, dtype)
    if positions.size == 0:
        return None
    with Scratch.take() as scratch:
        top, like, words = choose_top(scratch, old, dtype), scratch.bits.view(dtype.bits), scratch.words
        shift, mask, flip = exponent_of(dtype)
        fill, capacity = scratch.state[1], words.size * 64 - 64
        fill[:] = 0
        sort_values(
            like, old.ctypes.data, new.ctypes.data, positions, shift, mask, top, flip, fill, scratch.diffs
        )  # fmt: skip
        words[0] = top
        at = write_positions(words, capacity, 8, positions, scratch.numbers)
        assert at > 0
        payload = take_payload(words, write_values(words, capacity, at, scratch.diffs, fill, scratch.numbers))
        return payload, positions


def decode_block(payload: bytes | memoryview, old: Bits, dtype: DType) -> tuple[Positions, Bits]:
    """Decode `payload`: the positions (uint32, ascending) of the changes against `old`, and the new bits there.

    Raises `PeerError` naming the field.
    """
    check(old, dtype)
    assert old.size <= BLOCK_ELEMENTS
    if dtype.itemsize == 8:
        return decode_plainly(payload, old)
    if not payload:
        raise PeerError("pco.length: 0 bytes")
    with Scratch.take() as scratch:
        like, address, top = scratch.bits.view(dtype.bits), old.ctypes.data, payload[0]
        shift, mask, flip = exponent_of(dtype)
        fill, most = scratch.state[2], 1 << (dtype.width - 1)
        found = 0

        def planes(words: np.ndarray, end: int) -> int:
            nonlocal found
            found, at = read_positions(words, 8, end, scratch.positions, scratch.numbers, old.size)
            if at < 0:
                return at
            fill[:] = 0
            count_values(like, address, scratch.positions[:found], shift, mask, top, fill)
            return read_values(words, at, end, scratch.diffs, fill, scratch.numbers, most)

        read_payload("pco", scratch, payload, planes)
        positions, bits = scratch.positions[:found].copy(), np.empty(found, dtype.bits)
        fill[:] = 0
        merge_values(like, address, positions, shift, mask, top, flip, fill, scratch.diffs, bits)
        return positions, bits


def warm_up(dtype: DType) -> None:
    """Compile or load every kernel that this coder needs for `dtype`; see `codec.rice.warm_up`."""
    old = np.arange(65, dtype=dtype.bits)
    payload = encode_block(old, old ^ dtype.bits.type(1), dtype)
    assert payload is not None
    decode_block(payload, old, dtype)
