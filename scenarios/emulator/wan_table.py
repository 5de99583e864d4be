"""Measures the product's own processes on emulated links against targets. Needs root: see `scenarios.emulator.network`.

    python -m scenarios.emulator.wan_table                         every row, about a quarter of an hour (`make wan`)
    python -m scenarios.emulator.wan_table --rows 4 8 --repeats 9      some of them, the median of nine versions each
    python -m scenarios.emulator.wan_table --rows 8 --cpu              with the CPU time of each process
    python -m scenarios.emulator.wan_table --json --plot wan.png

B = max(F/u_s, F/d_min, N F/(u_s + sum u_i)), headers included, is the least possible time. A node has a version when it
has verified and stored every piece and the manifest. The trainer's bytes are counted at its sockets, from publish to
the last holder, control included. By default uplinks have 200 Mbit/s, downlinks 1 Gbit/s, and F is 100 MiB. Two
versions do not count: one proves the members, and one warms up the trees that are planned then. In the rows `first`
the first version of a new swarm counts, one swarm each. Encryption, signatures and hashing are on, and every process is
one of the product's.

All processes and the emulated links share this machine's cores. `busy` is the share of CPU time in use meanwhile. Near
100 % the row measures the machine and not the swarm; `--cpu` shows which process uses it. Two rows help to tell: in
`8-quarter` the same swarm has a quarter of the bandwidth, and in `floor` plain sockets and threads pass the same bytes
along the same trees with no check at all.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from scenarios.emulator.floor import pass_on
from scenarios.emulator.network import check_privileges
from scenarios.emulator.real import WARM_UPS, Node, Outcome, RealSwarm, distribute
from scenarios.harness.command import json_parser, report_rows
from scenarios.harness.plot import drawing, png

__all__ = ["ROWS", "Case", "main", "measure"]

MIB: Final = 1 << 20
COPIES: Final = 1.03
EXTRA_BYTES: Final = 64 << 10
TWICE: Final = 0.02
"""Allowed share of duplicates in the payload that nodes receive, in every row."""
MIXED: Final = (400, 200, 200, 100, 100, 50, 50, 25)
FOUR: Final = ("eu", "us", "asia", "south")


@dataclass(frozen=True, slots=True)
class Case:
    """One row and its targets.

    They are reached when all nodes have the version within `times` B plus `round_trips` of the longest round trip, the
    trainer sent at most `copies` F plus `extra_bytes`, and duplicates are at most `TWICE`.
    """

    title: str
    seed: Node
    nodes: tuple[Node, ...]
    times: float
    payload_bytes: int = 100 * MIB
    round_trips: float = 0.0
    copies: float = COPIES
    extra_bytes: int = EXTRA_BYTES
    crossings: float | None = None
    """Allowed copies of F into each region; None: no target."""
    rtt_ms: float = 0.0
    between_ms: float | None = None
    late: int = 0
    at_half: Callable[[RealSwarm], None] | None = None
    warm_ups: int = WARM_UPS
    """Versions that do not count, of each swarm."""

    @property
    def longest_s(self) -> float:
        return (self.rtt_ms if self.between_ms is None else self.between_ms) / 1000

    def at(self, share: float) -> "Case":
        """Return the same case with this share of the bandwidth."""

        def scaled(node: Node) -> Node:
            return replace(node, up_mbit=node.up_mbit * share, down_mbit=node.down_mbit * share)

        return replace(self, seed=scaled(self.seed), nodes=tuple(map(scaled, self.nodes)))

    def first(self, times: float) -> "Case":
        """Return the same case for the first version of a new swarm."""
        return replace(self, title=f"{self.title}: first version", times=times, warm_ups=0)


def _kill(swarm: RealSwarm) -> None:
    swarm.kill(swarm.interior())


def _pause(swarm: RealSwarm) -> None:
    swarm.pause(swarm.interior())


def _arrive(swarm: RealSwarm) -> None:
    for name in list(swarm.nodes)[-2:]:
        swarm.join(name)


_FOUR_REGIONS: Final = Case(
    "8 in 4 regions, 100 Mbit/s, 100 ms between", Node(100, region=FOUR[0]),
    tuple(Node(100, region=region) for region in FOUR for _ in range(2)), 1.15,
    round_trips=1, crossings=1.1, rtt_ms=20, between_ms=100,
)  # fmt: skip
_EIGHT: Final = Case("8 nodes", Node(200), (Node(200),) * 8, 1.20)
_FOUR: Final = Case("4 nodes", Node(200), (Node(200),) * 4, 1.10)
_MIXED: Final = Case("8 nodes, 400 to 25 Mbit/s", Node(200), tuple(map(Node, MIXED)), 1.15)
ROWS: Final[dict[str, Case]] = {
    "4": _FOUR,
    "8": _EIGHT,
    "8-quarter": replace(_EIGHT, title="8 nodes, all at 50 Mbit/s").at(0.25),
    "mixed": _MIXED,
    "4-first": _FOUR.first(1.10),
    "8-first": _EIGHT.first(1.10),
    "mixed-first": _MIXED.first(1.15),
    "regions": _FOUR_REGIONS,
    "10-mib": replace(
        _FOUR_REGIONS, title="the same, 10 MiB", times=1.1, round_trips=2, payload_bytes=10 * MIB, crossings=None
    ),
    "1-mib": replace(
        _FOUR_REGIONS, title="the same, 1 MiB", times=1.1, round_trips=2, payload_bytes=MIB, crossings=None
    ),
    "hidden": replace(
        _EIGHT, title="8 nodes, 4 not dialable", nodes=(Node(200),) * 4 + (Node(200, firewall="in"),) * 4, times=1.25
    ),
    "killed": replace(
        _FOUR, title="4, an interior one killed at half time", times=1.3, copies=1.1, extra_bytes=0,
        at_half=_kill,
    ),
    "stopped": replace(
        _FOUR, title="4, an interior one frozen at half time", times=1.3, copies=1.1, extra_bytes=0,
        at_half=_pause,
    ),
    "joiners": replace(
        _EIGHT, title="8, two more arrive at half time", nodes=(Node(200),) * 10, times=1.25, late=2, at_half=_arrive
    ),
}  # fmt: skip
FLOOR: Final = "floor"


def measure(case: Case, repeats: int, on_outcome: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """Measure `repeats` versions: of one swarm, or of a new swarm each when the case has `at_half` or counts the first
    version.

    Raises `UsageError` when a run fails.
    """
    once = case.at_half is not None or not case.warm_ups
    sizes, runs = ([case.payload_bytes], repeats) if once else ([case.payload_bytes] * repeats, 1)
    found: list[Outcome] = []
    for _ in range(runs):
        found += distribute(
            case.seed, case.nodes, sizes, rtt_ms=case.rtt_ms, between_ms=case.between_ms, late=case.late,
            at_half=case.at_half, on_outcome=on_outcome, warm_ups=case.warm_ups,
        )  # fmt: skip
    return found


def row_of(name: str, case: Case, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the row of the (lower) median version, with its targets."""
    outcome = sorted(outcomes, key=lambda each: each.to_all_s)[(len(outcomes) - 1) // 2]
    wanted_s = case.times * outcome.bound_s + case.round_trips * case.longest_s
    allowed_bytes = case.copies * outcome.payload_bytes + case.extra_bytes
    crossed = max(outcome.crossings.values(), default=None)
    return {
        "row": name,
        "case": case.title,
        "nodes": len(case.nodes) - case.late,
        "payload_bytes": outcome.payload_bytes,
        "bound_s": outcome.bound_s,
        "wanted_s": wanted_s,
        "seconds": outcome.to_all_s,
        "ratio": outcome.ratio,
        "runs": [each.ratio for each in outcomes],
        "reached_time": statistics.median(each.to_all_s for each in outcomes) <= wanted_s,
        "copies": outcome.copies,
        "allowed_copies": allowed_bytes / outcome.payload_bytes,
        "reached_bytes": outcome.sent_bytes <= allowed_bytes,
        "duplicates": outcome.duplicates,
        "reached_duplicates": outcome.duplicates <= TWICE,
        "crossings": crossed,
        "reached_crossings": None if case.crossings is None or crossed is None else crossed <= case.crossings,
        "busy": outcome.busy,
        "outcomes": [asdict(each) for each in outcomes],
    }


def floor_row(nodes: int, mbit: float) -> dict[str, Any]:
    """Return the row of plain sockets along the same trees."""
    floor = pass_on([mbit] * nodes, mbit, 100 * MIB)
    return {
        "row": FLOOR, "case": f"{nodes} nodes: plain sockets, no checks", "nodes": nodes,
        "payload_bytes": floor.payload_bytes, "bound_s": floor.bound_s, "seconds": floor.seconds,
        "ratio": floor.seconds / floor.bound_s, "copies": floor.copies, "busy": floor.busy,
    }  # fmt: skip


def _run(name: str, repeats: int, cpu: bool) -> dict[str, Any]:
    """Measure one row. Any failure becomes part of the row, so that the other rows still run."""

    def on_outcome(outcome: Outcome) -> None:
        _print_outcome(name, outcome)
        if cpu:
            _print_cpu(outcome)

    began = time.monotonic()
    try:
        row: dict[str, Any] = (
            floor_row(8, 200) if name == FLOOR else row_of(name, ROWS[name], measure(ROWS[name], repeats, on_outcome))
        )
    except Exception as error:  # reported in the row
        row = {
            "row": name,
            "case": ROWS[name].title if name in ROWS else name,
            "failed": f"{type(error).__name__}: {error}",
        }
    row["took_s"] = time.monotonic() - began
    return row


def _print_outcome(name: str, outcome: Outcome) -> None:
    summary = f"{outcome.to_all_s:.2f} s = {outcome.ratio:.3f} B, {outcome.copies:.3f} copies, {outcome.busy:.0%} busy"
    print(f"{name}: {summary}", file=sys.stderr, flush=True)


def _print_cpu(outcome: Outcome) -> None:
    """Print the CPU time of each kind of process. A node's share limits how many nodes one machine can run."""
    spent = outcome.spent_s
    nodes = [seconds for name, seconds in spent.items() if name not in ("seed", "wire")]
    mib = outcome.payload_bytes / MIB
    print(
        f"  processor seconds: seed {spent['seed']:.2f}, a node {statistics.mean(nodes):.2f} "
        f"({1000 * statistics.mean(nodes) / mib:.1f} ms for each MiB of F), emulated wire {spent['wire']:.2f}; "
        f"all {sum(spent.values()):.1f}",
        file=sys.stderr, flush=True,
    )  # fmt: skip


HEAD: Final = ("case", "B s", "reach s", "all s", "x B", "copies", "allowed", "crossed", "twice", "busy", "")


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{HEAD[0]:<46}" + "".join(f"{name:>9}" for name in HEAD[1:]))
    for row in rows:
        if "failed" in row:
            print(f"{row['case']:<46}  failed: {row['failed'].splitlines()[0][:120]}")
            continue
        missed = [goal for goal in ("time", "bytes", "crossings", "duplicates") if row.get(f"reached_{goal}") is False]
        verdict = "" if "wanted_s" not in row else "reached" if not missed else "not " + ", ".join(missed)
        cells = (
            f"{row['bound_s']:.2f}", _cell(row, "wanted_s", ".2f"), f"{row['seconds']:.2f}", f"{row['ratio']:.3f}",
            f"{row['copies']:.3f}", _cell(row, "allowed_copies", ".3f"), _cell(row, "crossings", ".2f"),
            _cell(row, "duplicates", ".2%"), f"{row['busy']:.0%}",
        )  # fmt: skip
        print(f"{row['case']:<46}" + "".join(f"{cell:>9}" for cell in cells) + f"  {verdict}")


def _cell(row: dict[str, Any], name: str, form: str) -> str:
    return "" if row.get(name) is None else format(row[name], form)


def draw(rows: Sequence[dict[str, Any]], plot: Path) -> None:
    """Plot times against the bound, with the targets marked."""
    whole = [row for row in rows if "failed" not in row][::-1]
    with drawing(plot, inches=(8, 0.5 + 0.42 * max(1, len(whole)))) as axes:
        axes.barh(range(len(whole)), [row["ratio"] for row in whole], height=0.6, color="tab:blue")
        for at, row in enumerate(whole):
            if "wanted_s" in row:
                axes.plot([row["wanted_s"] / row["bound_s"]] * 2, [at - 0.4, at + 0.4], color="tab:red", linewidth=2)
        axes.axvline(1.0, color="black", linewidth=1, linestyle="--")
        axes.set_yticks(range(len(whole)), [row["case"] for row in whole])
        axes.set_xlabel("time until all have it, times the bound (red: to be reached)")


def main(arguments: list[str] | None = None) -> int:
    names = [*ROWS, FLOOR]
    parser = json_parser(__doc__)
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW", help=f"of {', '.join(names)}")
    parser.add_argument("--repeats", type=int, default=3, help="versions a row, of which the (lower) median is shown")
    parser.add_argument("--cpu", action="store_true", help="say what each process spent (it is in --json in any case)")
    parser.add_argument("--plot", type=png, help="draw a PNG")
    options = parser.parse_args(arguments)
    try:
        check_privileges()
    except UsageError as error:
        print(f"wan: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    for name in options.rows:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows.append(_run(name, options.repeats, options.cpu))
        if "failed" in rows[-1]:
            print(f"{name} failed: {rows[-1]['failed']}", file=sys.stderr, flush=True)
    return report_rows("wan", rows, options, print_table, draw)


if __name__ == "__main__":
    sys.exit(main())
