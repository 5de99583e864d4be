"""What each version took on the nodes' engines, as their timesheets say, the slowest node's counting."""

from collections import OrderedDict
from collections.abc import Container
from typing import Any, Final

from node.engines.base import Version
from node.ledger.messages import Timesheet

__all__ = ["CommitStats"]

KEPT: Final = 256
"""Versions remembered."""


class CommitStats:
    """Fed with timesheets, which overlap; read by `status`."""

    def __init__(self) -> None:
        self._versions: OrderedDict[Version, dict[bytes, tuple[float, float, float, float]]] = OrderedDict()

    def note(self, node: bytes, sheet: Timesheet, sealed: Container[Version]) -> None:
        """`sealed`: the versions that are counted; a node may write any others into its sheet."""
        for commit in sheet.commits:
            version = (commit.epoch, commit.version)
            if version not in sealed:
                continue
            took = self._versions.setdefault(version, {})
            took[node] = (commit.wait_s, commit.stage_s, commit.pause_s, commit.resume_s)
        while len(self._versions) > KEPT:
            self._versions.popitem(last=False)

    def of(self, version: Version) -> dict[str, Any]:
        """`engines`: how many have taken it; `wait_s`, `stage_s`, `pause_s`, `resume_s`: the longest, or None."""
        took = list(self._versions.get(version, {}).values())
        names = ("wait_s", "stage_s", "pause_s", "resume_s")
        longest = {name: max((times[i] for times in took), default=None) for i, name in enumerate(names)}
        return {"engines": len(took)} | longest
