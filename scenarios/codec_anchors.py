"""The published ways to send a sparse step, built anew, and the bounds that no coder of their kind can beat.

leb128: gaps as LEB128, values raw (SparrowRL's way). gaps16_zstd: gaps as u16, values raw, zstd level 1 (PULSE's
way). Both are as fast as numba makes them and work on whole parts of tensors, so that the comparison is one of methods.
"""

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np

from codec.bits import Bits, DType, ordinal

__all__ = ["ANCHORS", "Bounds"]


@numba.njit(nogil=True)
def _leb128_encode(old: Any, new: Any, gaps: Any, values: Any) -> tuple[int, int]:
    """(bytes of gaps, changes)."""
    at = count = 0
    after = 0
    for i in range(old.size):
        if old[i] != new[i]:
            gap = i - after
            while gap >= 128:
                gaps[at] = gap & 127 | 128
                at += 1
                gap >>= 7
            gaps[at] = gap
            at += 1
            values[count] = new[i]
            count += 1
            after = i + 1
    return at, count


@numba.njit(nogil=True)
def _leb128_decode(gaps: Any, values: Any, words: Any) -> None:
    position = np.int64(-1)
    at = 0
    for i in range(values.size):
        gap = shift = 0
        while gaps[at] >= 128:
            gap |= (np.int64(gaps[at]) & 127) << shift
            shift += 7
            at += 1
        position += 1 + (gap | np.int64(gaps[at]) << shift)
        at += 1
        words[position] = values[i]


@numba.njit(nogil=True)
def _gaps16_encode(old: Any, new: Any, gaps: Any, values: Any) -> int:
    """Changes. A gap above 65535 is written as 65535 and the old value, which changes nothing, and goes on."""
    count = 0
    after = 0
    for i in range(old.size):
        if old[i] != new[i]:
            while i - after > 65535:
                gaps[count] = 65535
                values[count] = old[after + 65535]
                after += 65536
                count += 1
            gaps[count] = i - after
            values[count] = new[i]
            count += 1
            after = i + 1
    return count


@numba.njit(nogil=True)
def _gaps16_decode(gaps: Any, values: Any, words: Any) -> None:
    position = np.int64(-1)
    for i in range(values.size):
        position += 1 + np.int64(gaps[i])
        words[position] = values[i]


def _leb128(old: Bits, new: Bits, dtype: DType) -> bytes:
    gaps, values = np.empty(3 * old.size, np.uint8), np.empty(old.size, old.dtype)
    at, count = _leb128_encode(old, new, gaps, values)
    return count.to_bytes(4, "little") + values[:count].tobytes() + gaps[:at].tobytes()


def _leb128_back(payload: bytes, words: Bits) -> None:
    count = int.from_bytes(payload[:4], "little")
    values = np.frombuffer(payload, words.dtype, count, 4)
    _leb128_decode(np.frombuffer(payload, np.uint8, -1, 4 + values.nbytes), values, words)


def _zstd() -> Any:
    """The zstandard package; None where it is not installed."""
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard


def _gaps16(old: Bits, new: Bits, dtype: DType) -> bytes:
    gaps, values = np.empty(old.size, np.uint16), np.empty(old.size, old.dtype)
    count = _gaps16_encode(old, new, gaps, values)
    raw = gaps[:count].tobytes() + values[:count].tobytes()
    return count.to_bytes(4, "little") + _zstd().ZstdCompressor(level=1).compress(raw)


def _gaps16_back(payload: bytes, words: Bits) -> None:
    count = int.from_bytes(payload[:4], "little")
    raw = _zstd().ZstdDecompressor().decompress(payload[4:])
    _gaps16_decode(np.frombuffer(raw, np.uint16, count), np.frombuffer(raw, words.dtype, count, 2 * count), words)


ANCHORS: Final[dict[str, tuple[Callable[[Bits, Bits, DType], bytes], Callable[[bytes, Bits], None]]]] = {
    "leb128": (_leb128, _leb128_back),
} | ({"gaps16_zstd": (_gaps16, _gaps16_back)} if _zstd() else {})
"""Each: (old, new, dtype) -> payload; and payload onto old bits, in place."""


class Bounds:
    """Entropies of the steps seen, in bits a change. Fitted to the very data, so a coder pays for its tables besides.

    Positions: -log2 of the binomial likelihood, plus half a log2 n for the rate of each context. Values: the plug-in
    entropy of the ordinal difference.
    """

    def __init__(self) -> None:
        self._elements = self._changed = 0
        self._by_exponent_bits = 0.0
        self._differences: dict[int, dict[int, int]] = {}

    def add(self, old: Bits, new: Bits, dtype: DType) -> None:
        """Count one part of a tensor: a context of its own, with each exponent."""
        shift, mask = dtype.exponent_shift or 0, dtype.exponent_mask or 0
        where = np.flatnonzero(old != new)
        members = np.bincount((old >> dtype.bits.type(shift)) & dtype.bits.type(mask), minlength=mask + 1)
        exponents = ((old[where] >> dtype.bits.type(shift)) & dtype.bits.type(mask)).astype(np.int64)
        changes = np.bincount(exponents, minlength=mask + 1)
        self._elements += old.size
        self._changed += where.size
        self._by_exponent_bits += sum(
            _binomial_bits(int(n), int(k)) for n, k in zip(members, changes, strict=True) if n
        )
        signed = (ordinal(new[where], dtype) - ordinal(old[where], dtype)).view(f"i{dtype.itemsize}")
        pairs, counts = np.unique(np.stack([exponents, signed.astype(np.int64)]), axis=1, return_counts=True)
        for (exponent, difference), count in zip(pairs.T.tolist(), counts.tolist(), strict=True):
            table = self._differences.setdefault(exponent, {})
            table[difference] = table.get(difference, 0) + count

    def naive(self) -> float:
        """Positions independent of everything, differences independent of everything."""
        together: dict[int, int] = {}
        for table in self._differences.values():
            for difference, count in table.items():
                together[difference] = together.get(difference, 0) + count
        bits = _binomial_bits(self._elements, self._changed) + _entropy_bits(together)
        return bits / max(self._changed, 1)

    def conditional(self) -> float:
        """Both given the old exponent; positions given the tensor too."""
        bits = self._by_exponent_bits + sum(map(_entropy_bits, self._differences.values()))
        return bits / max(self._changed, 1)


def _binomial_bits(n: int, k: int) -> float:
    bits = 0.5 * np.log2(n)
    for count in (k, n - k):
        if count:
            bits -= count * np.log2(count / n)
    return float(bits)


def _entropy_bits(table: dict[int, int]) -> float:
    counts = np.array(list(table.values()), np.float64)
    return float(-(counts * np.log2(counts / counts.sum())).sum()) if counts.size else 0.0
