"""The net is cut in two while a step travels, and heals: who gets on without whom, and how soon all are together again.

python -m scenarios.partition --nodes 32 --cut-s 20
"""

import json
import sys
from typing import Any

from scenarios.crowd import Crowd, begin, gather
from scenarios.rows import crowd_of, parser
from swarm.protocol.events import VersionId

__all__ = ["main", "partition"]


def partition(crowd: Crowd, payload_bytes: int, seed: int, cut_s: float) -> dict[str, Any]:
    """Half of the nodes are cut off from the others and from the trainer at half time, for `cut_s` seconds."""
    world = gather(crowd, seed)
    begun = begin(world, payload_bytes)
    id_: VersionId = begun.published.id
    world.run(world.now + payload_bytes * 4e-6 / crowd.trainer_mbit)
    away = begun.nodes[::2]
    near = [world.authority, *begun.nodes[1::2]]
    for a in away:
        for b in near:
            world.cut(a, b)
    began = world.now
    world.run_until(lambda: all(id_ in node.held_at for node in near[1:]), cut_s, 0.05)
    near_s = max(node.held_at.get(id_, float("inf")) for node in near[1:]) - begun.published.at
    world.run(began + cut_s)
    cut_off = sum(id_ not in node.held_at for node in away)
    world.heal()
    healed = world.now
    world.run_until(lambda: world.all_hold(id_), 120, 0.05)
    return {
        "nodes": crowd.nodes,
        "near_s": near_s,
        "cut_off": cut_off,
        "healed_s": world.now - healed if world.all_hold(id_) else float("inf"),
    }


def main(arguments: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--nodes", type=int, default=32)
    made.add_argument("--cut-s", type=float, default=20.0)
    options = made.parse_args(arguments)
    crowd = crowd_of(options, options.nodes)
    seeds = range(options.seed, options.seed + options.seeds)
    found = [partition(crowd, int(options.mib * 2**20), seed, options.cut_s) for seed in seeds]
    if options.json:
        print(json.dumps({"scenario": "partition", "rows": found}, indent=1))
        return 0
    for row in found:
        print(
            f"{row['nodes']} nodes: the trainer's half had the step after {row['near_s']:.2f} s; "
            f"{row['cut_off']} were cut off, and had it {row['healed_s']:.2f} s after the net was whole again"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
