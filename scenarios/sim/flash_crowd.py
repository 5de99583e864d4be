"""Many nodes join at once during a step: the effect on the nodes already there, and how soon the new ones catch up.

    python -m scenarios.sim.flash_crowd --nodes 64 --joiners 64

The first row is a step without joins. In the second, all new nodes join when half of the time has passed that the
trainer's uplink needs for the payload. Both rows describe only the nodes that were there before; new nodes count in
neither the bound nor the ratio. Exits with 1 if any node lacks the version at the end.
"""

import random
import sys

from scenarios.sim.crowd import REGIONS, Crowd, Step, begin, draw, finish, gather
from scenarios.sim.rows import crowd_of, missed, parser, row_of, show, verdict

__all__ = ["flash_crowd", "main"]

PATIENCE_S = 120
"""How long to wait for the new nodes after the other nodes have the version, in seconds."""


def flash_crowd(crowd: Crowd, payload_bytes: int, seed: int, joiners: int, *, empty: bool) -> tuple[Step, float, int]:
    """Run a step during which `joiners` nodes join, after half of the payload's time on the trainer's uplink.

    Returns the step as the earlier nodes saw it, the seconds from joining until all new ones held the version (`inf` if
    one never did), and the number of new nodes that never held it. New nodes are first looked at when the earlier ones
    have finished, so the seconds may be too large but never too small. With `empty`, new nodes join without the base
    version's bits.
    """
    world, rng = gather(crowd, seed), random.Random(seed)
    begun = begin(world, payload_bytes)
    world.run(world.now + payload_bytes * 4e-6 / crowd.trainer_mbit)
    joined_at = world.now
    newcomers = []
    for _ in range(joiners):
        link = draw(crowd, rng)
        newcomers.append(world.join(link, held=None if empty else world.base, region=REGIONS[link.region]))
    step = finish(world, begun)
    id_ = begun.published.id
    world.run_until(lambda: all(node.core.state.held == id_ for node in newcomers), PATIENCE_S, 0.1)
    late = sum(node.core.state.held != id_ for node in newcomers)
    return step, float("inf") if late else world.now - joined_at, late


def main(arguments: list[str] | None = None) -> int:
    options_parser = parser(__doc__)
    options_parser.add_argument("--nodes", type=int, default=64)
    options_parser.add_argument("--joiners", type=int, default=64)
    options_parser.add_argument(
        "--empty", action="store_true", help="new nodes have no base version and fetch every block"
    )
    options = options_parser.parse_args(arguments)
    rows = []
    for joiners in (0, options.joiners):
        found = [
            flash_crowd(crowd_of(options, options.nodes), int(options.mib * 2**20), seed, joiners, empty=options.empty)
            for seed in range(options.seed, options.seed + options.seeds)
        ]
        rows.append(
            row_of(
                f"{joiners} join", [step for step, _, _ in found],
                newcomers_s=max(seconds for _, seconds, _ in found) if joiners else None,
                newcomers_missing=max(late for _, _, late in found),
            )
        )  # fmt: skip
    show("flash_crowd", rows, as_json=options.json)
    last = rows[-1]
    late = [f"{last['newcomers_missing']} of {options.joiners} newcomers never held it"]
    if not options.json and options.joiners and not last["newcomers_missing"]:
        print(f"the last newcomer held it {last['newcomers_s']:.1f} s after joining")
    return verdict("flash_crowd", missed(rows) + (late if last["newcomers_missing"] else []))


if __name__ == "__main__":
    sys.exit(main())
