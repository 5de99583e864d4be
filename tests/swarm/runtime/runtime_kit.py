"""A swarm in one process: the product's cores, runtimes and stores over the memory transport, on a mock clock."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio
from msgspec import structs

from codec import BlockDelta, FileSpec, Key, Layout, Manifest, Replica, StagedChunk, TensorSpec
from codec.chunk import CODER_RICE
from codec.parts import BASE, Part
from codec.shards import Parallel, Shard, block_ranks
from codec.staging import block_hash, encode
from swarm.protocol.authority import Authority
from swarm.protocol.core.documents import AuthorityTime, Capability
from swarm.protocol.core.events import VersionId
from swarm.protocol.core.notices import Notice
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import Join
from swarm.protocol.member import Peer
from swarm.protocol.startup import Boot, Budget, Saved, SavedReplica, Site
from swarm.protocol.transfer.egress import Egress
from swarm.runtime import Manifests, RunSync, Runtime, RuntimeLimits
from swarm.runtime.publishing import Attempt, SeedPublisher, genesis
from swarm.runtime.replica.holding import Holding
from swarm.runtime.replica.model import Model
from swarm.runtime.services import ReplicaServices
from swarm.runtime.sessions.blob_service import cost_of, model_bytes
from swarm.store import Disk, Seal, Store
from swarm.transport.memory import MemoryNetwork, MemoryTransport

AUTHORITY = Key(b"authority".ljust(32, b"."))
CONFIG = b'{"model_type": "tiny"}'
LAYOUT_TENSORS = (("a.weight", (300, 200)), ("b.weight", (70_000,)), ("c.bias", (10,)))


async def here_and_now(function: Callable[..., Any], *arguments: Any) -> Any:
    """A `RunSync` that calls `function` on the event loop: a mock clock would run ahead of any thread."""
    await trio.lowlevel.checkpoint()
    return function(*arguments)


class Killed(BaseException):
    """Stands for the end of the process."""


def key(number: int) -> Key:
    return Key(bytes([number]) * 32)


def layout() -> Layout:
    from blake3 import blake3

    tensors = tuple(TensorSpec(name, "BF16", shape) for name, shape in LAYOUT_TENSORS)
    return Layout(tensors, (FileSpec("config.json", len(CONFIG), blake3(CONFIG).digest()),))


def new_replica(seed: int = 0) -> Replica:
    """A model of random weights near 0.02, hashed."""
    replica = Replica.create(layout())
    rng = np.random.default_rng(seed)
    for block in range(replica.layout.n_blocks):
        size = replica.layout.block(block).count
        bits = (rng.normal(0, 0.02, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        replica.write_block(block, bits.tobytes(), block_hash(bits))
    return replica


def step(replica: Replica, seed: int, density: float = 0.01) -> list[BlockDelta]:
    """The deltas of a training step: some elements change by one unit in the last place."""
    rng = np.random.default_rng(seed)
    deltas = []
    for block in range(replica.layout.n_blocks):
        old = replica.block(block)
        new = old.copy()
        where = rng.random(old.size) < density
        new[where] ^= 1
        delta = encode(block, old, new, replica.layout.block(block).dtype, CODER_RICE)
        if delta is not None:
            deltas.append(delta)
    return deltas


@dataclass
class Log:
    """An application that records its notices."""

    commits: list[tuple[VersionId, Manifest, tuple[StagedChunk, ...] | None]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def committed(self, version: VersionId, manifest: Manifest, changes: tuple[StagedChunk, ...] | None) -> None:
        self.commits.append((version, manifest, changes))

    def notify(self, notice: Notice) -> None:
        self.events.append((notice.log_name, notice.log_fields()))

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


@dataclass
class Host:
    """One running member, or the seed."""

    runtime: Runtime
    core: Any
    store: Store
    model: Model | None
    transport: MemoryTransport
    log: Log
    scope: trio.CancelScope
    seed: SeedPublisher | None = None
    stopped: trio.Event = field(default_factory=trio.Event)

    @property
    def root(self) -> bytes:
        assert self.model is not None
        assert self.model.replica is not None
        return self.model.replica.root


class Sink(SeedPublisher):
    """The sink of a publisher without a coordinator, which would log the trainer's step."""

    async def open_attempt(
        self, back_to: Seal | None = None, trainer_step: int | None = None, part: Part = BASE
    ) -> Attempt:
        return await super().open_attempt(back_to)

    async def seal(self, manifest: Manifest, parts: frozenset[Part]) -> bytes:
        return await super().seal(manifest)


class Swarm:
    """A seed and members. `tuning` and `limits` apply to all of them."""

    def __init__(
        self,
        folder: Path,
        nursery: trio.Nursery,
        tuning: Tuning | None = None,
        limits: RuntimeLimits | None = None,
        run_sync: RunSync = here_and_now,
        via: tuple[str, ...] = (),
        copies: float | None = None,
        shards: int = 0,
    ) -> None:
        """`via`: the seed cannot be dialed and has reservations at these relays. `copies`: the cap on what it sends.
        `shards`: over how many ranks it deals experts."""
        self.shards = shards
        self.folder = folder
        self.nursery = nursery
        self.network = MemoryNetwork()
        self.tuning = tuning or replace(Tuning.loopback(), stripes=2)
        self.limits = limits or RuntimeLimits(checkpoint_every=4)
        self.run_sync = run_sync
        self.via = via
        self.copies = copies
        if via:
            self.network.shield(AUTHORITY.public)
        self.seed_host: Host | None = None
        self.boot = 0

    @property
    def authority(self) -> Host:
        assert self.seed_host is not None
        return self.seed_host

    async def start_seed(self, disk: Disk | None = None) -> Host:
        store = Store(self.folder / "seed", AUTHORITY.public, disk, checkpoints_kept=2)  # as the coordinator does
        model = Model(store, stage_bytes=self.limits.stage_bytes)
        restored = model.restore()
        if restored is None:
            restored = genesis(store, model, new_replica(), AUTHORITY, files={"config.json": CONFIG})
        self.boot += 1
        transport = MemoryTransport(self.network, AUTHORITY, self.via)
        transport.address = "/memory/seed"  # a seed restarts at the same address
        addrs = tuple(transport.circuits()) or (transport.address,)
        now = trio.current_time()
        core = Authority(
            AUTHORITY, self.tuning, random.Random(0), Boot(self.boot, clock=lambda local: local),
            Saved(restored.manifest, [record for record in store.records.all("grant/").values() if record]),
            Site(addrs, shards=self.shards),
            Budget(Egress(self.copies, model_bytes(layout())), partial(cost_of, layout())), now=now,
        )  # fmt: skip
        host = await self._start(core, transport, store, model)
        manifests = host.runtime.manifests
        jobs = host.runtime._jobs
        assert jobs is not None
        host.seed = Sink(AUTHORITY, host.runtime, store, jobs, manifests, self.run_sync)
        self.seed_host = host
        return host

    async def start_member(
        self,
        number: int,
        *,
        base: Path | None = None,
        relay: bool = False,
        disk: Disk | None = None,
        shard: Shard | None = None,
    ) -> Host:
        store = Store(self.folder / f"member{number}", AUTHORITY.public, disk)
        model = None if relay else Model(store, base=base, stage_bytes=self.limits.stage_bytes, holding=Holding(shard))
        restored = None if model is None else model.restore()
        transport = MemoryTransport(self.network, key(number))
        core_authority = self.authority.core
        capability = core_authority.invite(
            Capability(AUTHORITY.public, bytes([number]) * 16, AuthorityTime(1e12), 1, 0)
        )
        layout = None if restored is None or model is None or model.layout is None else model.layout.hash
        join = Join(capability, (transport.address,), f"n{number}", "here", 100.0, 100.0, relay)
        if shard is not None:
            join = structs.replace(join, shards=shard.shards, ranks=shard.ranks)
        core = Peer(
            key(number), AUTHORITY.public, core_authority.addrs, join, self.tuning, random.Random(number),
            SavedReplica(None if restored is None else restored.manifest, layout),
        )  # fmt: skip
        return await self._start(core, transport, store, model)

    async def _start(self, core: Any, transport: MemoryTransport, store: Store, model: Model | None) -> Host:
        manifests = Manifests(AUTHORITY.public)
        for seal in store.records.seals():
            manifests.note(seal.manifest)
        log = Log()
        services = None
        if model is not None:
            services = ReplicaServices.build(store, model, manifests, self.limits, self.run_sync)
        runtime = Runtime(
            core, transport, store, manifests, log, services=services, limits=self.limits, run_sync=self.run_sync
        )
        host = Host(runtime, core, store, model, transport, log, trio.CancelScope())
        await self.nursery.start(self._live, host)
        return host

    async def _live(self, host: Host, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            with host.scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(host.runtime.run)
                    await host.runtime.post_stored_chunks()
                    task_status.started()
        except* Killed:
            pass
        finally:
            host.store.close()
            host.stopped.set()

    async def stop(self, host: Host) -> None:
        """Stop as SIGKILL would, except that the store's files are closed."""
        host.scope.cancel()
        await host.stopped.wait()

    async def publish(self, number: int, density: float = 0.01) -> bytes:
        """Publish one training step with the product's own publisher. Returns the new root."""
        from node.coordinator.publisher import Publisher

        seed = self.authority.seed
        assert seed is not None
        classes = block_ranks(seed.replica.layout, self.shards, Parallel.EXPERT) if self.shards else None
        publisher = Publisher(seed, classes)
        await publisher.begin()
        deltas = step(seed.replica, number, density)
        await publisher.add(deltas)
        assert publisher._open is not None
        sealed = await publisher.end(sum(1 for _ in deltas), publisher._open.part_root())
        return sealed.root


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Let the virtual clock run until `condition()` is true."""
    with trio.fail_after(limit_s):
        while not condition():  # noqa: ASYNC110 - no event announces the change
            await trio.sleep(0.05)


@asynccontextmanager
async def swarm(folder: Path, **options: Any) -> AsyncIterator[Swarm]:
    """A running seed; everything stops at the end."""
    async with trio.open_nursery() as nursery:
        started = Swarm(folder, nursery, **options)
        await started.start_seed()
        yield started
        nursery.cancel_scope.cancel()
