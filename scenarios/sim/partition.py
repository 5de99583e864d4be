"""The network is cut in two for a while, then heals: how each side goes on, and how soon all nodes agree again.

    python -m scenarios.sim.partition --nodes 32 --cut-s 20                       during one version
    python -m scenarios.sim.partition --nodes 64 --cut-s 600 --every-s 30         ten minutes, a version every 30 s
    python -m scenarios.sim.partition --nodes 64 --cut-s 600 --every-s 30 --one-way in      nothing reaches the far side
    python -m scenarios.sim.partition --nodes 64 --cut-s 600 --every-s 30 --one-way out     nothing comes from it

Half of the nodes, the far side, are cut off from the trainer and the other nodes in the middle of a version. With
`--every-s` the trainer publishes further versions meanwhile, the last one at most that long before the network heals.

One row per seed. *near s*: the longest time from the cut, or from a later publish, until the last node of the near side
had the version. *cut off*: nodes of the far side that lacked the head when the network healed. *healed s*: from then
until all nodes had it. *fresh s*: in a second run, the far side's nodes are gone instead, and as many new ones with the
same links and the same old version join at that moment: the time until all of these have the head. *x*: healed by
fresh. Who missed more than 16 versions fetches all blocks of the model, of `--model-mib`.

Exits with 1 if, two minutes after the network healed, a node lacks the head or nodes hold different bits, if a node saw
two versions of one number, or if *x* is above `--most` (0: any).
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from scenarios.sim.crowd import REGIONS, Crowd, begin, gather
from scenarios.sim.rows import crowd_of, number, parser, show, verdict
from scenarios.sim.simulator import World
from scenarios.sim.virtual import Node
from swarm.protocol.core.events import VersionId
from swarm.protocol.core.notices import Equivocation

__all__ = ["Cut", "fresh_s", "main", "partition"]

PATIENCE_S: Final = 120
"""How long to wait for all nodes after the network healed, in seconds."""
BLOCK_MIB: Final = 2.0
"""Of the model; the product's are of this size in bfloat16."""
LEAST_BLOCKS: Final = 32
COLUMNS: Final = {
    "seed": number("seed", "d"),
    "N": number("nodes", "d"),
    "versions": number("versions", "d"),
    "near s": number("near_s", ".2f"),
    "cut off": number("cut_off", "d"),
    "healed s": number("healed_s", ".2f"),
    "fresh s": number("fresh_s", ".2f"),
    "x": number("ratio", ".2f"),
    "missing": number("missing", "d"),
}


@dataclass(frozen=True)
class Cut:
    """`seconds`: how long. `every_s`: from publish to publish meanwhile; 0: no further version. `one_way`: "in": only
    what goes to the far side is lost; "out": only what comes from it; empty: both."""

    seconds: float
    every_s: float = 0.0
    one_way: str = ""

    def apply(self, world: World, near: list[Node], far: list[Node]) -> None:
        """Cut the two sides off from each other."""
        for a in near:
            for b in far:
                if self.one_way == "out":
                    world.cut(b, a, one_way=True)
                else:
                    world.cut(a, b, one_way=self.one_way == "in")


def _begun(crowd: Crowd, payload_bytes: int, seed: int) -> tuple[World, list[Node], list[Node]]:
    """A world in the middle of a version: (it, the near nodes, the far nodes)."""
    world = gather(crowd, seed)
    begun = begin(world, payload_bytes)
    world.run(world.now + payload_bytes * 4e-6 / crowd.trainer_mbit)
    return world, begun.nodes[1::2], begun.nodes[::2]


def _go_on(world: World, cut: Cut, payload_bytes: int, near: list[Node]) -> list[float]:
    """Publish while the network is cut. Returns for each version how long the near nodes took; infinity: one did not
    have it before the next."""
    took, end, published = [], world.now + cut.seconds, newest(world)
    while True:
        until = min(end, world.now + cut.every_s) if cut.every_s else end
        began = world.now
        held = partial(_all_had, near, published)
        took.append(world.now - began if world.run_until(held, until - began, 0.05) else float("inf"))
        world.run(until)
        if not cut.every_s or world.now >= end:
            return took
        published = begin(world, payload_bytes).published.id


def _all_had(nodes: list[Node], version: VersionId) -> bool:
    return all(version in node.held_at for node in nodes)


def newest(world: World) -> VersionId:
    """The newest version that was published."""
    return max(world.versions)


def partition(crowd: Crowd, payload_bytes: int, seed: int, cut: Cut) -> dict[str, Any]:
    """Cut half of the nodes off, publish, heal, and wait. Returns one row."""
    world, near, far = _begun(crowd, payload_bytes, seed)
    cut.apply(world, [world.authority, *near], far)
    took = _go_on(world, cut, payload_bytes, near)
    head = newest(world)
    cut_off = sum(node.core.state.held != head for node in far)
    world.heal()
    healed = world.now
    whole = world.run_until(lambda: world.all_hold(head), PATIENCE_S, 0.05)
    seen_two = sum(isinstance(notice, Equivocation) for node in world.nodes.values() for notice in node.notices)
    return {
        "seed": seed,
        "nodes": crowd.nodes,
        "versions": len(took),
        "near_s": max(took),
        "cut_off": cut_off,
        "healed_s": world.now - healed if whole else float("inf"),
        "missing": sum(node.core.state.held != head for node in world.members()),
        "same_bits": len({node.root for node in world.members()}) == 1,
        "equivocations": seen_two,
    }


def fresh_s(crowd: Crowd, payload_bytes: int, seed: int, cut: Cut) -> float:
    """Seconds until as many new nodes as the far side had, with its links and its version, have the head."""
    world, near, far = _begun(crowd, payload_bytes, seed)
    held = {node.key.public: node.core.state.held for node in far}
    for node in far:
        world.kill(node)
    _go_on(world, cut, payload_bytes, near)
    head, began = newest(world), world.now
    for node in far:
        version = held[node.key.public]
        old = world.versions[version].manifest if version is not None and version in world.versions else world.base
        world.join(node.link, held=old, region=REGIONS[node.link.region])
    whole = world.run_until(lambda: world.all_hold(head), PATIENCE_S, 0.05)
    return world.now - began if whole else float("inf")


def wrong(row: dict[str, Any], most: float = 0.0) -> list[str]:
    """Return the failures in a row, one sentence each."""
    if row["missing"]:
        return [f"{row['missing']} of {row['nodes']} nodes did not hold the version {PATIENCE_S} s after the network "
                f"healed (seed {row['seed']})"]  # fmt: skip
    found = [] if row["same_bits"] else [f"nodes ended with different bits (seed {row['seed']})"]
    if row.get("equivocations"):
        found.append(f"{row['equivocations']} times a node saw two versions of one number (seed {row['seed']})")
    if most and row["ratio"] > most:
        found.append(f"the far side took {row['ratio']:.2f} times as long as new nodes (seed {row['seed']})")
    return found


def main(arguments: list[str] | None = None) -> int:
    options_parser = parser(__doc__)
    options_parser.add_argument("--nodes", type=int, default=32)
    options_parser.add_argument("--cut-s", type=float, default=20.0, help="how long (default 20)")
    options_parser.add_argument("--every-s", type=float, default=0.0, help="publish so often meanwhile (0: not at all)")
    options_parser.add_argument(
        "--one-way", choices=("in", "out"), default="", help="only packets to, or from, far nodes"
    )
    options_parser.add_argument("--model-mib", type=float, default=2.0, help="size of the model, MiB (default 2)")
    options_parser.add_argument("--most", type=float, default=0.0, help="of x; 0: it is printed only")
    options = options_parser.parse_args(arguments)
    blocks = max(LEAST_BLOCKS, round(options.model_mib / BLOCK_MIB))
    block_bytes = int(options.model_mib * 2**20 / blocks)
    crowd = crowd_of(options, options.nodes, blocks=blocks, block_bytes=block_bytes)
    payload = int(options.mib * 2**20)
    cut, found = Cut(options.cut_s, options.every_s, options.one_way), []
    for seed in range(options.seed, options.seed + options.seeds):
        row = partition(crowd, payload, seed, cut)
        fresh = fresh_s(crowd, payload, seed, cut)
        found.append(row | {"fresh_s": fresh, "ratio": row["healed_s"] / fresh})
    show("partition", found, as_json=options.json, columns=COLUMNS)
    return verdict("partition", [sentence for row in found for sentence in wrong(row, options.most)])


if __name__ == "__main__":
    sys.exit(main())
