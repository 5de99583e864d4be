"""When versions are sealed, and how long after that each node's engine holds them. Pure."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from node.engines.base import Version
from node.ledger.part_history import BASE, WHOLE, Change

__all__ = ["Average", "VersionTiming"]

WEIGHT: Final = 0.3
"""The weight of the newest observation: the steps of one training run are alike, and a change is known after about
three."""
REMEMBERED: Final = 1024
"""Seals whose times are kept: with adapters, many may come within the time that a node needs for one."""


@dataclass(slots=True)
class Average:
    """An exponential moving average; None until something is observed."""

    mean: float | None = None

    def observe(self, value: float) -> None:
        self.mean = value if self.mean is None else self.mean + WEIGHT * (value - self.mean)


@dataclass(slots=True)
class VersionTiming:
    """Learns from the seals and from the versions at which nodes ask for work. Times are the caller's clock, s."""

    intervals: dict[str, Average] = field(default_factory=dict)
    """By part: seconds between two seals of versions that age its work."""
    delays: dict[bytes, Average] = field(default_factory=dict)
    """By node: seconds from a seal until its engine held that version."""
    _sealed: OrderedDict[Version, float] = field(default_factory=OrderedDict)
    _aged: dict[str, tuple[Version, float]] = field(default_factory=dict)
    """By part: the last version that aged its work, and when it was sealed."""
    _seen: dict[bytes, Version] = field(default_factory=dict)

    def sealed(self, version: Version, now: float, change: Change = WHOLE) -> None:
        """`version` was sealed, which made `change`."""
        for part in {BASE, *self._aged, *change.changed}:
            if not change.ages(part):
                continue
            last = self._aged.get(part)
            if last is not None and version[0] == last[0][0]:
                self.intervals.setdefault(part, Average()).observe(now - last[1])
            self._aged[part] = version, now
        for part in [part for part in self._aged if part != BASE and part not in change.adapters]:
            del self._aged[part]
            self.intervals.pop(part, None)
        self._sealed[version] = now
        while len(self._sealed) > REMEMBERED:
            self._sealed.popitem(last=False)

    def interval_s(self, part: str = BASE) -> float | None:
        """The usual seconds between two versions that age work of `part`; None: unknown."""
        found = self.intervals.get(part)
        return None if found is None else found.mean

    def arrived(self, node: bytes, version: Version, now: float) -> None:
        """`node` asks for work at `version`."""
        if self._seen.get(node, version) < version and (at := self._sealed.get(version)) is not None:
            self.delays.setdefault(node, Average()).observe(now - at)
        self._seen[node] = version

    def forget(self, node: bytes) -> None:
        """`node` left."""
        self.delays.pop(node, None)
        self._seen.pop(node, None)

    def due_s(self, now: float, part: str = BASE) -> float:
        """Seconds until the next seal that ages work of `part` is expected; inf while that is unknown.

        A seal that is overdue by `t` is expected in `t` more: a trainer that waits for rollouts before it publishes
        must not make the nodes wait for it.
        """
        interval_s, last = self.interval_s(part), self._aged.get(part)
        if interval_s is None or last is None:
            return float("inf")
        return abs(last[1] + interval_s - now)

    def usable_s(self, spare: int, now: float, part: str = BASE) -> float:
        """Seconds until tokens of `part` are expected to be too old, which `spare` more versions leave young enough;
        `spare` below 0: they are too old now."""
        if spare < 0:
            return 0.0
        return self.due_s(now, part) + spare * (self.interval_s(part) or 0.0)

    def arrival_s(self, node: bytes, head: Version, now: float) -> float | None:
        """Seconds until the engine of `node` is expected to hold `head`; 0 when it does or is overdue; None:
        unknown."""
        if self._seen.get(node, (-1, -1)) >= head:
            return 0.0
        average, at = self.delays.get(node), self._sealed.get(head)
        if average is None or average.mean is None or at is None:
            return None
        return max(0.0, at + average.mean - now)

    def late_for_next(self, node: bytes, max_lag: int, part: str = BASE) -> bool:
        """Whether `node`, which holds the head, is expected to get the next version of `part` only when the head is too
        old."""
        average, interval_s = self.delays.get(node), self.interval_s(part)
        if not max_lag or interval_s is None or average is None or average.mean is None:
            return False  # without lag the trainer waits for rollouts before it publishes
        return average.mean >= max_lag * interval_s
