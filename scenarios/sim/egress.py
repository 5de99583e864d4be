"""How long a step takes to reach all nodes, and how much the trainer sends, against the number of nodes.

    python -m scenarios.sim.egress --simulate 1000 --json             the product's protocol under a virtual clock
    python -m scenarios.sim.egress --simulate 64 --simulate 1000 --seeds 5 --plot egress.png
    python -m scenarios.sim.egress --simulate 1000 --up-mbit 1000     a trainer with more uplink than its nodes
    python -m scenarios.sim.egress --real 4 --real 8              processes on emulated links, as root, and their twins
    python -m scenarios.sim.egress --simulate 4 --simulate 64 --real 4 --plot egress.png

The bound B is max(F/u_s, F/d_min, N F/(u_s + sum u_i)), packet headers included. The table and the picture compare the
swarm with two other ways. In a star the trainer sends N copies itself, in N F/u_s. With an object store the trainer
sends one copy, and then all nodes fetch it at once from a store that is never the bottleneck, in F/u_s + F/d, where d
is 1 Gbit/s. Both are calculated without headers and round trips, which favours them.

Simulated nodes have uplinks with a lognormal distribution around 200 Mbit/s (sigma 0.5), downlinks of 1 Gbit/s, and
congestion windows; they are in six regions 5 to 250 ms apart, lose one packet in 100,000, and report their rates with
an error of 20 %. Of `--steps` steps, 20 s apart, the last counts. In the first one, connections carry bulk data for the
first time; its ratio is `cold_ratio`. Real nodes and their twins have uplinks of the trainer's rate: see
`scenarios.sim.agreement`.

Exits with 1 if a node never gets the version.
"""

import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from codec.errors import UsageError
from node.status.progress import ProgressLine
from scenarios.emulator.real import Node
from scenarios.harness.plot import drawing, png
from scenarios.sim.agreement import compare
from scenarios.sim.crowd import Crowd, Step, gather, step
from scenarios.sim.rows import STEP, crowd_of, missed, number, parser, row_of, show, verdict

__all__ = ["Point", "beside", "curves", "draw", "main", "simulate"]

IDLE_S: Final = 20.0
COLUMNS: Final = {**STEP, "star s": number("star_s", ".1f"), "store s": number("store_s", ".1f")}
SWARMS: Final = {
    "simulated": "swarm, simulated",
    "real": "swarm, real",
    "its twin": "the real one's twin",
    "own cores": "the twin, a processor a node",
}
"""Labels of the rows' cases in the picture."""
STYLES: Final = {"bound B": "k--", "star": "C5:", "object store": "C6-."}


def simulate(crowd: Crowd, payload_bytes: int, seed: int, count: int = 2) -> tuple[list[Step], str, int]:
    """Simulate `count` steps of the crowd. Returns the steps, the digest of the event log, and the number of events."""
    case = f"N {crowd.nodes}, seed {seed}"
    with ProgressLine(f"{case}, gathering", unit="virtual seconds") as progress:
        world = gather(crowd, seed, report=progress.update)
    steps: list[Step] = []
    while len(steps) < count:
        if steps:
            world.run(world.now + IDLE_S)
        with ProgressLine(f"{case}, step {len(steps) + 1}", unit="MB received") as progress:
            steps.append(step(world, payload_bytes, report=progress.update))
    return steps, world.digest, world.events


def beside(row: dict[str, Any], trainer_mbit: float, down_mbit: float) -> dict[str, float]:
    """Return the seconds that a star and an object store would need for this row's payload."""
    bits = row["steps"][-1]["payload_bytes"] * 8e-6
    return {"star_s": row["nodes"] * bits / trainer_mbit, "store_s": bits * (1 / trainer_mbit + 1 / down_mbit)}


class Point(NamedTuple):
    """A point of a curve: number of nodes, seconds until all have the version, copies that the trainer sends."""

    nodes: int
    seconds: float
    copies: float


def curves(rows: Iterable[dict[str, Any]]) -> dict[str, list[Point]]:
    """Return the curves by name, in the order of N: each kind of swarm, the bound, the star and the object store.

    A swarm in which a node lacks the version has no point. Of several rows with the same N the last gives the bound."""
    found: dict[str, list[Point]] = {}
    others: dict[str, dict[int, Point]] = {name: {} for name in STYLES}
    for row in rows:
        count = row["nodes"]
        others["bound B"][count] = Point(count, row["bound_s"], 1.0)
        others["star"][count] = Point(count, row["star_s"], float(count))
        others["object store"][count] = Point(count, row["store_s"], 1.0)
        if math.isfinite(row["seconds"]):
            found.setdefault(SWARMS[row["case"]], []).append(Point(count, row["seconds"], row["copies"]))
    return {name: sorted(points) for name, points in found.items()} | {
        name: sorted(points.values()) for name, points in others.items()
    }


def draw(rows: Sequence[dict[str, Any]], plot: Path) -> None:
    """Draw seconds and copies, each against N."""
    mib = rows[-1]["steps"][-1]["payload_bytes"] / 2**20
    counts = sorted({row["nodes"] for row in rows})
    titles = {"seconds": "seconds until all nodes have it", "copies": "copies that the trainer sends"}
    with drawing(plot, 2, inches=(9.6, 4.2)) as panels:
        for axes, (what, title) in zip(panels, titles.items(), strict=True):
            for name, points in curves(rows).items():
                values = [getattr(point, what) for point in points]
                style = STYLES.get(name, "-")
                axes.plot([point.nodes for point in points], values, style, label=name, marker=".")
            axes.set(xscale="log", yscale="log", xlabel="nodes", title=f"{title} ({mib:.0f} MiB)")
            axes.set_xticks([], minor=True)
            axes.set_xticks(counts, [f"{count:,}" for count in counts])
            axes.yaxis.set_major_formatter("{x:g}")
            axes.grid(visible=True, alpha=0.3)
        panels[0].legend(fontsize=8)


def _simulated(crowd: Crowd, payload_bytes: int, seeds: range, steps: int) -> dict[str, Any]:
    """Return a row about the last step of each seed."""
    runs: list[list[Step]] = []
    digests: list[str] = []
    began, events = time.process_time(), 0
    for seed in seeds:
        run_steps, digest, count = simulate(crowd, payload_bytes, seed, steps)
        runs.append(run_steps)
        digests.append(digest)
        events += count
        print(f"N {crowd.nodes}, seed {seed}: {run_steps[0].ratio:.3f}, {run_steps[-1].ratio:.3f} x B", file=sys.stderr)
    cold = [each[0].ratio for each in runs]
    return row_of(
        "simulated", [each[-1] for each in runs], round_trip_s=crowd.round_trip_s, digests=digests, events=events,
        cold_ratio=median(cold), cold_ratios=cold, cpu_s=time.process_time() - began,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options_parser = parser(__doc__)
    options_parser.add_argument(
        "--simulate", type=int, action="append", metavar="N", help="simulate N nodes (may be repeated)"
    )
    options_parser.add_argument(
        "--real",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="run N real nodes (as root; may be repeated)",
    )
    options_parser.add_argument(
        "--regions", type=int, default=6, help="number of regions of the simulated nodes (1 to 6)"
    )
    options_parser.add_argument(
        "--hidden", type=float, default=0.0, help="share of simulated nodes that cannot be dialed"
    )
    options_parser.add_argument(
        "--steps", type=int, default=2, help="simulated steps, of which the last counts (default 2)"
    )
    options_parser.add_argument("--plot", type=png, help="draw a PNG: seconds and copies against N")
    options = options_parser.parse_args(arguments)
    if options.steps < 1:
        options_parser.error("--steps: at least 1")
    payload, seeds = int(options.mib * 2**20), range(options.seed, options.seed + options.seeds)
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for nodes in options.real:
        try:
            found = compare(nodes, options.up_mbit, payload, seeds)
        except UsageError as error:  # the other cases still run
            wrong.append(f"{nodes} real nodes: {str(error).rstrip('.')}")
            continue
        agreement = found[1]["agreement"]
        print(f"N {nodes}: the twin takes {agreement:.2f} times as long as the real swarm", file=sys.stderr)
        rows += [row | beside(row, options.up_mbit, Node(options.up_mbit).down_mbit) for row in found]
    for nodes in options.simulate or ([] if options.real else [64]):
        crowd = crowd_of(options, nodes, regions=options.regions, hidden=options.hidden)
        row = _simulated(crowd, payload, seeds, options.steps)
        rows.append(row | beside(row, crowd.trainer_mbit, crowd.down_mbit))
    show("egress", rows, as_json=options.json, columns=COLUMNS)
    if options.plot is not None and rows:
        draw(rows, options.plot)
    return verdict("egress", wrong + missed(rows))


if __name__ == "__main__":
    sys.exit(main())
