"""Where a simulated step's time goes: how much of the uplinks is in use, and how the last node got its stripes.

    python -m scenarios.sim.trace --nodes 64
    python -m scenarios.sim.trace --nodes 1000 --up-mbit 1000 --congestion bbr --warm

Times are multiples of the bound (see `scenarios.sim.egress`). *load* is the rate that the plan gives a node's uplink as
a share of its true rate; the plan knows rates with an error of `--error`. A load of 1 means that its children can
receive at exactly the bound's rate.
"""

import math
import sys
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

from scenarios.sim.crowd import Begun, Step, begin, finish, gather, step
from scenarios.sim.rows import crowd_of, parser, row_of, show
from scenarios.sim.simulator import World
from scenarios.sim.virtual.flow import PACKET_OVERHEAD

__all__ = ["Hop", "Trace", "main", "trace"]

LOOK_S = 0.05
IDLE_S = 20.0
"""Seconds between the steps, as in `scenarios.sim.egress`."""
LOOKS_A_COLUMN = 4


@dataclass(frozen=True, slots=True)
class Hop:
    """A node on the path of a stripe."""

    slot: int
    region: str
    load: float
    whole_at: float
    """When the node had the whole stripe."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What was observed during a step."""

    used: list[float]
    """Share of the nodes' total uplink rate in use, sampled five times a second."""
    loads: list[float]
    """Deciles over the nodes."""
    done: list[float]
    """Deciles of the nodes' times."""
    last: list[list[Hop]]
    """For each stripe: the node that had it last, then its parent, and so on up to the root's child."""


class _Watch:
    """Samples all nodes at a fixed interval until they have the version."""

    def __init__(self, world: World, begun: Begun) -> None:
        self._world, self._begun = world, begun
        self._ups = sum(node.link.up_mbit for node in begun.nodes)
        self._busy_s = self._busy()
        self._waiting = list(begun.nodes)
        self.used: list[float] = []
        self.whole_at: dict[tuple[int, int], float] = {}
        """When a node (by number) had the whole of a stripe."""
        world.at(world.now + LOOK_S, self._look)

    def _busy(self) -> float:
        """Return the seconds for which uplinks have sent, weighted by their rates."""
        return sum(node.socket_bytes * node.up_s_byte * node.link.up_mbit for node in self._begun.nodes) / self._ups

    def _look(self) -> None:
        before, self._busy_s = self._busy_s, self._busy()
        self.used.append((self._busy_s - before) / LOOK_S)
        id_ = self._begun.published.id
        assigned = self._world.authority.core.state.chunks.version(id_)
        assert assigned is not None
        for node in self._waiting:
            version = node.core.state.chunks.version(id_)
            if version is not None and version.manifest is not None:
                late = {assigned.chunks[seq].stripe for seq in version.missing()}
                for stripe in set(range(self._world.tuning.stripes)) - late:
                    self.whole_at.setdefault((node.number, stripe), self._world.now)
        self._waiting = [node for node in self._waiting if id_ not in node.held_at and node.alive]
        if self._waiting:
            self._world.at(self._world.now + LOOK_S, self._look)


def trace(world: World, payload_bytes: int) -> tuple[Step, Trace]:
    """Run one step and observe it."""
    begun = begin(world, payload_bytes)
    roster = world.authority.core.state.roster
    assert roster is not None
    watch = _Watch(world, begun)
    result = finish(world, begun)
    world.run(world.now + LOOK_S)
    began, bound_s, id_ = begun.published.at, result.bound_s, begun.published.id
    nodes = {grant.slot: node for node in begun.nodes if (grant := node.core.state.grant) is not None}
    rate_mbit = 8e-6 * PACKET_OVERHEAD * result.payload_bytes / (roster.stripes * bound_s)
    loads = {
        slot: sum(len(roster.children(k, slot)) for k in range(roster.stripes)) * rate_mbit / node.link.up_mbit
        for slot, node in nodes.items()
    }
    done = {slot: (node.held_at[id_] - began) / bound_s for slot, node in nodes.items() if id_ in node.held_at}
    last = max(done, key=lambda slot: (done[slot], slot))

    def hop(slot: int, stripe: int) -> Hop:
        member = roster.member(slot)
        at = watch.whole_at.get((nodes[slot].number, stripe), math.inf)
        return Hop(slot, member.region if member is not None else "", loads[slot], (at - began) / bound_s)

    columns = [watch.used[i : i + LOOKS_A_COLUMN] for i in range(0, len(watch.used), LOOKS_A_COLUMN)]
    return result, Trace(
        used=[sum(column) / len(column) for column in columns],
        loads=quantiles(loads.values(), n=10, method="inclusive"),
        done=quantiles(done.values(), n=10, method="inclusive"),
        last=[[hop(slot, k) for slot in [last, *roster.ancestors(k, last)]] for k in range(roster.stripes)],
    )


def _print(result: Step, traced: Trace) -> None:
    def numbers(values: list[float]) -> str:
        return " ".join(f"{value:.2f}" for value in values)

    print(
        f"{result.nodes} nodes, B {result.bound_s:.2f} s: first "
        f"{result.first_s / result.bound_s:.3f}, last {result.ratio:.3f}"
    )
    print(f"uplinks in use, each {LOOKS_A_COLUMN * LOOK_S:.1f} s: {numbers(traced.used)}")
    print(f"loads, in tenths of the nodes: {numbers(traced.loads)}")
    print(f"done, in tenths of the nodes: {numbers(traced.done)}")
    print(
        "the last node's stripes and their parents up to the root's child: slot [region, load] when it had the stripe"
    )
    for stripe, way in enumerate(traced.last):
        print(f"{stripe}: " + " < ".join(f"{h.slot} [{h.region}, {h.load:.2f}] {h.whole_at:.2f}" for h in way))


def main(arguments: list[str] | None = None) -> int:
    options_parser = parser(__doc__)
    options_parser.add_argument("--nodes", type=int, default=64)
    options_parser.add_argument("--warm", action="store_true", help="observe the second step, not the first")
    options = options_parser.parse_args(arguments)
    crowd, payload = crowd_of(options, options.nodes), int(options.mib * 2**20)
    rows: list[dict[str, Any]] = []
    for seed in range(options.seed, options.seed + options.seeds):
        world = gather(crowd, seed)
        if options.warm:
            step(world, payload)
            world.run(world.now + IDLE_S)
        result, traced = trace(world, payload)
        rows.append(row_of(f"seed {seed}", [result], **asdict(traced)))
        if not options.json:
            _print(result, traced)
    if options.json:
        show("trace", rows, as_json=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
