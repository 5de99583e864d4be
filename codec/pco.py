"""The position-independent coder: gaps between changes through pcodec, differences in the planes of `codec.rice`.

About 9.7 bits a change at 1 % density, where `codec.rice` takes 7.1; but a decoder need not look at the old weights to
know *where* something changes, so it runs at the speed of the changes and not of the model. For fast links and few
cores.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone  # pyright: ignore[reportAttributeAccessIssue]

from codec.bits import Bits, DType
from codec.errors import PeerError
from codec.layout import BLOCK_ELEMENTS
from codec.rice import changed_positions, decode_plainly, decode_values, encode_plainly, encode_values
from codec.varint import Reader, Writer

__all__ = ["decode_block", "encode_block"]

_CONFIG = ChunkConfig(compression_level=8, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
"""Level 8 of 12: 4 is 10 % larger, 12 0.2 % smaller. Gaps have no structure that the automatic modes could find, and
looking for it takes time."""


def encode_block(old: Bits, new: Bits, dtype: DType) -> bytes | None:
    """The changes from `old` to `new` (flat arrays of `dtype.bits`, at most a block), or None if there are none."""
    assert old.dtype == new.dtype == dtype.bits
    assert old.size == new.size <= BLOCK_ELEMENTS
    if dtype.itemsize == 8:
        plain = encode_plainly(old, new)
        return None if plain is None else plain[0]
    positions = changed_positions(old, new, dtype)
    if positions.size == 0:
        return None
    gaps = np.diff(positions, prepend=positions[:1]) - np.uint32(1)
    gaps[0] = positions[0]
    if gaps.max() < 1 << 16:
        gaps = gaps.astype(np.uint16)
    coded_gaps = standalone.simple_compress(gaps, _CONFIG)
    out = Writer()
    out.uint(positions.size)
    out.uint(gaps.itemsize)
    out.uint(len(coded_gaps))
    out.raw(coded_gaps)
    out.raw(encode_values(old, new, positions, dtype))
    return bytes(out.data)


def decode_block(payload: bytes, old: Bits, dtype: DType) -> tuple[NDArray[np.uint32], Bits]:
    """Positions (uint32, ascending) and new bits of the changes in `payload`, relative to `old`.

    Raises `PeerError` naming the field.
    """
    assert old.dtype == dtype.bits
    assert old.size <= BLOCK_ELEMENTS
    if dtype.itemsize == 8:
        return decode_plainly(payload, old)
    reader = Reader(payload, "pco")
    count = reader.uint("count", old.size)
    if count == 0:
        raise PeerError("pco.count: no changes")
    width = reader.uint("gap width", 4)
    if width not in (2, 4):
        raise PeerError(f"pco.gap width: {width}, not 2 or 4")
    gaps = _expand(reader.raw("gaps", reader.uint("length", len(payload))), np.zeros(count, f"u{width}"), "gaps")
    positions = np.cumsum(gaps, dtype=np.int64) + np.arange(count)
    if positions[-1] >= old.size:
        raise PeerError("pco.gaps: a change beyond the end of the block")
    positions = positions.astype(np.uint32)
    return positions, decode_values(reader.raw("values", reader.left), old, positions, dtype)


def _expand(data: bytes, into: NDArray[Any], field: str) -> NDArray[Any]:
    """Decompress exactly `into.size` numbers. pcodec allocates nothing that `into` does not bound."""
    try:
        progress = standalone.simple_decompress_into(data, into)
    except (RuntimeError, TypeError) as error:
        raise PeerError(f"pco.{field}: {error}") from error
    except BaseException as error:
        # A panic of the Rust library arrives as a BaseException of its own, outside Exception.
        if type(error).__name__ == "PanicException":
            raise PeerError(f"pco.{field}: pcodec gave up on it") from error
        raise
    if progress.n_processed != into.size or not progress.finished:
        raise PeerError(f"pco.{field}: not {into.size} numbers")
    return into
