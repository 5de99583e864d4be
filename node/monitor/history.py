"""The last hour of statuses, compressed, so that the page can go back in time."""

import zlib
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Final

__all__ = ["History", "Point"]

KEPT_S: Final = 3600.0
MOST_BYTES: Final = 16 << 20
"""Memory of all frames. A status of 64 nodes takes about 4 KB, one of 10,000 nodes about 500 KB."""


@dataclass(frozen=True, slots=True)
class Point:
    """When a frame was true, and the figure that the page draws over time."""

    at: float
    """Unix time, s."""
    tokens_s: float | None = None
    """Tokens/s of the whole swarm, or of this node; None: nothing generates here."""


@dataclass(frozen=True, slots=True)
class _Frame:
    point: Point
    packed: bytes


class History:
    """JSON texts, each with its point, oldest first."""

    def __init__(self) -> None:
        self._frames: deque[_Frame] = deque()
        self._bytes = 0

    def add(self, point: Point, text: bytes) -> None:
        """Keep `text`; forget what is older than an hour, and the oldest where memory is used up. Times rise."""
        frame = _Frame(point, zlib.compress(text, 6))
        self._frames.append(frame)
        self._bytes += len(frame.packed)
        while len(self._frames) > 1 and (self._frames[0].point.at < point.at - KEPT_S or self._bytes > MOST_BYTES):
            self._bytes -= len(self._frames.popleft().packed)

    def points(self) -> list[Point]:
        """The points of all frames."""
        return [frame.point for frame in self._frames]

    def at(self, at: float) -> bytes | None:
        """The frame at this time, or the next one after it, or the last one; None: there is none."""
        if not self._frames:
            return None
        index = bisect_left(self._frames, at, key=lambda frame: frame.point.at)
        return zlib.decompress(self._frames[min(index, len(self._frames) - 1)].packed)
