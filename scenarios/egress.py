"""How long until all nodes have a step, and how much the trainer sends for it, against the number of nodes.

    python -m scenarios.egress --simulate 1000 --json             the product's protocol under a virtual clock
    python -m scenarios.egress --simulate 64 --simulate 1000 --seeds 5 --plot egress.png
    python -m scenarios.egress --simulate 1000 --up-mbit 1000     a trainer with more uplink than its nodes
    python -m scenarios.egress --real 4 --real 8                  processes on emulated links, as root, and their twins

The bound B is max(F/u_s, F/d_min, N F/(u_s + sum u_i)), packet headers counted. Drawn beside the swarm: a star (the
trainer sends to everybody itself) and an object store (the trainer sends once, then everybody fetches at once from a
store that is never the bottleneck).

Nodes: uplinks lognormal around 200 Mbit/s (sigma 0.5), downlinks 1 Gbit/s, six regions 5 to 250 ms apart, congestion
windows, one lost packet in 100,000, bandwidths known with 20 % error. The last step counts, of `--steps`, the first one
being the first that its connections ever carried; 20 s of idle time lie between them. `cold_ratio`: how the first went.
"""

import sys
import time
from statistics import median
from typing import Any

from node.status.progress import Progress
from scenarios.agreement import compare
from scenarios.crowd import Crowd, Step, gather, step
from scenarios.plot import png
from scenarios.rows import crowd_of, parser, row_of, show

__all__ = ["main", "simulate"]

IDLE_S = 20.0


def simulate(crowd: Crowd, payload_bytes: int, seed: int, count: int = 2) -> tuple[list[Step], str, int]:
    """So many steps of such a crowd: how they went, the digest of the event log, and how many events there were."""
    case = f"N {crowd.nodes}, seed {seed}"
    with Progress(f"{case}, gathering", unit="virtual seconds") as progress:
        world = gather(crowd, seed, tell=progress.update)
    steps: list[Step] = []
    while len(steps) < count:
        if steps:
            world.run(world.now + IDLE_S)
        with Progress(f"{case}, step {len(steps) + 1}", unit="MB received") as progress:
            steps.append(step(world, payload_bytes, tell=progress.update))
    return steps, world.digest, world.events


def star_s(step: Step, trainer_mbit: float) -> float:
    """The trainer sends to each itself."""
    return step.nodes * step.payload_bytes * 8e-6 / trainer_mbit


def store_s(step: Step, trainer_mbit: float, down_mbit: float) -> float:
    """Up once, then down at once."""
    return step.payload_bytes * 8e-6 * (1 / trainer_mbit + 1 / down_mbit)


def main(arguments: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--simulate", type=int, action="append", metavar="N", help="so many nodes (may be repeated)")
    made.add_argument("--real", type=int, action="append", default=[], metavar="N", help="so many real nodes (as root)")
    made.add_argument("--regions", type=int, default=6, help="regions that the nodes are spread over (1 to 6)")
    made.add_argument("--hidden", type=float, default=0.0, help="share of nodes that cannot be dialed")
    made.add_argument("--steps", type=int, default=2, help="simulated steps, of which the last counts (default 2)")
    made.add_argument("--plot", type=png, help="draw a PNG")
    options = made.parse_args(arguments)
    if options.steps < 1:
        made.error("--steps: at least 1")
    rows: list[dict[str, Any]] = []
    for nodes in options.real:
        seeds = range(options.seed, options.seed + options.seeds)
        real, twin, apart = compare(nodes, options.up_mbit, int(options.mib * 2**20), seeds)
        print(f"N {nodes}: the twin takes {twin['agreement']:.2f} times as long as the real swarm", file=sys.stderr)
        rows += (real, twin, apart)
    for nodes in options.simulate or ([] if options.real else [64]):
        crowd = crowd_of(options, nodes, regions=options.regions, hidden=options.hidden)
        counted: list[Step] = []
        cold: list[Step] = []
        digests: list[str] = []
        began, events = time.process_time(), 0
        for seed in range(options.seed, options.seed + options.seeds):
            steps, digest, count = simulate(crowd, int(options.mib * 2**20), seed, options.steps)
            counted.append(steps[-1])
            cold.append(steps[0])
            digests.append(digest)
            events += count
            print(f"N {nodes}, seed {seed}: {steps[0].ratio:.3f}, {steps[-1].ratio:.3f} x B", file=sys.stderr)
        last = counted[-1]
        rows.append(
            row_of(
                "simulated", counted, round_trip_s=crowd.round_trip_s, digests=digests, events=events,
                cold_ratio=median(s.ratio for s in cold), cold_ratios=[s.ratio for s in cold],
                cpu_s=time.process_time() - began, star_s=star_s(last, crowd.trainer_mbit),
                store_s=store_s(last, crowd.trainer_mbit, crowd.down_mbit),
            )
        )  # fmt: skip
    show("egress", rows, as_json=options.json, plot=options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
