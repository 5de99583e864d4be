"""A crowd of nodes on a simulated internet: what their connections are like, and how far a step of theirs is from the
best that anybody could do."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from codec import chunk_target, piece_target
from codec.choice import arrival_mbit
from scenarios.sim.simulator import World
from scenarios.sim.virtual import Cpu, Link, Node, Paths, Published
from scenarios.sim.virtual.links import PACKET_OVERHEAD
from swarm.protocol.core.events import VersionId
from swarm.protocol.core.tuning import Tuning

__all__ = [
    "HEADER_BYTES", "REGIONS", "Begun", "Crowd", "Step", "Tell", "begin", "bound_s", "draw", "finish", "gather", "step",
]  # fmt: skip

Tell = Callable[[float, float], None]
"""Told how much is done, and of how much."""

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


HEADER_BYTES = 300
"""Of a simulated chunk."""


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
    congestion: str = "reno"
    """As `Paths` has it. The harder: the transport asks for BBR and many a kernel refuses."""

    def paths(self) -> Paths:
        one_way = tuple(tuple(ms / 2000 for ms in row[: self.regions]) for row in _ROUND_TRIP_MS[: self.regions])
        return Paths(one_way, congestion=self.congestion)

    @property
    def round_trip_s(self) -> float:
        """The largest."""
        return max(ms for row in _ROUND_TRIP_MS[: self.regions] for ms in row[: self.regions]) / 1000


def _nobody(done: float, total: float) -> None:
    """Nobody wants to know."""


def gather(
    crowd: Crowd,
    seed: int,
    tuning: Tuning | None = None,
    settle_s: float = 30.0,
    host: Cpu | None = None,
    tell: Tell = _nobody,
) -> World:
    """A swarm of such nodes that hold version 0 and stand in their trees. `host`: as `World` has it. `tell`: virtual
    seconds of settling."""
    rng = random.Random(seed)
    trainer = Link(crowd.trainer_mbit, 0.0, max(crowd.down_mbit, crowd.trainer_mbit), 0, crowd.loss)
    world = World(
        tuning or Tuning.wan(), seed=seed, authority_link=trainer, home=REGIONS[0], paths=crowd.paths(), host=host
    )
    for _ in range(crowd.nodes):
        link = draw(crowd, rng)
        known = link.up_mbit * rng.uniform(1 - crowd.error, 1 + crowd.error)
        dialable = rng.random() >= crowd.hidden
        world.join(link, held=world.base, known_mbit=known, region=REGIONS[link.region], dialable=dialable)
    end = world.now + settle_s
    while world.now < end:
        world.run(min(end, world.now + 1.0))
        tell(settle_s - (end - world.now), settle_s)
    return world


def draw(crowd: Crowd, rng: random.Random) -> Link:
    """One node's connection."""
    up = rng.lognormvariate(0.0, crowd.sigma) * crowd.median_mbit
    return Link(up, 0.0, max(crowd.down_mbit, up), rng.randrange(crowd.regions), crowd.loss)


@dataclass(frozen=True, slots=True)
class Step:
    """How one version went, in seconds and bytes, for who was there when it began and had it or stayed (`finish`)."""

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
    entered: dict[str, float] = field(default_factory=dict)
    """Of each region, the copies that came in from others; of the trainer's own as well."""

    @property
    def ratio(self) -> float:
        """Times the bound."""
        return self.seconds / self.bound_s

    @property
    def copies(self) -> float:
        """That the trainer sent, control included."""
        return self.trainer_bytes / self.payload_bytes


def bound_s(payload_bytes: int, trainer: Link, nodes: list[Node]) -> float:
    """max(F/u_s, F/d_min, N F/(u_s + sum u_i)), with the headers of packets counted."""
    bits = payload_bytes * 8 * PACKET_OVERHEAD / 1e6
    ups = sum(node.link.up_mbit for node in nodes)
    return max(
        bits / trainer.up_mbit,
        max(bits / node.link.down_mbit for node in nodes),
        len(nodes) * bits / (trainer.up_mbit + ups),
    )


@dataclass(frozen=True, slots=True)
class Begun:
    """A step under way."""

    published: Published
    nodes: list[Node]
    """Who was there when it began, less those that said goodbye before they had it."""
    trainer_bytes: int
    """What the trainer's sockets had sent before."""


def begin(world: World, payload_bytes: int) -> Begun:
    """Publish a version of about so many bytes, in chunks and pieces as the product would cut them."""
    nodes = world.members()
    for node in nodes:
        node.received_bytes = node.duplicate_bytes = node.crossed_bytes = 0
    chunk = min(chunk_target(payload_bytes), payload_bytes)
    before = world.authority.socket_bytes
    chunks = max(1, round(payload_bytes / chunk))
    ups = [node.link.up_mbit for node in nodes]
    piece = piece_target(payload_bytes, len(nodes), arrival_mbit(world.authority.link.up_mbit, ups))
    published = world.publish(chunks=chunks, chunk_bytes=chunk - HEADER_BYTES, piece_bytes=piece)
    return Begun(published, nodes, before)


def finish(world: World, begun: Begun, limit_s: float = 60.0, every_s: float = 0.05, tell: Tell = _nobody) -> "Step":
    """Advance the clock until every node that was there at the start and is still alive has the version; return how
    that went. A node that left after it had the version counts as one that stayed, since it took and relayed its copy.
    `tell` is called with the megabytes received so far."""
    id_: VersionId = begun.published.id

    def there() -> list[Node]:
        return [node for node in begun.nodes if id_ in node.held_at or (node.alive and not node.frozen)]

    def all_have_it() -> bool:
        wanting = there()
        received = sum(node.received_bytes for node in wanting)
        tell(received / 1e6, len(wanting) * begun.published.payload_bytes / 1e6)
        return all(id_ in node.held_at for node in wanting)

    world.run_until(all_have_it, limit_s, every_s)
    nodes = there()
    times = sorted(node.held_at[id_] - begun.published.at for node in nodes if id_ in node.held_at)
    received = sum(node.received_bytes for node in nodes)
    payload = begun.published.payload_bytes
    entered = dict.fromkeys(REGIONS[: len(world.paths.one_way_s)], 0)
    for node in nodes:
        entered[REGIONS[node.link.region]] += node.crossed_bytes
    home = REGIONS[world.authority.link.region]
    return Step(
        nodes=len(nodes),
        payload_bytes=payload,
        bound_s=bound_s(payload, world.authority.link, nodes),
        seconds=times[-1] if len(times) == len(nodes) else float("inf"),
        first_s=times[0] if times else float("inf"),
        median_s=times[len(times) // 2] if times else float("inf"),
        trainer_bytes=world.authority.socket_bytes - begun.trainer_bytes,
        duplicates=sum(node.duplicate_bytes for node in nodes) / max(1, received),
        crossings=max((size for region, size in entered.items() if region != home), default=0) / payload,
        missing=len(nodes) - len(times),
        entered={region: size / payload for region, size in entered.items()},
    )


def step(world: World, payload_bytes: int, limit_s: float = 60.0, tell: Tell = _nobody) -> "Step":
    """One version, from publish until all have it. `tell`: as `finish` has it."""
    return finish(world, begin(world, payload_bytes), limit_s, tell=tell)
