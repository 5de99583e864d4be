"""What each version took on the nodes' engines, by their timesheets; the slowest node counts."""

from collections import OrderedDict
from collections.abc import Container
from typing import Final, NamedTuple

from node.engines.base import Version
from node.ledger.messages import Timesheet

__all__ = ["CommitStats", "Slowest"]

KEPT: Final = 256
"""Versions remembered."""


class Slowest(NamedTuple):
    """The longest times of all engines that committed a version, s; None: none has. See `CommitTimes` in the status."""

    engines: int = 0
    """How many have committed it."""
    wait_s: float | None = None
    stage_s: float | None = None
    pause_s: float | None = None
    resume_s: float | None = None


class CommitStats:
    """Timesheets overlap, so a commit is noted more than once; the last note counts. Read for the status."""

    def __init__(self) -> None:
        self._versions: OrderedDict[Version, dict[bytes, tuple[float, float, float, float]]] = OrderedDict()

    def note(self, node: bytes, sheet: Timesheet, sealed: Container[Version]) -> None:
        """`sealed`: versions to count; a node can write any other into its timesheet."""
        for commit in sheet.commits:
            version = (commit.epoch, commit.version)
            if version not in sealed:
                continue
            took = self._versions.setdefault(version, {})
            took[node] = (commit.wait_s, commit.stage_s, commit.pause_s, commit.resume_s)
        while len(self._versions) > KEPT:
            self._versions.popitem(last=False)

    def slowest(self, version: Version) -> Slowest:
        took = self._versions.get(version, {}).values()
        return Slowest(len(took), *(max(times) for times in zip(*took, strict=True)))
