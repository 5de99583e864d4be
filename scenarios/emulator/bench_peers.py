"""Compares the swarm with aria2 and libtorrent on the same file and the same emulated links. Needs root.

    python -m scenarios.emulator.bench_peers                            4 and 8 nodes, about four minutes
    python -m scenarios.emulator.bench_peers --nodes 8 --mixed --json --plot peers.png

The other programs are run, not quoted. aria2 (Debian's package) and libtorrent (PyPI's) are installed if they are
missing. By default every uplink has 200 Mbit/s, every downlink 1 Gbit/s, and the file 100 MiB. aria2 is started cold,
as it is used. The libtorrent sessions run before the clock starts, and so does our swarm, which has carried one version
before. The time ends when every node has the whole file and has checked it. Copies are the bytes past the origin's
uplink divided by the file's size. The floor passes the file over plain sockets along our trees, with no check at all.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from scenarios.emulator.floor import pass_on
from scenarios.emulator.network import check_privileges
from scenarios.emulator.real import Node, distribute
from scenarios.emulator.torrents import SUBJECTS, fetch_all, install
from scenarios.emulator.wan_table import MIXED
from scenarios.harness.command import json_parser, report_rows
from scenarios.harness.plot import drawing, png

__all__ = ["main", "measure"]

OURS: Final = "swarm-node"
FLOOR: Final = "floor"
ALL: Final = (OURS, *SUBJECTS, FLOOR)


def measure(subject: str, nodes: Sequence[Node], origin: Node, payload_bytes: int, repeats: int) -> dict[str, Any]:
    """Measure one subject and return the medians of its runs. Raises `UsageError` when the subject fails."""
    runs: list[tuple[float, float, float, float, float]] = []  # bound, first, all (s), copies, busy
    if subject == OURS:
        for outcome in distribute(origin, nodes, [payload_bytes] * repeats):
            held_at_s = outcome.had_s.values()
            runs.append((outcome.bound_s, min(held_at_s), max(held_at_s), outcome.uplink_copies, outcome.busy))
    else:
        if subject in SUBJECTS:
            install(subject)
        for _ in range(repeats):
            if subject == FLOOR:
                floor = pass_on([node.up_mbit for node in nodes], origin.up_mbit, payload_bytes)
                runs.append((floor.bound_s, floor.seconds, floor.seconds, floor.copies, floor.busy))
            else:
                fetched = fetch_all(subject, nodes, origin, payload_bytes)
                held_at_s = fetched.had_s
                runs.append((fetched.bound_s, min(held_at_s), max(held_at_s), fetched.copies, fetched.busy))
    bound, first, last, copies, busy = (statistics.median(column) for column in zip(*runs, strict=True))
    return {
        "subject": subject, "nodes": len(nodes), "bound_s": bound, "first_s": first, "seconds": last,
        "ratio": last / bound, "copies": copies, "busy": busy, "runs": [run[2] / run[0] for run in runs],
    }  # fmt: skip


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'':<12}" + "".join(f"{name:>9}" for name in ("N", "B s", "first s", "all s", "x B", "copies", "busy")))
    for row in rows:
        if "failed" in row:
            print(f"{row['subject']:<12}{row['nodes']:>9}  failed: {row['failed'].splitlines()[0][:100]}")
            continue
        cells = (
            str(row["nodes"]), f"{row['bound_s']:.2f}", f"{row['first_s']:.2f}", f"{row['seconds']:.2f}",
            f"{row['ratio']:.2f}", f"{row['copies']:.2f}", f"{row['busy']:.0%}",
        )  # fmt: skip
        print(f"{row['subject']:<12}" + "".join(f"{cell:>9}" for cell in cells))


def draw(rows: Sequence[dict[str, Any]], plot: Path) -> None:
    """Plot time and copies side by side."""
    whole = [row for row in rows if "failed" not in row]
    with drawing(plot, 2, inches=(8, 3.4)) as both:
        for axes, name, title in zip(both, ("ratio", "copies"), ("time, x bound", "origin sent, copies"), strict=True):
            axes.bar(range(len(whole)), [row[name] for row in whole], width=0.6)
            axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
            labels = [f"{row['subject']}\nN={row['nodes']}" for row in whole]
            axes.set_xticks(range(len(whole)), labels, fontsize=7, rotation=30)
            axes.set_title(title)


def main(arguments: list[str] | None = None) -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8], metavar="N", help="default 4 8")
    parser.add_argument("--up-mbit", type=float, default=200.0, help="every uplink (default 200)")
    parser.add_argument("--mixed", action="store_true", help="instead, the nodes' uplinks are 400 to 25 Mbit/s in turn")
    parser.add_argument("--mib", type=float, default=100.0, help="the file (default 100)")
    parser.add_argument("--subjects", nargs="+", choices=ALL, default=ALL, metavar="NAME", help=f"of {', '.join(ALL)}")
    parser.add_argument("--repeats", type=int, default=2, help="runs each, of which the median is shown")
    parser.add_argument("--plot", type=png, help="draw a PNG")
    options = parser.parse_args(arguments)
    try:
        check_privileges()
    except UsageError as error:
        print(f"bench_peers: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    for count in options.nodes:
        nodes = [Node(MIXED[i % len(MIXED)] if options.mixed else options.up_mbit) for i in range(count)]
        for subject in options.subjects:
            print(f"{subject}, {count} nodes ...", file=sys.stderr, flush=True)
            try:
                row = measure(subject, nodes, Node(options.up_mbit), int(options.mib * 2**20), options.repeats)
            except (UsageError, OSError) as error:  # the other subjects still run
                row = {"subject": subject, "nodes": count, "failed": str(error)}
            rows.append(row)
    return report_rows("bench_peers", rows, options, print_table, draw)


if __name__ == "__main__":
    sys.exit(main())
