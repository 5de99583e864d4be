"""The network is cut in two during a step, then heals: how each side proceeds, and how soon all nodes agree again.

    python -m scenarios.sim.partition --nodes 32 --cut-s 20

One row per seed. *near s* is the time from publish until the last node on the trainer's side had the version. *cut off*
is the number of nodes on the other side that lacked the version when the network healed. *healed s* is the time from
then until all nodes had it. Exits with 1 if, two minutes after the network healed, a node lacks the version or nodes
hold different bits.
"""

import sys
from typing import Any, Final

from scenarios.sim.crowd import Crowd, begin, gather
from scenarios.sim.rows import crowd_of, number, parser, show, verdict
from swarm.protocol.core.events import VersionId

__all__ = ["main", "partition"]

PATIENCE_S: Final = 120
"""How long to wait for all nodes after the network healed, in seconds."""
COLUMNS: Final = {
    "seed": number("seed", "d"),
    "N": number("nodes", "d"),
    "near s": number("near_s", ".2f"),
    "cut off": number("cut_off", "d"),
    "healed s": number("healed_s", ".2f"),
    "missing": number("missing", "d"),
}


def partition(crowd: Crowd, payload_bytes: int, seed: int, cut_s: float) -> dict[str, Any]:
    """Run one step; cut half of the nodes off from the trainer and the other nodes for `cut_s` seconds.

    The cut begins when half of the time has passed that the trainer's uplink needs for the payload. Returns one row.
    """
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
    whole = world.run_until(lambda: world.all_hold(id_), PATIENCE_S, 0.05)
    return {
        "seed": seed,
        "nodes": crowd.nodes,
        "near_s": near_s,
        "cut_off": cut_off,
        "healed_s": world.now - healed if whole else float("inf"),
        "missing": sum(node.core.state.held != id_ for node in world.members()),
        "same_bits": len({node.root for node in world.members()}) == 1,
    }


def wrong(row: dict[str, Any]) -> list[str]:
    """Return the failures in a row, one sentence each."""
    if row["missing"]:
        return [f"{row['missing']} of {row['nodes']} nodes did not hold the version {PATIENCE_S} s after the network "
                f"healed (seed {row['seed']})"]  # fmt: skip
    return [] if row["same_bits"] else [f"nodes ended with different bits (seed {row['seed']})"]


def main(arguments: list[str] | None = None) -> int:
    options_parser = parser(__doc__)
    options_parser.add_argument("--nodes", type=int, default=32)
    options_parser.add_argument("--cut-s", type=float, default=20.0, help="how long (default 20)")
    options = options_parser.parse_args(arguments)
    crowd = crowd_of(options, options.nodes)
    seeds = range(options.seed, options.seed + options.seeds)
    found = [partition(crowd, int(options.mib * 2**20), seed, options.cut_s) for seed in seeds]
    show("partition", found, as_json=options.json, columns=COLUMNS)
    return verdict("partition", [sentence for row in found for sentence in wrong(row)])


if __name__ == "__main__":
    sys.exit(main())
