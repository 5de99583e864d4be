"""Measures what a seed and its relays cost while nothing is published: CPU time, wake-ups and memory of each process.

    python -m scenarios.bench.idle --relays 60 --seconds 60
    python -m scenarios.bench.idle --relays 8 --publish-mb 64 --json

All processes run on this machine, over loopback, with the deadlines of the `wan` preset. With `--publish-mb` the seed
publishes one file of random bytes first, so that bulk connections are open and buffers have been used.

CPU time is what the kernel charged to the process. A wake-up is a voluntary context switch of one of its threads. The
kernel forgets those of a thread that ends, so only threads that are there at the end count. PSS is resident memory in
which a page that n processes share counts as 1/n.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from scenarios.harness.swarm import STARTED_WITHIN_S, Swarm

__all__ = ["main", "measure"]

_STARTED_AT_ONCE: Final = 4
"""Relays that are started together: each takes a second of CPU time to import its modules."""
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """What the kernel counted for a process since its start, and its memory now."""

    cpu_s: float
    wakeups: dict[str, int]
    """By thread."""
    rss_mb: float
    pss_mb: float
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Usage":
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        wakeups = {}
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
                wakeups[thread.name] = int(_fields(thread / "status")["voluntary_ctxt_switches"])
        memory = _fields(Path(f"/proc/{pid}/smaps_rollup"))
        rss_mb, pss_mb = (int(memory[name].split()[0]) * 1024 / 1e6 for name in ("Rss", "Pss"))
        return cls((int(words[11]) + int(words[12])) * _TICK_S, wakeups, rss_mb, pss_mb, int(words[17]))

    def wakeups_since(self, before: "Usage") -> int:
        """Wake-ups since `before` of the threads that there are now."""
        return sum(count - before.wakeups.get(thread, 0) for thread, count in self.wakeups.items())


def _fields(path: Path) -> dict[str, str]:
    """The lines `name: value` of a file of the kernel."""
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one idle process."""

    name: str
    cpu_ms_s: float
    wakeups_s: float
    rss_mb: float
    pss_mb: float
    threads: int


def measure(folder: Path, relays: int, seconds: float, settle_s: float, publish_mb: float) -> dict[str, Any]:
    """Start a seed and relays, wait `settle_s` after the last one has joined, and measure for `seconds`."""
    swarm = Swarm(folder, patience_s=STARTED_WITHIN_S)
    names = [f"relay{number}" for number in range(relays)]
    try:
        raw_mb = max(1, math.ceil(publish_mb))
        swarm.seed(None, "--raw-mb", str(raw_mb), "--preset", "wan")
        _start_relays(swarm, names)
        if publish_mb:
            _publish(swarm, folder / "file", round(publish_mb * 1e6))
        time.sleep(settle_s)
        costs = _costs(swarm, ["seed", *names], seconds)
    finally:
        swarm.close()
    setup = {"scenario": "idle", "relays": relays, "seconds": seconds, "publish_mb": publish_mb}
    return setup | {
        "seed": asdict(costs[0]),
        "relay": _summary(costs[1:]),
        "processes": [asdict(cost) for cost in costs],
    }


def _start_relays(swarm: Swarm, names: Sequence[str]) -> None:
    ticket = swarm.ticket("--nodes", str(len(names)))
    for first in range(0, len(names), _STARTED_AT_ONCE):
        for name in names[first : first + _STARTED_AT_ONCE]:
            swarm.start(name, "relay", ticket, "--listen", "127.0.0.1:0", "--name", name)
        there = min(first + _STARTED_AT_ONCE, len(names))
        swarm.until_seed(f"{there} relays have joined", lambda seed, there=there: len(seed.nodes) >= there)


def _publish(swarm: Swarm, path: Path, size: int) -> None:
    """Publish `size` random bytes, and wait until every relay has passed them on."""
    path.write_bytes(os.urandom(size))
    swarm.publish(path, "--raw", "--wait")


def _costs(swarm: Swarm, names: Sequence[str], seconds: float) -> list[Cost]:
    began_s = time.monotonic()
    before = [Usage.of(swarm.pid(name)) for name in names]
    time.sleep(seconds)
    after = [Usage.of(swarm.pid(name)) for name in names]
    passed_s = time.monotonic() - began_s
    return [
        Cost(
            name,
            round(1e3 * (new.cpu_s - old.cpu_s) / passed_s, 2),
            round(new.wakeups_since(old) / passed_s, 1),
            round(new.rss_mb, 1),
            round(new.pss_mb, 1),
            new.threads,
        )
        for name, old, new in zip(names, before, after, strict=True)
    ]


def _summary(costs: Sequence[Cost]) -> dict[str, dict[str, float]]:
    """Median and maximum over the relays."""
    figures = [asdict(cost) for cost in costs]
    return {
        key: {"median": median(each[key] for each in figures), "max": max(each[key] for each in figures)}
        for key in ("cpu_ms_s", "wakeups_s", "rss_mb", "pss_mb", "threads")
        if figures
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relays", type=int, default=60, help="number of relays (default 60)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure (default 60)")
    parser.add_argument("--settle", type=float, default=30.0, help="seconds to wait before that (default 30)")
    parser.add_argument("--publish-mb", type=float, default=0.0, help="publish a file of so many MB first (default 0)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    if options.relays < 1 or options.seconds <= 0:
        parser.error("--relays: at least 1; --seconds: more than 0")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.relays, options.seconds, options.settle, options.publish_mb)
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{found['relays']} relays and a seed, idle for {found['seconds']:g} s")
    print(f"{'':16}{'CPU ms/s':>10}{'wake-ups/s':>12}{'RSS MB':>9}{'PSS MB':>9}{'threads':>9}")
    for name in ("median", "max"):
        _print_row(f"relay, {name}", {key: value[name] for key, value in found["relay"].items()})
    _print_row("seed", found["seed"])
    return 0


def _print_row(name: str, row: dict[str, float]) -> None:
    print(
        f"{name:16}{row['cpu_ms_s']:10.2f}{row['wakeups_s']:12.1f}{row['rss_mb']:9.1f}{row['pss_mb']:9.1f}"
        f"{row['threads']:9.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
