"""Many nodes join at once while a step travels: what those who were there notice of it, and when the new ones have it.

    python -m scenarios.sim.flash_crowd --nodes 64 --joiners 64

The rows are of the nodes that were there: with nobody joining, and with all at half of what the trainer's uplink takes.
Newcomers count in neither the bound nor the ratio. Exits with 1 when anybody is without the version in the end.
"""

import random
import sys

from scenarios.sim.crowd import REGIONS, Crowd, Step, begin, draw, finish, gather
from scenarios.sim.rows import crowd_of, missed, parser, row_of, show, verdict

__all__ = ["flash_crowd", "main"]

PATIENCE_S = 120
"""For the newcomers, once the others have the version."""


def flash_crowd(crowd: Crowd, payload_bytes: int, seed: int, joiners: int, *, empty: bool) -> tuple[Step, float, int]:
    """A step at whose half time so many join: how it went for those who were there, how many seconds after joining the
    last newcomer was seen to hold it (looked at from when the others have it), and how many newcomers never did.
    `empty`: they come without the base's bits."""
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
    made = parser(__doc__)
    made.add_argument("--nodes", type=int, default=64)
    made.add_argument("--joiners", type=int, default=64)
    made.add_argument("--empty", action="store_true", help="they have no base: they fetch every block")
    options = made.parse_args(arguments)
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
