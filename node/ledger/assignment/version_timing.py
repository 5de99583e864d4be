"""When versions are sealed, and how long after that each node's engine holds them. Pure."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from node.engines.base import Version

__all__ = ["Average", "VersionTiming"]

WEIGHT: Final = 0.3
"""The weight of the newest observation: the steps of one training run are alike, and a change is known after about
three."""
REMEMBERED: Final = 64
"""Seals whose times are kept."""


@dataclass(slots=True)
class Average:
    """An exponential moving average; None until something is observed."""

    mean: float | None = None

    def observe(self, value: float) -> None:
        self.mean = value if self.mean is None else self.mean + WEIGHT * (value - self.mean)


@dataclass(slots=True)
class VersionTiming:
    """Learns from the seals and from the versions at which nodes ask for work. Times are the caller's clock, s."""

    interval: Average = field(default_factory=Average)
    """Seconds between two seals."""
    delays: dict[bytes, Average] = field(default_factory=dict)
    """By node: seconds from a seal until its engine held that version."""
    _sealed: OrderedDict[Version, float] = field(default_factory=OrderedDict)
    _seen: dict[bytes, Version] = field(default_factory=dict)

    def sealed(self, version: Version, now: float) -> None:
        """`version` was sealed."""
        if self._sealed:
            last, at = next(reversed(self._sealed.items()))
            if version[0] == last[0]:
                self.interval.observe(now - at)
        self._sealed[version] = now
        while len(self._sealed) > REMEMBERED:
            self._sealed.popitem(last=False)

    def arrived(self, node: bytes, version: Version, now: float) -> None:
        """`node` asks for work at `version`."""
        if self._seen.get(node, version) < version and (at := self._sealed.get(version)) is not None:
            self.delays.setdefault(node, Average()).observe(now - at)
        self._seen[node] = version

    def forget(self, node: bytes) -> None:
        """`node` left."""
        self.delays.pop(node, None)
        self._seen.pop(node, None)

    def due_s(self, now: float) -> float:
        """Seconds until the next seal is expected; inf while that is unknown.

        A seal that is overdue by `t` is expected in `t` more: a trainer that waits for rollouts before it publishes
        must not make the nodes wait for it.
        """
        if self.interval.mean is None or not self._sealed:
            return float("inf")
        _, at = next(reversed(self._sealed.items()))
        return abs(at + self.interval.mean - now)

    def usable_s(self, version: Version, head: Version, max_lag: int, now: float) -> float:
        """Seconds until tokens of `version` are expected to be too old."""
        spare = max_lag - (head[1] - version[1])
        if version[0] != head[0] or spare < 0:
            return 0.0
        due_s = self.due_s(now)
        return due_s + spare * (self.interval.mean or 0.0)

    def arrival_s(self, node: bytes, head: Version, now: float) -> float | None:
        """Seconds until the engine of `node` is expected to hold `head`; 0 when it does or is overdue; None:
        unknown."""
        if self._seen.get(node, (-1, -1)) >= head:
            return 0.0
        average, at = self.delays.get(node), self._sealed.get(head)
        if average is None or average.mean is None or at is None:
            return None
        return max(0.0, at + average.mean - now)

    def late_for_next(self, node: bytes, max_lag: int) -> bool:
        """Whether `node`, which holds the head, is expected to get the next version only when the head is too old."""
        average = self.delays.get(node)
        if not max_lag or self.interval.mean is None or average is None or average.mean is None:
            return False  # without lag the trainer waits for rollouts before it publishes
        return average.mean >= max_lag * self.interval.mean
