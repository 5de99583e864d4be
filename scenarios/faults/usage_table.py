"""What processes and folders use over a long run, and whether it is the same at its end as at its beginning."""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from scenarios.harness.usage import ProcessUsage

__all__ = ["REACH", "UsageTable", "folder_bytes"]

REACH: Final = 0.05
"""Growth from the first to the last quarter."""
LEAST: Final[Mapping[str, float]] = {
    "memory": 1 << 20, "descriptors": 2, "connections": 24, "disk": 1 << 20, "log a version": 64,
}  # fmt: skip
"""Growth that does not count, by quantity: of a few descriptors, one is more than 5 %. Connections: two to each of a
dozen peers, since which peers have one, and which have a second one for bulk, changes with the trees."""

NOT_JUDGED: Final = frozenset({"book"})
"""Quantities that are meant to grow, up to a bound that no run reaches."""


def folder_bytes(folder: Path, *, without: Sequence[str] = ()) -> int:
    """Bytes of disk that the files below a folder take; without those whose names begin with one of `without`."""
    total = 0
    for parent, _, names in os.walk(folder):  # unlike `Path.rglob`, it goes on where a folder is gone by now
        for name in names:
            with suppress(OSError):
                if not name.startswith(tuple(without)):
                    total += os.stat(os.path.join(parent, name), follow_symlinks=False).st_blocks * 512
    return total


class UsageTable:
    """Samples of quantities by name. `sample` takes one of each; `rows` compares the quarters."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[float]] = {}

    def sample_process(self, name: str, pid: int | None) -> None:
        """Memory, TCP connections and all other descriptors of a process; nothing while there is none."""
        if pid is None:
            return
        usage = ProcessUsage(pid)
        with suppress(OSError, IndexError):
            memory, kinds = usage.rss_bytes, usage.descriptor_kinds
            connections = kinds.pop("connection", 0)
            self.sample(name, "memory", memory)
            self.sample(name, "descriptors", kinds.total())
            self.sample(name, "connections", connections)

    def sample(self, name: str, quantity: str, value: float) -> None:
        self._found.setdefault((name, quantity), []).append(value)

    def rows(self) -> list[dict[str, Any]]:
        """For each name and quantity the means of the first and the last quarter, the growth as a share of the first,
        and whether it is flat: it grew by less than `REACH`, or by less than `LEAST` (None: of `NOT_JUDGED`). `tenths`:
        the means of ten parts, or the values if they are fewer, which show whether what grew goes on growing."""
        rows = []
        for (name, quantity), values in self._found.items():
            quarter = max(1, len(values) // 4)
            first, last = statistics.fmean(values[:quarter]), statistics.fmean(values[-quarter:])
            grown = last - first
            flat = None if quantity in NOT_JUDGED else grown <= max(REACH * first, LEAST.get(quantity, 0))
            rows.append({
                "of": name, "what": quantity, "first": first, "last": last, "most": max(values),
                "growth": grown / first if first else 0.0, "flat": flat, "samples": len(values),
                "tenths": _tenths(values),
            })  # fmt: skip
        return rows

    @staticmethod
    def print_rows(rows: Sequence[dict[str, Any]]) -> None:
        """Print the rows; memory and disk in MiB."""
        print(f"{'of':<16} {'what':<16} {'first':>10} {'last':>10} {'most':>10} {'growth':>8}")
        for row in rows:
            scale: Callable[[float], str] = _mib if row["what"] in ("memory", "disk", "book") else "{:,.1f}".format
            cells = (scale(row["first"]), scale(row["last"]), scale(row["most"]), f"{row['growth']:+.1%}")
            flat = {True: "", False: "  NOT FLAT", None: "  (not judged)"}[row["flat"]]
            print(
                f"{row['of']:<16} {row['what']:<16} "
                + " ".join(f"{c:>{w}}" for c, w in zip(cells, (10, 10, 10, 8), strict=True))
                + flat
            )


def _tenths(values: Sequence[float]) -> list[float]:
    parts = min(10, len(values))
    edges = [len(values) * at // parts for at in range(parts + 1)]
    return [round(statistics.fmean(values[begin:end]), 1) for begin, end in pairwise(edges)]


def _mib(value: float) -> str:
    return f"{value / 2**20:,.1f}M"
