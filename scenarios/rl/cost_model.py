"""What a step of a training run costs, by the way that its versions travel: pure arithmetic on bytes, rates and prices.

Every machine pays for what it sends and receives. All ways are taken at their best: no loss, no round trips, every link
busy while there is something to send, and a relay passes bytes on as they come.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np

from codec.sign import Key
from node.ledger.messages import Rollout, VersionSpan, seal_rollout
from node.tools.distribution import GB, swarm_seconds
from node.tools.prices import PriceList, Store
from scenarios.sim.virtual.compute import Compute

__all__ = ["WAYS", "Bill", "Links", "Preset", "Prices", "Traffic", "bill", "cheapest", "crossing", "preset_of"]

TOKEN_BYTES: Final = 4
"""A token id of a prompt."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A published run. `tokens_s`: of all nodes together, if none ever waits. `step_s`: how long they then generate for
    a step. `usd_hour`: all GPUs. `delta_bytes`: a version's delta as published; `swarm_bytes`: as we code it."""

    name: str
    nodes: int
    tokens_s: float
    step_s: float
    samples: int
    prompt_tokens: int
    usd_hour: float
    full_bytes: float
    delta_bytes: float
    swarm_bytes: float
    equal_tokens_s: float | None = None
    """Tokens a second when each node gets the same number of samples, where nodes are unequal."""

    @property
    def tokens_step(self) -> float:
        return self.tokens_s * self.step_s

    def of_nodes(self, nodes: int) -> "Preset":
        """The run with another number of nodes, and trainer, samples and dollars an hour in proportion."""
        times = nodes / self.nodes
        return replace(
            self,
            nodes=nodes,
            tokens_s=self.tokens_s * times,
            samples=round(self.samples * times),
            usd_hour=self.usd_hour * times,
        )


def preset_of(compute: Compute, model: str, bits_changed: float | None = None) -> Preset:
    """A model of the input file. `bits_changed`: of our codec, instead of the file's. Raises `UsageError`."""
    run = compute.run(model)
    figures = compute.models[model]
    bits = compute.codec["bits_changed"] if bits_changed is None else bits_changed
    return Preset(
        name=run.name,
        nodes=run.nodes,
        tokens_s=run.ideal_tokens_s,
        step_s=run.samples * run.tokens * run.grain / run.ideal_tokens_s,
        samples=run.samples,
        prompt_tokens=run.prompt_tokens,
        usd_hour=figures["usd_hour"],
        full_bytes=figures["full_bytes"],
        delta_bytes=figures["delta_bytes"],
        swarm_bytes=figures["params"] * figures["density"] * bits / 8,
        equal_tokens_s=figures.get("equal_shares_tokens_s"),
    )


@dataclass(frozen=True, slots=True)
class Links:
    """`bytes_s`: of every machine's link, each way. `regions`: equal ones, the trainer in none of them.
    `border_copies`: copies of a version that enter a region in a swarm, if that many nodes are in it."""

    bytes_s: float
    regions: int
    border_copies: float
    joins_hour: float = 0.0
    object_bytes: float = 64 << 20
    poll_s: float = 1.0
    full_every: int = 25


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and requests of one step, of all machines of a kind together.

    `trainer_sent`: to nodes. `stored`: to an object store. `node_far`, `node_near`: from node to node, in another
    region or in the same. `seconds`: how long the version is on its way.
    """

    seconds: float = 0.0
    trainer_sent: float = 0.0
    stored: float = 0.0
    store_read: float = 0.0
    node_far: float = 0.0
    node_near: float = 0.0
    puts: float = 0.0
    gets: float = 0.0


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars a GB. Between trainer and nodes each end has its own price. Between nodes it is one for both ends:
    `far_usd_gb` to another region, `near_usd_gb` within one.

    `store_usd_gb`: what the trainer pays to write to an object store. `store_read_usd_gb`: what the store charges.
    `ingress_usd_gb`, `store_ingress_usd_gb`: what a node pays to receive from the trainer, and from a store.
    """

    trainer_usd_gb: float
    trainer_ingress_usd_gb: float
    node_usd_gb: float
    ingress_usd_gb: float
    far_usd_gb: float
    near_usd_gb: float
    store_usd_gb: float = 0.0
    store_read_usd_gb: float = 0.0
    store_ingress_usd_gb: float = 0.0

    @classmethod
    def of(cls, prices: PriceList, trainer: str, nodes: str, store: Store | None = None) -> "Prices":
        """By the names of the providers. Bytes that stay with one cost what it charges between its regions."""
        sender, receiver, inside = prices.provider(trainer), prices.provider(nodes), trainer == nodes
        regional = receiver.regional_usd_gb.usd
        found = cls(
            trainer_usd_gb=regional if inside else sender.egress_usd_gb.usd,
            trainer_ingress_usd_gb=0.0 if inside else sender.ingress_usd_gb.usd,
            node_usd_gb=regional if inside else receiver.egress_usd_gb.usd,
            ingress_usd_gb=0.0 if inside else receiver.ingress_usd_gb.usd,
            far_usd_gb=regional,
            near_usd_gb=receiver.near_usd_gb.usd,
        )
        if store is None:
            return found
        reads_inside = store.provider == nodes
        return replace(
            found,
            store_usd_gb=0.0 if store.provider == trainer else sender.egress_usd_gb.usd,
            store_read_usd_gb=regional if reads_inside else store.egress_usd_gb.usd,
            store_ingress_usd_gb=0.0 if reads_inside else receiver.ingress_usd_gb.usd,
        )

    @classmethod
    def flat(cls, trainer_usd_gb: float, node_usd_gb: float, store: Store | None = None) -> "Prices":
        """Each byte that a node sends costs this, near or far, and receiving costs nothing."""
        read = 0.0 if store is None else store.egress_usd_gb.usd
        return cls(trainer_usd_gb, 0.0, node_usd_gb, 0.0, node_usd_gb, node_usd_gb, trainer_usd_gb, read)


# ---------------------------------------------------------------- the ways of a version


def _star(preset: Preset, nbytes: float, links: Links, joined_bytes: float) -> Traffic:
    """The trainer sends a copy to each node."""
    copies = preset.nodes * nbytes
    return Traffic(seconds=copies / links.bytes_s, trainer_sent=copies + joined_bytes)


def _star_full(preset: Preset, nbytes: float, links: Links, joined_bytes: float) -> Traffic:
    return _star(preset, preset.full_bytes, links, joined_bytes)


def _relays(preset: Preset, nbytes: float, links: Links, joined_bytes: float) -> Traffic:
    """The trainer sends a copy to one node of each region, which passes it on to the others of its region."""
    regions = min(links.regions, preset.nodes)
    fan_out = -(-preset.nodes // regions) - 1
    return Traffic(
        seconds=max(regions, fan_out) * nbytes / links.bytes_s,
        trainer_sent=regions * nbytes + joined_bytes,
        node_near=(preset.nodes - regions) * nbytes,
    )


def _store(preset: Preset, nbytes: float, links: Links, joined_bytes: float) -> Traffic:
    """The trainer writes one copy to an object store, and each node reads it from there; a node reads an object as soon
    as it is complete. For machines that join, some versions are stored in full as well."""
    full_bytes = preset.full_bytes / links.full_every if joined_bytes else 0.0
    objects = -(-nbytes // links.object_bytes)
    return Traffic(
        seconds=(nbytes + min(nbytes, links.object_bytes)) / links.bytes_s,
        stored=nbytes + full_bytes,
        store_read=preset.nodes * nbytes + joined_bytes,
        puts=objects + 1 + full_bytes / links.object_bytes,
        gets=preset.nodes * (objects + preset.step_s / links.poll_s) + joined_bytes / links.object_bytes,
    )


def _swarm(preset: Preset, nbytes: float, links: Links, joined_bytes: float) -> Traffic:
    """The trainer sends one copy in all; nodes send the others, and the model to machines that join."""
    nodes = preset.nodes
    entering = 1.0 if links.regions == 1 else min(float(nodes), links.regions * links.border_copies)
    return Traffic(
        seconds=swarm_seconds(nbytes, nodes, links.bytes_s, links.bytes_s),
        trainer_sent=nbytes,
        node_far=(entering - 1) * nbytes + joined_bytes,
        node_near=(nodes - entering) * nbytes,
    )


WAYS: Final[dict[str, Callable[[Preset, float, Links, float], Traffic]]] = {
    "star-full": _star_full,
    "star": _star,
    "relays": _relays,
    "store-free": _store,
    "store-paid": _store,
    "swarm": _swarm,
}
"""Name -> traffic of (preset, bytes of a delta, links, bytes of full copies to machines that joined in this step)."""


# ---------------------------------------------------------------- rollouts


@cache
def _rollout_bytes(tokens: int) -> int:
    """Bytes of a signed rollout of this length, whose tokens are of two versions."""
    spans = (VersionSpan(0, 1, bytes(32), tokens // 2), VersionSpan(0, 2, bytes(32), tokens))
    packed = np.zeros(tokens, np.uint32).tobytes()
    return len(seal_rollout(Key(bytes(32)), Rollout(1 << 40, 1 << 40, 1, bytes(32), packed, packed, "stop", spans)))


def _work(preset: Preset) -> tuple[float, float]:
    """(bytes that the trainer sends, bytes that the nodes send) for a step's prompts and rollouts, whatever the way."""
    tokens = round(preset.tokens_step / preset.samples)
    return preset.samples * preset.prompt_tokens * TOKEN_BYTES, float(preset.samples * _rollout_bytes(tokens))


# ---------------------------------------------------------------- dollars


@dataclass(frozen=True, slots=True)
class Bill:
    """One step. `share`: tokens/s as a share of those without any network. `machine_usd`: GPUs, waiting included."""

    way: str
    share: float
    seconds: float
    machine_usd: float
    trainer_usd: float
    node_usd: float
    store_usd: float
    tokens_usd: float

    @property
    def usd(self) -> float:
        return self.machine_usd + self.trainer_usd + self.node_usd + self.store_usd


def bill(
    preset: Preset, way: str, links: Links, prices: Prices, store: Store | None = None, nbytes: float | None = None
) -> Bill:
    """What a step costs. `store`: the object store, for the ways that use one. `nbytes`: of a delta; without it, the
    swarm has its own and the other ways have the published one.

    One step ahead, a version that arrives within a step costs no time. One that takes longer is what the step takes.
    """
    sent = nbytes if nbytes is not None else preset.swarm_bytes if way == "swarm" else preset.delta_bytes
    joined_bytes = links.joins_hour * preset.step_s / 3600 * preset.full_bytes
    traffic = WAYS[way](preset, sent, links, joined_bytes)
    step_s = max(preset.step_s, traffic.seconds)
    prompts, rollouts = _work(preset)
    trainer_gb, rollouts_gb, prompts_gb = traffic.trainer_sent / GB, rollouts / GB, prompts / GB
    trainer_usd = (trainer_gb + prompts_gb) * prices.trainer_usd_gb + rollouts_gb * prices.trainer_ingress_usd_gb
    trainer_usd += traffic.stored / GB * prices.store_usd_gb
    node_usd = rollouts_gb * prices.node_usd_gb
    node_usd += (traffic.node_far * prices.far_usd_gb + traffic.node_near * prices.near_usd_gb) / GB
    node_usd += traffic.store_read / GB * prices.store_ingress_usd_gb
    node_usd += (trainer_gb + prompts_gb) * prices.ingress_usd_gb
    store_usd = 0.0
    if traffic.store_read:
        assert store is not None
        store_usd = traffic.store_read / GB * prices.store_read_usd_gb
        store_usd += (traffic.puts * store.put_usd_million.usd + traffic.gets * store.get_usd_million.usd) / 1e6
    machine_usd = preset.usd_hour / 3600 * step_s
    total = machine_usd + trainer_usd + node_usd + store_usd
    return Bill(
        way=way,
        share=preset.step_s / step_s,
        seconds=traffic.seconds,
        machine_usd=machine_usd,
        trainer_usd=trainer_usd,
        node_usd=node_usd,
        store_usd=store_usd,
        tokens_usd=preset.tokens_step / total,
    )


def cheapest(bills: Sequence[Bill]) -> Bill:
    """The bill with the most tokens a dollar; of equal ones the first."""
    return max(bills, key=lambda each: each.tokens_usd)


def crossing(difference: Callable[[float], float], most: float) -> float | None:
    """The price from 0 to `most` at which `difference` (a linear function of the price) changes its sign; None if it
    does not."""
    at_zero, at_most = difference(0.0), difference(most)
    if at_zero == at_most or (at_zero > 0) == (at_most > 0):
        return None
    return most * at_zero / (at_zero - at_most)
