"""Histograms over versions: each version that a status shows is counted once, however often the status is read."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from node.status.schema import NodeStatus, SeedStatus, Status, Version

__all__ = ["APPLY_BOUNDS_S", "PAUSE_BOUNDS_S", "Histogram", "Observations"]

APPLY_BOUNDS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
"""From a delta of a megabyte on a LAN to a large model's on home uplinks."""
PAUSE_BOUNDS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
"""From a scatter of a small delta to a reload of the whole model."""


@dataclass(slots=True)
class Histogram:
    """Observations by upper bound, as Prometheus counts them. `bounds`: seconds, rising, without infinity."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    """Observations in each bucket, not cumulative; one more than there are bounds."""
    total: float = 0.0
    """Sum of all observations, s."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one observation of so many seconds."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds as text, each with the number of observations up to it."""
        rows, so_far = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            rows.append((bound, float(so_far)))
        return rows


class Observations:
    """What was seen of versions since this process began to look. Versions that went by unseen are not counted, so
    `look` has to be called more often than 256 versions take."""

    def __init__(self) -> None:
        self.apply = Histogram(APPLY_BOUNDS_S)
        """Seed: from the begin of a publish until the last member held the version."""
        self.pause = Histogram(PAUSE_BOUNDS_S)
        """Seed: the longest pause that a version caused on an engine. Node: each pause of its engine."""
        self._applied: Version = (0, -1)
        self._paused: Version = (0, -1)

    def look(self, status: Status) -> None:
        """Count the versions of `status` that are new since the last call."""
        if isinstance(status, SeedStatus):
            for step in status.steps:
                if step.publish_to_all_s is not None and step.version > self._applied:
                    self.apply.observe(step.publish_to_all_s)
                    self._applied = step.version
                if step.pause_s is not None and not step.waiting and step.version > self._paused:
                    self.pause.observe(step.pause_s)
                    self._paused = step.version
        elif isinstance(status, NodeStatus):
            commits = status.nodes[0].commits if status.nodes else ()
            for commit in commits if isinstance(commits, list) else ():
                if commit.version > self._paused:
                    self.pause.observe(commit.pause_ms / 1000)
                    self._paused = commit.version
