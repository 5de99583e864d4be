"""Nodes that leave, join, are killed or frozen during a step, and what that costs the nodes that stay.

    python -m scenarios.sim.churn --nodes 1000                     10 % a minute: leaves and joins, half of each
    python -m scenarios.sim.churn --nodes 64 --per-minute 0.3 --how kill
    python -m scenarios.sim.churn --nodes 64 --how leave kill freeze --per-minute 0.5 --joins-per-minute 1
    python -m scenarios.sim.churn --nodes 8 --interior kill        one interior node, at half time

Nodes leave and join at even intervals, over four times the time that the trainer's uplink needs for the payload. The
bound, the ratio and N count the nodes that were there at the publish, except those that left before they had the
version. Nodes that join during the step do not count. Exits with 1 if a node that stayed does not get the version.
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
    """Return the node with most children in the trees."""

    def children(node: Node) -> int:
        assert isinstance(node.core, Peer)
        return sum(map(len, node.core.state.exchange.children.values()))

    return max(world.members(), key=lambda node: (children(node), -node.number))


def _remove(world: World, begun: Begun, how: str, node: Node) -> None:
    """Remove the node in the given way. A node that already has the version remains in the count."""
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
    """Return, in order of time, when a node leaves (True) or joins (False).

    `per_minute` is the share of the nodes that leaves or joins each minute, in turn. With `joins_per_minute`, that is
    the share that joins and `per_minute` the share that leaves."""

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
    """Run one step during which nodes leave and join as `moments` says. Each leaves in one of the ways `how`, at
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
        elif leavers:  # at least one node stays, to be measured
            way = how[0] if len(how) == 1 else rng.choice(how)
            world.at(at, partial(_remove, world, begun, way, leavers.pop(0)))
    return finish(world, begun)


def strike(crowd: Crowd, payload_bytes: int, seed: int, how: str) -> Step:
    """Run one step; at half its time the node with most children is killed or frozen."""
    world = gather(crowd, seed)
    begun = begin(world, payload_bytes)
    world.run(world.now + payload_bytes * 4e-6 / crowd.trainer_mbit)
    _remove(world, begun, how, interior(world))
    return finish(world, begun)


def main(arguments: list[str] | None = None) -> int:
    options_parser = parser(__doc__)
    options_parser.add_argument("--nodes", type=int, default=64)
    options_parser.add_argument(
        "--per-minute", type=float, default=0.1,
        help="share of nodes that leaves or joins, half of each; with --joins-per-minute: that leaves (default 0.1)",
    )  # fmt: skip
    options_parser.add_argument(
        "--joins-per-minute", type=float, help="share of nodes that joins (default: as many as leave)"
    )
    options_parser.add_argument(
        "--how", choices=HOW, nargs="+", default=["leave"], help="how they leave; of several, one at random"
    )
    options_parser.add_argument(
        "--interior", choices=("kill", "freeze"), help="instead: the node with most children, at half time"
    )
    options = options_parser.parse_args(arguments)
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
