"""Published formats for sparse steps, reimplemented, to measure on the same bits as ours.

leb128: gaps as LEB128, values raw (as in SparrowRL). gaps16_zstd: gaps as u16, values raw, zstd level 1 (as in PULSE).
Both are compiled with numba and work on whole parts of tensors, so that the comparison is one of methods.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from codec.bits import Bits, DType
from codec.kernels.jit import kernel

__all__ = ["BASELINES", "Timed", "measure", "seconds"]


@kernel
def _leb128_encode(old: Any, new: Any, gaps: Any, values: Any) -> tuple[int, int]:
    """Fill `gaps` (uint8) and `values`. Returns (bytes of gaps, changes)."""
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


@kernel
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


@kernel
def _gaps16_encode(old: Any, new: Any, gaps: Any, values: Any) -> int:
    """Fill `gaps` (uint16) and `values`. Returns the entries. A gap above 65535 is split: the extra entries rewrite the
    old value at their position, which changes nothing."""
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


@kernel
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
    return import_module("zstandard") if find_spec("zstandard") else None


def _gaps16(old: Bits, new: Bits, dtype: DType) -> bytes:
    gaps, values = np.empty(old.size, np.uint16), np.empty(old.size, old.dtype)
    count = _gaps16_encode(old, new, gaps, values)
    raw = gaps[:count].tobytes() + values[:count].tobytes()
    return count.to_bytes(4, "little") + _zstd().ZstdCompressor(level=1).compress(raw)


def _gaps16_back(payload: bytes, words: Bits) -> None:
    count = int.from_bytes(payload[:4], "little")
    raw = _zstd().ZstdDecompressor().decompress(payload[4:])
    _gaps16_decode(np.frombuffer(raw, np.uint16, count), np.frombuffer(raw, words.dtype, count, 2 * count), words)


BASELINES: Final[dict[str, tuple[Callable[[Bits, Bits, DType], bytes], Callable[[bytes, Bits], None]]]] = {
    "leb128": (_leb128, _leb128_back),
} | ({"gaps16_zstd": (_gaps16, _gaps16_back)} if _zstd() else {})
"""By name: encode (old, new, dtype) -> payload; and decode (payload, bits), which changes old bits in place."""


@dataclass
class Timed:
    """Bytes and seconds of one format, summed. Seconds: CPU time of this thread, the least of the repeats."""

    payload_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    exact: bool = True


def measure(name: str, old: Bits, new: Bits, dtype: DType, timed: Timed, repeats: int = 1) -> None:
    """Encode and decode a part of a tensor in the format `name`, without blocks, hashes or signatures."""
    encode, decode = BASELINES[name]
    spent, payload = seconds(repeats, lambda: encode(old, new, dtype))
    timed.encode_s += spent
    timed.payload_bytes += len(payload)
    words = old.copy()
    spent, _ = seconds(repeats, lambda: decode(payload, words))
    timed.decode_s += spent
    timed.exact &= np.array_equal(words, new)


def seconds(repeats: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """Call `work` `repeats` times. Returns (least CPU seconds of this thread, last result)."""
    least, result = float("inf"), None
    for _ in range(repeats):
        start = time.thread_time()
        result = work()
        least = min(least, time.thread_time() - start)
    return least, result
