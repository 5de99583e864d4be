"""Measures how fast one edge is when nothing limits it but this machine, beside libtorrent on the same machine.

    python -m scenarios.bench.edge [--mb 400] [--repeats 5] [--json]

A random file goes over loopback from one process to another, which verifies it and writes it to disk. Our runs and
those of libtorrent, which does not encrypt, alternate; each run of ours publishes a new version to a relay that stays.
Our seconds count from the begin of the publish, so they include reading and signing the file; libtorrent's from the
moment when it may fetch. Both end when the receiver has the whole file. Rates are in MB/s (10^6 bytes), medians.

`reckoned_gbit` is what one node could receive with enough cores: the rate at which its event loop, the busiest of its
threads, would have no time left. Other threads (disk, hashes) run beside it.
"""

import argparse
import json
import os
import re
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from scenarios.bench.cpu import LINK, PATIENCE_S, SETTLE_S, publish_raw, until
from scenarios.emulator import torrents
from scenarios.harness.processes import next_line
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, Swarm, swarm_in

__all__ = ["main", "measure"]

RELAY: Final = "relay"


def measure(file_bytes: int, repeats: int) -> dict[str, Any]:
    """Measure `repeats` runs of each, and the first version of a new swarm apart. Raises `UsageError`."""
    ours_s: list[float] = []
    theirs_s: list[float] = []
    loop_s: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-edge-") as folder,
        swarm_in(Path(folder), patience_s=STARTED_WITHIN_S) as swarm,
    ):
        swarm.seed(None, "--raw-mb", str(file_bytes // 1_000_000 + 1), "--preset", "wan", *LINK)
        swarm.start(RELAY, "relay", swarm.ticket("--nodes", "1"), *LOOPBACK, "--name", RELAY, *LINK)
        swarm.until_seed("the relay joins", lambda seed: any(node.name == RELAY for node in seed.nodes))
        time.sleep(SETTLE_S)
        for number in range(1, repeats + 2):
            before = _main_thread_s(swarm.pid(RELAY))
            ours_s.append(_ours(swarm, Path(folder) / "file", file_bytes, number))
            loop_s.append(_main_thread_s(swarm.pid(RELAY)) - before)
            with tempfile.TemporaryDirectory(prefix="bench-edge-") as other:
                theirs_s.append(_theirs(Path(other), file_bytes))
    first_s, *later_s = ours_s
    rate = file_bytes / statistics.median(later_s)
    theirs = file_bytes / statistics.median(theirs_s)
    return {
        "scenario": "edge",
        "file_bytes": file_bytes,
        "cores": os.cpu_count(),
        "mb_s": rate / 1e6,
        "first_mb_s": file_bytes / first_s / 1e6,
        "libtorrent_mb_s": theirs / 1e6,
        "x_libtorrent": rate / theirs,
        "reckoned_gbit": 8 * file_bytes / statistics.median(loop_s[1:]) / 1e9,
    }


def _ours(swarm: Swarm, file: Path, file_bytes: int, number: int) -> float:
    """Seconds from the begin of the publish until the relay has the version."""
    file.write_bytes(secrets.token_bytes(file_bytes))
    publish_raw(swarm.home(), file)
    until(lambda: swarm.seed_status().steps[-1].version[1] == number and _held_s(swarm) is not None)
    held_s = _held_s(swarm)
    assert held_s is not None
    time.sleep(SETTLE_S)
    return held_s


def _held_s(swarm: Swarm) -> float | None:
    return swarm.seed_status().steps[-1].publish_to_all_s


def _theirs(folder: Path, file_bytes: int) -> float:
    """Seconds from the moment when libtorrent may fetch until it has the file."""
    with torrents.sessions(folder, file_bytes, {"origin": None, RELAY: "origin"}) as processes:
        began = time.time()
        torrents.begin(processes)
        return float(next_line(processes[RELAY], "had", PATIENCE_S)) - began


def _main_thread_s(pid: int) -> float:
    """CPU seconds of a process's first thread, which runs its event loop."""
    fields = re.split(r"\) ", Path(f"/proc/{pid}/task/{pid}/stat").read_text())[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=400, help="megabytes of the file (default 400)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each (default 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    try:
        found = measure(options.mb * 1_000_000, options.repeats)
    except UsageError as error:
        print(f"edge: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(found))
        return 0
    print(f"{'one edge, MB/s':32}{'later':>10}{'first':>10}")
    print(f"{'ours, encrypted':32}{found['mb_s']:>10.0f}{found['first_mb_s']:>10.0f}")
    print(f"{'libtorrent, not encrypted':32}{found['libtorrent_mb_s']:>10.0f}")
    print(f"{'ours, x libtorrent':32}{found['x_libtorrent']:>10.2f}")
    print(f"One node could receive {found['reckoned_gbit']:.1f} Gbit/s before its event loop has no time left.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
