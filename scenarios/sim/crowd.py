"""A crowd of nodes on a simulated internet: their connections, and how a step's time compares with the lower bound."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from codec import chunk_target, piece_target
from codec.choice import arrival_mbit
from scenarios.sim.simulator import World
from scenarios.sim.virtual import Cpu, Link, Node, Paths, Published
from scenarios.sim.virtual.flow import PACKET_OVERHEAD
from swarm.protocol.core.events import VersionId
from swarm.protocol.core.tuning import Tuning

__all__ = [
    "HEADER_BYTES",
    "REGIONS",
    "Begun",
    "Crowd",
    "Report",
    "Step",
    "begin",
    "bound_s",
    "draw",
    "finish",
    "gather",
    "step",
]  # fmt: skip

Report = Callable[[float, float], None]
"""Called with the amount done and the total."""

REGIONS = ("us-east", "us-west", "europe", "japan", "singapore", "brazil")
_ROUND_TRIP_MS = (
    (5, 65, 85, 160, 220, 120),
    (65, 5, 145, 105, 170, 180),
    (85, 145, 5, 225, 160, 190),
    (160, 105, 225, 5, 70, 250),
    (220, 170, 160, 70, 5, 250),
    (120, 180, 190, 250, 250, 5),
)
"""Round trips between and within regions as public clouds report them, rounded, and at most 250."""


HEADER_BYTES = 300
"""Size of a simulated chunk's header."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """The nodes and their connections. Rates are in Mbit/s."""

    nodes: int
    trainer_mbit: float = 200.0
    median_mbit: float = 200.0
    sigma: float = 0.5
    """Standard deviation of the logarithm of the uplink rates."""
    down_mbit: float = 1000.0
    """A downlink has this rate, or the uplink's if that is higher."""
    error: float = 0.2
    """Largest relative error of the uplink rate that a node reports; uniformly distributed."""
    regions: int = len(REGIONS)
    hidden: float = 0.0
    """Share of nodes that cannot be dialed."""
    loss: float = 1e-5
    """Probability that a packet is lost on an uplink."""
    congestion: str = "reno"
    """As in `Paths`. The default is the slower one: the transport asks for BBR, but many kernels lack it."""

    blocks: int = 32
    block_bytes: int = 1 << 16
    """The model: how many blocks it has, and the size of each. A member that missed many versions fetches them."""

    def paths(self) -> Paths:
        one_way = tuple(tuple(ms / 2000 for ms in row[: self.regions]) for row in _ROUND_TRIP_MS[: self.regions])
        return Paths(one_way, congestion=self.congestion)

    @property
    def round_trip_s(self) -> float:
        """The longest round trip between two regions."""
        return max(ms for row in _ROUND_TRIP_MS[: self.regions] for ms in row[: self.regions]) / 1000


def _silent(done: float, total: float) -> None:
    """Report nothing."""


def gather(
    crowd: Crowd,
    seed: int,
    tuning: Tuning | None = None,
    settle_s: float = 30.0,
    host: Cpu | None = None,
    report: Report = _silent,
) -> World:
    """Return a swarm of these nodes in which all hold version 0 and have joined the trees. `host` is as in `World`.
    `report` is called with the virtual seconds that have passed of `settle_s`."""
    rng = random.Random(seed)
    trainer = Link(crowd.trainer_mbit, 0.0, max(crowd.down_mbit, crowd.trainer_mbit), 0, crowd.loss)
    world = World(
        tuning or Tuning.wan(), seed=seed, authority_link=trainer, home=REGIONS[0], paths=crowd.paths(), host=host,
        blocks=crowd.blocks, block_bytes=crowd.block_bytes,
    )  # fmt: skip
    for _ in range(crowd.nodes):
        link = draw(crowd, rng)
        known = link.up_mbit * rng.uniform(1 - crowd.error, 1 + crowd.error)
        dialable = rng.random() >= crowd.hidden
        world.join(link, held=world.base, known_mbit=known, region=REGIONS[link.region], dialable=dialable)
    end = world.now + settle_s
    while world.now < end:
        world.run(min(end, world.now + 1.0))
        report(settle_s - (end - world.now), settle_s)
    return world


def draw(crowd: Crowd, rng: random.Random) -> Link:
    """Return a random connection for one node."""
    up = rng.lognormvariate(0.0, crowd.sigma) * crowd.median_mbit
    return Link(up, 0.0, max(crowd.down_mbit, up), rng.randrange(crowd.regions), crowd.loss)


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one version, in seconds and bytes, for the nodes that `finish` counts."""

    nodes: int
    payload_bytes: int
    bound_s: float
    seconds: float
    first_s: float
    median_s: float
    trainer_bytes: int
    """All bytes on the trainer's sockets, control messages included."""
    duplicates: float
    """Share of duplicates in the bulk data that the nodes received."""
    crossings: float
    """Copies that entered a region from others; the largest number of any region but the trainer's."""
    missing: int
    """Nodes that never got the version."""
    entered: dict[str, float] = field(default_factory=dict)
    """For each region, the trainer's included, the copies that entered it from others."""

    @property
    def ratio(self) -> float:
        """Time as a multiple of the bound."""
        return self.seconds / self.bound_s

    @property
    def copies(self) -> float:
        """Copies of the payload that the trainer sent, control messages included."""
        return self.trainer_bytes / self.payload_bytes


def bound_s(payload_bytes: int, trainer: Link, nodes: list[Node]) -> float:
    """Return max(F/u_s, F/d_min, N F/(u_s + sum u_i)) in seconds, packet headers included (Mundinger, Weber and Weiss,
    2008)."""
    bits = payload_bytes * 8 * PACKET_OVERHEAD / 1e6
    ups = sum(node.link.up_mbit for node in nodes)
    return max(
        bits / trainer.up_mbit,
        max(bits / node.link.down_mbit for node in nodes),
        len(nodes) * bits / (trainer.up_mbit + ups),
    )


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that has begun."""

    published: Published
    nodes: list[Node]
    """The nodes that were there when it began, except those that left before they had the version."""
    trainer_bytes: int
    """Bytes that the trainer's sockets had sent before."""


def begin(world: World, payload_bytes: int) -> Begun:
    """Publish a version of about `payload_bytes`, in chunks and pieces of the sizes that the product would choose."""
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


def finish(
    world: World, begun: Begun, limit_s: float = 60.0, every_s: float = 0.05, report: Report = _silent
) -> "Step":
    """Advance the clock until every node that was there at the start and is still alive has the version; return how
    that went. A node that left after it had the version counts as one that stayed, since it took and relayed its copy.
    `report` is called with the megabytes received so far."""
    id_: VersionId = begun.published.id

    def there() -> list[Node]:
        return [node for node in begun.nodes if id_ in node.held_at or (node.alive and not node.frozen)]

    def all_have_it() -> bool:
        wanting = there()
        received = sum(node.received_bytes for node in wanting)
        report(received / 1e6, len(wanting) * begun.published.payload_bytes / 1e6)
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


def step(world: World, payload_bytes: int, limit_s: float = 60.0, report: Report = _silent) -> "Step":
    """Publish one version and wait until all nodes have it. `report` is as in `finish`."""
    return finish(world, begin(world, payload_bytes), limit_s, report=report)
