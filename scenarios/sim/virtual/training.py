"""A training run under the virtual clock: the product's ledger and its nodes' workers on the simulated swarm.

The product's own classes run: `Peer` and `Authority`, the ledger with its rules, book and service, and the nodes'
`NodeWorker`. Modelled are the network (`links`), processor time, engines (`ModelledEngine` only takes the time of one),
and a trainer that takes a step's groups, computes, and publishes.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

import trio

from node.engines.base import SamplingParams
from node.ledger.binding import Binding
from node.ledger.book import Book
from node.ledger.facts import Accepted, Discarded, Fact
from node.ledger.messages import SignedRollout, decode
from node.ledger.packing import pack_tokens
from node.ledger.rules import Ledger
from node.ledger.service import LedgerService
from node.ledger.session import WorkSession
from node.ledger.settings import Settings
from node.ledger.state import Group, Head
from node.member.pace import Pace
from node.member.worker import NodeWorker
from scenarios.sim.simulator import World
from scenarios.sim.virtual.broadcast import Broadcast, Star, Swarm
from scenarios.sim.virtual.compute import Run
from scenarios.sim.virtual.cpu import Costs
from scenarios.sim.virtual.engine import STOP, ModelledEngine, empty_patch
from scenarios.sim.virtual.flow import Link, Paths
from scenarios.sim.virtual.node import Node, root_of
from scenarios.sim.virtual.trio_time import VirtualTime, one_order, pass_time
from swarm.protocol.core.events import VersionId
from swarm.protocol.core.notices import LeaseExpired, MemberJoined, MemberLeft, Notice, WorkHeard
from swarm.protocol.core.tuning import Tuning

__all__ = ["Carrier", "Outcome", "Wan", "train"]

Carrier = Literal["swarm", "relayed", "regions", "star"]
"""How a version reaches the nodes. `swarm`: the delta, by the product's protocol. The others send full weights from the
trainer: one copy, which all nodes have as soon as it is sent (`relayed`); one to each region; one to each node. These
three are favoured: nothing is lost, no congestion window limits them, and they cost no processor time."""
SETTLE_S: Final = 20.0
"""After this time all nodes have joined the trees."""
DURABLE_S: Final = 0.001
"""How long one write of the ledger's book takes."""
FREE_MBIT: Final = 1e6
LIMIT_STEPS: Final = 100.0
"""A run is given up as stalled when its steps take this many times as long as on an unlimited network. Four full copies
of 14B at 0.25 Gbit/s take 68 times as long."""


@dataclass(frozen=True, slots=True)
class Wan:
    """The network between the trainer and the nodes.

    `mbit` is the rate of every uplink and downlink in Mbit/s; None means no limit and no delay. `round_trips_s` has the
    round trip from the trainer to each region; between two regions it is the sum of theirs."""

    mbit: float | None
    round_trips_s: tuple[float, ...] = (0.0,)
    within_s: float = 0.002
    loss: float = 0.0
    congestion: str = "reno"

    @property
    def regions(self) -> int:
        return len(self.round_trips_s)

    def paths(self) -> Paths:
        if self.mbit is None:
            return Paths(tuple((0.0,) * (self.regions + 1) for _ in range(self.regions + 1)))
        ways = (0.0, *(seconds / 2 for seconds in self.round_trips_s))
        one_way = tuple(
            tuple(0.0 if i == j == 0 else self.within_s / 2 if i == j else ways[i] + ways[j] for j in range(len(ways)))
            for i in range(len(ways))
        )
        return Paths(one_way, congestion=self.congestion)

    def link(self, region: int) -> Link:
        mbit = self.mbit or FREE_MBIT
        return Link(mbit, 0.0, mbit, region, 0.0 if self.mbit is None else self.loss)

    def easy(self) -> "Wan":
        """Return the same rates and delays without loss and congestion control."""
        return replace(self, loss=0.0, congestion="")


@dataclass(frozen=True, slots=True)
class Mark:
    """The counters at the moment in which a step's batch was complete. `drawn`, `wasted` and `busy_s` are totals over
    all nodes since the start."""

    at: float
    lag: int
    """The most versions that any token was behind the newest sealed version when the trainer got it."""
    lag_trained: int
    """How many versions the batch's oldest token is behind the weights that are trained with it."""
    drawn: int
    """Tokens."""
    wasted: int
    """Tokens of `drawn` that were cancelled, refused, or accepted but too old when their group was complete."""
    busy_s: float
    """Seconds in which engines generated."""
    reported_s: tuple[float, float]
    """The seconds in which the nodes generated, and all seconds, as they reported to the ledger."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run, over the steps that count."""

    tokens_s: float
    """Tokens generated and not wasted, per second. It is not computed from the batches: a batch takes the groups that
    are complete, so over few steps that measure is coarser."""
    wasted: float
    """Share of the generated tokens."""
    useful: float
    """Share of the nodes' time in which their engines generated."""
    useful_reported: float
    """The same share as `status` would show it, from what the nodes reported to the ledger."""
    step_s: float
    transfer_s: float
    """From a version's seal until the last node's replica is that version, on average."""
    longest_s: float
    sent_copies: float
    """Bytes that the trainer sent, as copies of a version's payload."""
    worst_lag: int
    """Versions behind the newest sealed version when the trainer got the group; `max_lag` bounds it."""
    worst_lag_trained: int
    """Versions behind the weights that were trained with the group; these may be newer than the newest sealed
    version."""
    steps: int


class _Record(Book):
    """The ledger's book, which also counts the tokens that were accepted and later discarded."""

    discarded_tokens = 0
    """Tokens."""

    def write(self, facts: Iterable[Fact]) -> None:
        facts = list(facts)
        for fact in facts:
            if isinstance(fact, Accepted):
                self._lengths[fact.group, fact.sample] = len(fact.done.rollout.token_ids) // 4
            elif isinstance(fact, Discarded):
                self.discarded_tokens += self._lengths[fact.group, fact.sample]
        super().write(facts)

    def __init__(self) -> None:
        super().__init__(Path(":memory:"))
        self._lengths: dict[tuple[bytes, int], int] = {}


class _SimulatedNode:
    """A simulated host with its engine and its worker."""

    def __init__(self, world: World, node: Node, run: Run) -> None:
        self.node = node
        self.engine = ModelledEngine(
            run.tokens_s,
            run.tokens,
            run.spread,
            run.stage_s,
            run.pause_s,
            node.root,
            continuous_batching=run.continuous_batching,
        )
        pace = Pace(capacity=2 * run.rows, batch=run.rows)

        async def send(body: bytes) -> None:
            world.send_heavy_work(node, world.swarm, body, _size_bytes(body, run))
            await trio.lowlevel.checkpoint()

        self.worker = NodeWorker(node.key, self.engine, send, pace)


class _Training:
    def __init__(self, run: Run, wan: Wan, carrier: Carrier, max_lag: int, seed: int) -> None:
        self.run, self.max_lag = run, max_lag
        self.free = wan.mbit is None
        easy = self.free or carrier != "swarm"
        wan = wan.easy() if easy else wan
        self.world = World(
            Tuning.wan(),
            seed=seed,
            authority_link=wan.link(0),
            paths=wan.paths(),
            job_s=run.job_s,
            costs=Costs(0.0, 0.0, 0.0, 0.0, 0.0) if easy else Costs(),
        )
        for i in range(run.nodes):
            region = 1 + i % wan.regions
            self.world.join(wan.link(region), held=self.world.base, region=f"region {region}")
        self.nodes = self.world.members()
        self.world.run(self.world.now + SETTLE_S)
        self.head = self.lag = 0
        self.sealed_at: dict[VersionId, float] = {}
        self.held_at: dict[VersionId, list[float]] = {}
        self.marks: list[Mark] = []
        self.payload = run.delta_bytes if carrier == "swarm" else run.full_bytes
        self.broadcast = self._broadcast(carrier, wan.regions)
        self._chance = random.Random(seed)
        self._unconfirmed: bytes | None = None
        """The group that the trainer got last and has not yet reported as taken."""

    def _broadcast(self, carrier: Carrier, regions: int) -> Broadcast:
        world, run = self.world, self.run
        if carrier == "swarm":
            # On an unlimited network the size does not matter, so a small payload saves simulating each piece.
            return Swarm(world, 1 << 16 if self.free else run.delta_bytes, run.extract_s, self._arrived)
        parties = {
            "relayed": [self.nodes],
            "regions": [self.nodes[i::regions] for i in range(min(regions, run.nodes))],
            "star": [[node] for node in self.nodes],
        }
        return Star(world, run.full_bytes, parties[carrier], self._arrived)

    # ------------------------------------------------------------ callbacks of the simulated swarm

    def _on_notice(self, node: Node, notice: Notice) -> None:
        if node is not self.world.authority:
            if isinstance(notice, WorkHeard):
                self.sim_nodes[node.key.public].worker.hear(notice.body)
            self.world.halt()
            return
        match notice:
            case WorkHeard(peer, body):
                self.service.hear(peer, body)
            case MemberJoined(peer):
                self.service.member_up(peer)
            case MemberLeft(peer) | LeaseExpired(_, peer):
                self.service.member_lost(peer)
            case _:
                return
        self.world.halt()

    def _arrived(self, node: Node, version: VersionId) -> None:
        self.held_at.setdefault(version, []).append(self.world.now)
        self.sim_nodes[node.key.public].worker.update((version.epoch, version.version), root_of(version), empty_patch())
        self.world.halt()

    def _seal(self, version: VersionId) -> None:
        self.head = version.version
        self.sealed_at[version] = self.world.now
        self.service.sealed(Head(*version, root_of(version)))
        self.world.halt()

    # ------------------------------------------------------------ the trainer

    async def run_for(self, steps: int) -> None:
        """Run this many steps."""
        world = self.world
        ledger = Ledger(Settings(max_lag=self.max_lag, check_share=0.0), Head(0, 0, root_of(VersionId(0, 0))))
        with contextlib.closing(_Record()) as self.book:
            self.service = LedgerService(ledger, self.book, self._send, off_loop=_durable)
            for node in self.nodes:
                self.service.member_up(node.key.public)
            self.sim_nodes = {node.key.public: _SimulatedNode(world, node, self.run) for node in self.nodes}
            world.on_notice = self._on_notice
            async with trio.open_nursery() as nursery:
                await nursery.start(self.service.run)
                for sim_node in self.sim_nodes.values():
                    await nursery.start(sim_node.worker.run)
                nursery.start_soon(self._train, steps)
                usual_s = self.run.tokens / self.run.tokens_s + self.run.train_s + self.run.extract_s
                limit_s = LIMIT_STEPS * usual_s * steps
                if not await pass_time(world, lambda: len(self.marks) > steps, limit_s):
                    raise TimeoutError(f"{len(self.marks)} of {steps + 1} steps in {limit_s:.0f} simulated seconds")
                nursery.cancel_scope.cancel()

    async def _send(self, peer: bytes, body: bytes) -> None:
        self.world.send_work(self.world.authority, peer, body)
        await trio.lowlevel.checkpoint()

    async def _train(self, steps: int) -> None:
        run = self.run
        sampling = SamplingParams(round(run.tokens * (1 + run.spread)), stop_tokens=(STOP,))
        session = self.service.open("run", Binding(run.group, sampling, self.max_lag), paced=True)
        async with trio.open_nursery() as nursery:
            if self.max_lag:
                nursery.start_soon(self._offer_for_ever, session)
            for step in range(steps + 1):
                if not self.max_lag:
                    self._offer(session, run.samples // run.group)
                groups = await self._batch(session)
                self.marks.append(self._mark(groups, step))
                await trio.sleep(run.train_s)
                version = VersionId(0, step + 1)
                self.service.begun((version.epoch, version.version))
                seal_s = self.broadcast.publish(version)
                self.world.at(self.world.now + seal_s, self._seal, version)
                if not self.max_lag:
                    await trio.sleep(seal_s + 2 * DURABLE_S)  # synchronous: no sample of the old version is asked for

    def _offer(self, session: WorkSession, count: int) -> None:
        for _ in range(count):
            prompt = pack_tokens(self._chance.choices(range(3, 30_000), k=self.run.prompt_tokens))
            self.service.offer(session, self._chance.randbytes(16), prompt)

    async def _offer_for_ever(self, session: WorkSession) -> None:
        """Offer as many prompts as the session allows."""
        while True:
            news = session.news
            self._offer(session, session.allowed - session.offered)
            await news.wait()

    async def _batch(self, session: WorkSession) -> list[Group]:
        """Return a step's groups; others wait for the next step. Like the trainer's iterator, it reports a group as
        taken when it asks for the next one."""
        groups: list[Group] = []
        while len(groups) < self.run.samples // self.run.group:
            news = session.news
            if self._unconfirmed is not None:
                self.service.taken(self._unconfirmed)
                self._unconfirmed = None
            if not session.groups:
                await news.wait()
                continue
            group = session.groups.popleft()
            self.lag = max(self.lag, self.head - _oldest(group))
            self._unconfirmed = group.id
            groups.append(group)
        return groups

    def _mark(self, groups: Iterable[Group], trained: int) -> Mark:
        sim_nodes = self.sim_nodes.values()
        oldest = min(map(_oldest, groups))
        return Mark(
            at=trio.current_time(),
            lag=self.lag,
            lag_trained=trained - oldest,
            drawn=sum(sim_node.engine.drawn for sim_node in sim_nodes),
            wasted=self.book.discarded_tokens + sum(sim_node.worker.lost_tokens for sim_node in sim_nodes),
            busy_s=sum(sim_node.engine.busy_s for sim_node in sim_nodes),
            reported_s=self._reported_s(),
        )

    def _reported_s(self) -> tuple[float, float]:
        splits = [node.seconds for node in self.service.status().nodes.values() if node.seconds is not None]
        return sum(split.generate for split in splits), sum(split.total for split in splits)


def _oldest(group: Group) -> int:
    return min(done.oldest[1] for done in group.done.values())


def _size_bytes(body: bytes, run: Run) -> int:
    """Return the size of a node's message if it had every token instead of one for `grain` tokens; each has an id and a
    log-probability."""
    more = 8 * run.tokens * (run.grain - 1) if isinstance(decode(body), SignedRollout) else 0
    return len(body) + more


async def _durable(action: Callable[..., Any], *args: Any) -> Any:
    await trio.sleep(DURABLE_S)
    return action(*args)


def train(
    run: Run, wan: Wan, carrier: Carrier = "swarm", *, steps: int = 6, warm: int = 3, max_lag: int = 1, seed: int = 0
) -> Outcome:
    """Run `warm` steps, then `steps` that count. Raises `TimeoutError` when the run stalls."""
    training = _Training(run, wan, carrier, max_lag, seed)
    before = training.broadcast.sent_bytes
    with one_order(seed):
        trio.run(training.run_for, warm + steps, clock=VirtualTime(training.world))
    first, last = training.marks[warm], training.marks[warm + steps]
    took, drawn, wasted = last.at - first.at, last.drawn - first.drawn, last.wasted - first.wasted
    counted = [v for v in training.sealed_at if len(training.held_at.get(v, ())) == run.nodes]
    late = [max(training.held_at[v]) - training.sealed_at[v] for v in counted]
    return Outcome(
        tokens_s=run.grain * (drawn - wasted) / took,
        wasted=wasted / drawn,
        useful=(last.busy_s - first.busy_s) / (took * run.nodes),
        useful_reported=(last.reported_s[0] - first.reported_s[0]) / (last.reported_s[1] - first.reported_s[1]),
        step_s=took / steps,
        transfer_s=fmean(late) if late else math.inf,
        longest_s=max(late, default=math.inf),
        sent_copies=(training.broadcast.sent_bytes - before) / (len(training.marks) - 1) / training.payload,
        worst_lag=max(mark.lag for mark in training.marks[warm:]),
        worst_lag_trained=max(mark.lag_trained for mark in training.marks[warm:]),
        steps=steps,
    )
