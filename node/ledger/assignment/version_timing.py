"""When versions come: how often one is sealed, and how long after that each node's engine holds it. Pure."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from node.engines.base import Version

__all__ = ["Average", "VersionTiming"]

WEIGHT: Final = 0.3
"""Of the newest observation: steps of one training run are alike, and a change is known after about three."""
REMEMBERED: Final = 64


@dataclass(slots=True)
class Average:
    """A mean that forgets; None until something was observed."""

    mean: float | None = None

    def observe(self, value: float) -> None:
        self.mean = value if self.mean is None else self.mean + WEIGHT * (value - self.mean)


@dataclass(slots=True)
class VersionTiming:
    """Fed with seals and with the versions that nodes ask at. Times are the caller's clock, s."""

    interval: Average = field(default_factory=Average)
    """Between two seals."""
    delays: dict[bytes, Average] = field(default_factory=dict)
    """By node: from a seal until its engine held that version."""
    _sealed: OrderedDict[Version, float] = field(default_factory=OrderedDict)
    _seen: dict[bytes, Version] = field(default_factory=dict)

    def sealed(self, version: Version, now: float) -> None:
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
        self.delays.pop(node, None)
        self._seen.pop(node, None)

    def due_s(self, now: float) -> float:
        """Seconds until the next seal is expected; inf while nothing is known.

        One that is overdue by so long is expected in as long again: a trainer that waits for rollouts before it
        publishes must not make us wait for it.
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
        """Seconds until `node`'s engine is expected to hold `head`; 0 when it does or should; None: not known."""
        if self._seen.get(node, (-1, -1)) >= head:
            return 0.0
        average, at = self.delays.get(node), self._sealed.get(head)
        if average is None or average.mean is None or at is None:
            return None
        return max(0.0, at + average.mean - now)

    def late_for_next(self, node: bytes, max_lag: int) -> bool:
        """Will `node`, which holds the head, have the next version only when the head is too old already?"""
        average = self.delays.get(node)
        if not max_lag or self.interval.mean is None or average is None or average.mean is None:
            return False  # without lag the trainer waits for rollouts before it publishes
        return average.mean >= max_lag * self.interval.mean
