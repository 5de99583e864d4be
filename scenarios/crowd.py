"""A crowd of nodes on a simulated internet: what their connections are like, and how far a step of theirs is from the
best that anybody could do."""

import random
from dataclasses import dataclass

from scenarios.simulator import World
from scenarios.virtual import Link, Node, Paths, Published
from scenarios.virtual.links import PACKET_OVERHEAD
from swarm.protocol.events import VersionId
from swarm.protocol.tuning import Tuning

__all__ = ["REGIONS", "Crowd", "Step", "bound_s", "gather", "measure"]

REGIONS = ("us-east", "us-west", "europe", "japan", "singapore", "brazil")
_ROUND_TRIP_MS = (
    (5, 65, 85, 160, 220, 120),
    (65, 5, 145, 105, 170, 180),
    (85, 145, 5, 225, 160, 190),
    (160, 105, 225, 5, 70, 250),
    (220, 170, 160, 70, 5, 250),
    (120, 180, 190, 250, 250, 5),
)
"""Between and within regions, as public clouds report them, rounded; the farthest cut to 250."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """What the nodes are like. Rates in Mbit/s."""

    nodes: int
    trainer_mbit: float = 200.0
    median_mbit: float = 200.0
    sigma: float = 0.5
    """Of the logarithm of the uplinks."""
    down_mbit: float = 1000.0
    """A downlink is this, or the uplink if that is more."""
    error: float = 0.2
    """How far what a node says of its uplink is from the truth: uniformly up to this much below or above."""
    regions: int = len(REGIONS)
    hidden: float = 0.0
    """Share of nodes that cannot be dialed."""
    loss: float = 1e-5
    """Of a packet, on each uplink."""
    remembers: bool = False
    """Idle connections keep their windows (BBR)."""
    windows: bool = True
    ways: int = 8

    def paths(self) -> Paths:
        one_way = tuple(tuple(ms / 2000 for ms in row[: self.regions]) for row in _ROUND_TRIP_MS[: self.regions])
        return Paths(one_way, windows=self.windows, remembers=self.remembers, most_ways=self.ways)

    @property
    def round_trip_s(self) -> float:
        """The largest."""
        return max(ms for row in _ROUND_TRIP_MS[: self.regions] for ms in row[: self.regions]) / 1000


def gather(crowd: Crowd, seed: int, tuning: Tuning | None = None, settle_s: float = 30.0) -> World:
    """A swarm of such nodes that hold version 0 and stand in their trees."""
    rng = random.Random(seed)
    trainer = Link(crowd.trainer_mbit, 0.0, max(crowd.down_mbit, crowd.trainer_mbit), 0, crowd.loss)
    world = World(tuning or Tuning.wan(), seed=seed, authority_link=trainer, paths=crowd.paths())
    for number in range(crowd.nodes):
        link = draw(crowd, rng)
        known = link.up_mbit * rng.uniform(1 - crowd.error, 1 + crowd.error)
        dialable = rng.random() >= crowd.hidden
        world.join(link, held=world.base, known_mbit=known, region=REGIONS[link.region], dialable=dialable)
    world.run(world.now + settle_s)
    return world


def draw(crowd: Crowd, rng: random.Random) -> Link:
    """One node's connection."""
    up = rng.lognormvariate(0.0, crowd.sigma) * crowd.median_mbit
    return Link(up, 0.0, max(crowd.down_mbit, up), rng.randrange(crowd.regions), crowd.loss)


@dataclass(frozen=True, slots=True)
class Step:
    """How one version went. Seconds and bytes; `others`: of the crowd that was there from publish to the end."""

    nodes: int
    payload_bytes: int
    bound_s: float
    seconds: float
    first_s: float
    median_s: float
    trainer_bytes: int
    """At its sockets, control included."""
    duplicates: float
    """Of the bulk bytes that the nodes received."""
    crossings: float
    """Copies that entered the region that most entered."""
    missing: int
    """Nodes that never got it."""


def bound_s(payload_bytes: int, trainer: Link, nodes: list[Node]) -> float:
    """max(F/u_s, F/d_min, N F/(u_s + sum u_i)), with the headers of packets counted."""
    bits = payload_bytes * 8 * PACKET_OVERHEAD / 1e6
    ups = sum(node.link.up_mbit for node in nodes)
    return max(
        bits / trainer.up_mbit,
        max(bits / node.link.down_mbit for node in nodes),
        len(nodes) * bits / (trainer.up_mbit + ups),
    )


def measure(world: World, published: Published, before: int, nodes: list[Node]) -> Step:
    """How `published` went for `nodes`; `before`: what the trainer's sockets had sent when it began."""
    id_: VersionId = published.id
    times = sorted(node.held_at[id_] - published.at for node in nodes if id_ in node.held_at)
    received = sum(node.received_bytes for node in nodes)
    crossed: dict[int, int] = {}
    for node in nodes:
        crossed[node.link.region] = crossed.get(node.link.region, 0) + node.crossed_bytes
    return Step(
        nodes=len(nodes),
        payload_bytes=published.payload_bytes,
        bound_s=bound_s(published.payload_bytes, world.authority.link, nodes),
        seconds=times[-1] if times else float("inf"),
        first_s=times[0] if times else float("inf"),
        median_s=times[len(times) // 2] if times else float("inf"),
        trainer_bytes=world.authority.socket_bytes - before,
        duplicates=sum(node.duplicate_bytes for node in nodes) / max(1, received),
        crossings=max(crossed.values()) / published.payload_bytes,
        missing=len(nodes) - len(times),
    )
