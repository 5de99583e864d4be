"""Many nodes join at once while a step travels: what those who were there notice of it, and when the new ones have it.

python -m scenarios.flash_crowd --nodes 64 --joiners 64
"""

import random
import sys

from scenarios.crowd import REGIONS, Crowd, Step, begin, draw, finish, gather
from scenarios.rows import crowd_of, parser, row_of, show

__all__ = ["flash_crowd", "main"]


def flash_crowd(crowd: Crowd, payload_bytes: int, seed: int, joiners: int, *, empty: bool) -> tuple[Step, float]:
    """A step at whose half time so many join: how it went for those who were there, and how many seconds after joining
    the last newcomer held it. `empty`: they come without the base's bits."""
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
    world.run_until(lambda: all(node.core.state.held == id_ for node in newcomers), 120, 0.1)
    late = [node for node in newcomers if node.core.state.held != id_]
    return step, float("inf") if late else world.now - joined_at


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
        rows.append(row_of(f"{joiners} join", [s for s, _ in found], newcomers_s=max(late for _, late in found)))
    show("flash_crowd", rows, as_json=options.json)
    if not options.json:
        print(f"the last newcomer held it {rows[-1]['newcomers_s']:.1f} s after joining")
    return 0


if __name__ == "__main__":
    sys.exit(main())
