"""Nodes that leave, come, are killed or frozen while a step travels: what those who stay notice of it.

    python -m scenarios.sim.churn --nodes 1000                     10 % a minute: leaves and joins, half of each
    python -m scenarios.sim.churn --nodes 64 --per-minute 0.3 --how kill
    python -m scenarios.sim.churn --nodes 64 --how leave kill freeze --per-minute 0.5 --joins-per-minute 1
    python -m scenarios.sim.churn --nodes 8 --interior kill        one interior node, at half time

Nodes go and come at even distances, over four times what the trainer's uplink takes for the payload. Bound, ratio and
N are of the nodes that were there at the publish, less those that went before they had the version; one that went
afterwards, or would have gone after the last one had it, counts like those that stayed. Newcomers count in neither.
Exits with 1 when nodes that stayed are without the version in the end.
"""

import random
import sys
from collections.abc import Sequence
from functools import partial

from scenarios.sim.crowd import REGIONS, Begun, Crowd, Step, begin, draw, finish, gather
from scenarios.sim.rows import crowd_of, missed, parser, row_of, show, verdict
from scenarios.sim.simulator import World
from scenarios.sim.virtual import Node
from swarm.protocol.member import Peer

__all__ = ["HOW", "churn", "main", "moments", "strike"]

HOW = ("leave", "kill", "freeze")
"""SIGTERM, SIGKILL, SIGSTOP."""


def interior(world: World) -> Node:
    """Who has most children in the trees."""

    def children(node: Node) -> int:
        assert isinstance(node.core, Peer)
        return sum(map(len, node.core.state.exchange.children.values()))

    return max(world.members(), key=lambda node: (children(node), -node.number))


def _befall(world: World, begun: Begun, how: str, node: Node) -> None:
    """It goes: who had the version already has had its part in the step, and stays in the count."""
    if begun.published.id not in node.held_at:
        begun.nodes.remove(node)
    if how == "leave":
        world.leave(node)
        world.at(world.now + 1.0, world.kill, node)
    elif how == "kill":
        world.kill(node)
    else:
        world.freeze(node)


def moments(nodes: int, length_s: float, per_minute: float, joins_per_minute: float | None) -> list[tuple[float, bool]]:
    """When somebody goes (True) or comes (False), in order. `per_minute`: the share of nodes that does either, in turn;
    or with `joins_per_minute`, the share that comes, the one that goes."""

    def count(share: float) -> int:
        return round(nodes * share * length_s / 60)

    if joins_per_minute is None:
        number = max(1, count(per_minute))
        return [(length_s * i / number, i % 2 == 0) for i in range(number)]
    gone, come = count(per_minute), count(joins_per_minute)
    both = [(length_s * i / gone, True) for i in range(gone)] + [(length_s * i / come, False) for i in range(come)]
    return sorted(both, key=lambda moment: moment[0])


def churn(
    crowd: Crowd,
    payload_bytes: int,
    seed: int,
    per_minute: float,
    how: Sequence[str],
    joins_per_minute: float | None = None,
) -> Step:
    """One step during which nodes go and come, as `moments` has it. `how`: each goes in one of these ways, evenly at
    random."""
    world, rng = gather(crowd, seed), random.Random(seed)
    begun = begin(world, payload_bytes)
    length_s = 4 * payload_bytes * 8e-6 / crowd.trainer_mbit
    due = moments(crowd.nodes, length_s, per_minute, joins_per_minute)
    leavers = rng.sample(begun.nodes, min(len(begun.nodes), len(due)))[: crowd.nodes - 1]
    for after_s, goes in due:
        at = world.now + after_s
        if not goes:
            link = draw(crowd, rng)
            world.at(at, partial(world.join, link, held=world.base, region=REGIONS[link.region]))
        elif leavers:  # the last one stays: somebody is to be measured
            way = how[0] if len(how) == 1 else rng.choice(how)
            world.at(at, partial(_befall, world, begun, way, leavers.pop(0)))
    return finish(world, begun)


def strike(crowd: Crowd, payload_bytes: int, seed: int, how: str) -> Step:
    """One step at whose half time the busiest interior node is killed or frozen."""
    world = gather(crowd, seed)
    begun = begin(world, payload_bytes)
    world.run(world.now + payload_bytes * 4e-6 / crowd.trainer_mbit)
    _befall(world, begun, how, interior(world))
    return finish(world, begun)


def main(arguments: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--nodes", type=int, default=64)
    made.add_argument(
        "--per-minute", type=float, default=0.1,
        help="share of nodes that goes or comes, half of each; with --joins-per-minute: that goes (default 0.1)",
    )  # fmt: skip
    made.add_argument("--joins-per-minute", type=float, help="share of nodes that comes (default: as many as go)")
    made.add_argument("--how", choices=HOW, nargs="+", default=["leave"], help="how they go: of several, one by lot")
    made.add_argument("--interior", choices=("kill", "freeze"), help="instead: the busiest node, at half time")
    options = made.parse_args(arguments)
    crowd, payload = crowd_of(options, options.nodes), int(options.mib * 2**20)
    seeds = range(options.seed, options.seed + options.seeds)
    if options.interior:
        name, steps = f"interior {options.interior}", [strike(crowd, payload, s, options.interior) for s in seeds]
    else:
        name = "+".join(dict.fromkeys(options.how))
        steps = [churn(crowd, payload, s, options.per_minute, options.how, options.joins_per_minute) for s in seeds]
    rows = [row_of(name, steps)]
    show("churn", rows, as_json=options.json)
    return verdict("churn", missed(rows))


if __name__ == "__main__":
    sys.exit(main())
