"""The last hour of statuses, compressed, so that the page can go back in time."""

import zlib
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Final

__all__ = ["History"]

KEPT_S: Final = 3600.0
MOST_BYTES: Final = 16 << 20
"""Memory of all frames. A status of 64 nodes takes about 4 KB, one of 10,000 nodes about 500 KB."""


@dataclass(frozen=True, slots=True)
class _Frame:
    at: float
    packed: bytes


class History:
    """JSON texts by the time at which they were true, oldest first."""

    def __init__(self) -> None:
        self._frames: deque[_Frame] = deque()
        self._bytes = 0

    def add(self, at: float, text: bytes) -> None:
        """Keep `text`; forget what is older than an hour, and the oldest where memory is used up. `at` rises."""
        frame = _Frame(at, zlib.compress(text, 6))
        self._frames.append(frame)
        self._bytes += len(frame.packed)
        while len(self._frames) > 1 and (self._frames[0].at < at - KEPT_S or self._bytes > MOST_BYTES):
            self._bytes -= len(self._frames.popleft().packed)

    def times(self) -> list[float]:
        """When each frame was true, Unix time, s."""
        return [frame.at for frame in self._frames]

    def at(self, at: float) -> bytes | None:
        """The frame at this time, or the next one after it, or the last one; None: there is none."""
        if not self._frames:
            return None
        index = bisect_left(self._frames, at, key=lambda frame: frame.at)
        return zlib.decompress(self._frames[min(index, len(self._frames) - 1)].packed)
