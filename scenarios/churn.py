"""Nodes that leave, come, are killed or frozen while a step travels: what those who stay notice of it.

python -m scenarios.churn --nodes 1000                     10 % a minute: leaves and joins, half of each
python -m scenarios.churn --nodes 64 --per-minute 0.3 --how kill
python -m scenarios.churn --nodes 8 --interior kill        one interior node, at half time
"""

import random
import sys
from functools import partial

from scenarios.crowd import REGIONS, Begun, Crowd, Step, begin, draw, finish, gather
from scenarios.rows import crowd_of, parser, row_of, show
from scenarios.simulator import World
from scenarios.virtual import Node
from swarm.protocol.peer import Peer

__all__ = ["churn", "main", "strike"]


def interior(world: World) -> Node:
    """Who has most children in the trees."""

    def children(node: Node) -> int:
        assert isinstance(node.core, Peer)
        return sum(map(len, node.core.state.exchange.children.values()))

    return max(world.members(), key=lambda node: (children(node), -node.number))


def _befall(world: World, how: str, node: Node) -> None:
    if how == "leave":
        world.leave(node)
        world.at(world.now + 1.0, world.kill, node)
    elif how == "kill":
        world.kill(node)
    else:
        world.freeze(node)


def _gone(begun: Begun, node: Node) -> None:
    if node in begun.nodes:
        begun.nodes.remove(node)


def churn(crowd: Crowd, payload_bytes: int, seed: int, per_minute: float, how: str) -> Step:
    """One step during which so large a share of the nodes a minute goes or comes, half of each."""
    world, rng = gather(crowd, seed), random.Random(seed)
    begun = begin(world, payload_bytes)
    length_s = 4 * payload_bytes * 8e-6 / crowd.trainer_mbit
    count = max(1, round(crowd.nodes * per_minute * length_s / 60))
    leavers = iter(rng.sample(begun.nodes, min(len(begun.nodes), count)))
    for i in range(count):
        at = world.now + length_s * i / count
        node = next(leavers) if i % 2 == 0 else None
        if node is not None:
            _gone(begun, node)
            world.at(at, partial(_befall, world, how, node))
        else:
            link = draw(crowd, rng)
            world.at(at, partial(world.join, link, held=world.base, region=REGIONS[link.region]))
    return finish(world, begun)


def strike(crowd: Crowd, payload_bytes: int, seed: int, how: str) -> Step:
    """One step at whose half time the busiest interior node is killed or frozen."""
    world = gather(crowd, seed)
    begun = begin(world, payload_bytes)
    world.run(world.now + payload_bytes * 4e-6 / crowd.trainer_mbit)
    node = interior(world)
    _gone(begun, node)
    _befall(world, how, node)
    return finish(world, begun)


def main(arguments: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--nodes", type=int, default=64)
    made.add_argument("--per-minute", type=float, default=0.1, help="share of nodes that goes or comes (default 0.1)")
    made.add_argument("--how", choices=("leave", "kill", "freeze"), default="leave", help="how nodes go")
    made.add_argument("--interior", choices=("kill", "freeze"), help="instead: the busiest node, at half time")
    options = made.parse_args(arguments)
    crowd, payload = crowd_of(options, options.nodes), int(options.mib * 2**20)
    seeds = range(options.seed, options.seed + options.seeds)
    if options.interior:
        name, steps = f"interior {options.interior}", [strike(crowd, payload, s, options.interior) for s in seeds]
    else:
        name = options.how
        steps = [churn(crowd, payload, s, options.per_minute, options.how) for s in seeds]
    show("churn", [row_of(name, steps)], as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
