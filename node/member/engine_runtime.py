"""The engine, its processes and its worker on one node, from start to end.

replica committed --> changes of the base --> patch (memfd) --> worker: staged while the engine generates, committed
                                                                        between two batches
replica changed otherwise (catch-up, repair) --> the engine is reloaded from it
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import structlog
import trio

from codec import Layout, StagedChunk, write_patch
from codec.adapter import AdapterSlots
from codec.formats.share import FormatShare
from codec.parts import Kind, base_layout
from codec.sign import Key
from node.engines.device_plan import DevicePlan
from node.engines.devices import machine_of, needs_of_layout, needs_the_model, plan_of
from node.engines.group import EngineGroup, GroupedEngine
from node.engines.host import EngineDeadlines, EngineHost, EngineLost, EngineSpec, worker_command
from node.engines.replica_ref import ReplicaRef
from node.engines.server_specs import ServerSpec, specs_of
from node.host.last_line import last_line
from node.member.changed_parts import ChangedParts
from node.member.draft import NodeDraft
from node.member.engine_memory import EngineMemory
from node.member.engine_sleep import EngineSleep
from node.member.engine_states import engine_status
from node.member.format_engine import FormatEngine
from node.member.milestones import Look
from node.member.slot_bits import SlotBits
from node.member.worker import NodeWorker
from node.rewards.host import RewardHost, RewardLimits
from node.settings.addresses import duration_s
from node.settings.config import JoinConfig
from node.settings.engine_choice import SERVER_ENGINES
from node.status.schema import EngineCommit, OwnStatus
from swarm.protocol.core.events import VersionId
from swarm.runtime import in_thread
from swarm.runtime.replica.dequantised import DequantisedReplica
from swarm.runtime.replica.model import Model
from swarm.store import Store

__all__ = ["EngineRuntime"]

_log = structlog.get_logger(__name__)
_LOG: Final = "engine.log"
_FILES: Final = "model-files"
_SAYS_CHARS: Final = 160
"""Of the engine's last words in a line of the node's log."""
_VLLM_COMMIT_S: Final = 300.0
"""Deadline of a commit in vLLM; engine processes of our own have that of `EngineDeadlines`."""
_LEND_AGAIN_S: Final = 0.1
"""Interval at which a replica that is catching up is asked again for its bits."""

Changes = Sequence[StagedChunk] | None
"""What was written into the replica since its last version; None: not known, so the engine has to be reloaded."""


class _Commit(NamedTuple):
    """The replica became `version`."""

    version: VersionId
    root: bytes
    changes: Changes


class _Proof(NamedTuple):
    """What was read back out of the engines."""

    root: bytes
    """Empty: they hold different bits."""
    is_right: bool
    """It is the root of the version that they generate with."""


class EngineRuntime:
    """One node's engines and their worker. `send(body)` hands a `Work` body to the authority and may lose it."""

    def __init__(self, config: JoinConfig, key: Key, store: Store, model: Model, send: Callable[[bytes], None]) -> None:
        self._config, self._store, self._model = config, store, model
        self._send_body = send
        self._has_version = trio.Event()
        """The replica is a version, so an engine can be loaded from it."""
        self._commits: deque[_Commit] = deque()
        self._committed = trio.Event()
        """`_commits` has grown; replaced when it was read."""
        share = config.held_shard
        form = share.name if isinstance(share, FormatShare) else ""
        packed = config.engine_holds == "format"
        self.host = EngineGroup((), f"{form}-packed" if packed else form)
        """The engines; none before `run` has planned their devices."""
        bits = DequantisedReplica(model, store, form, packed=packed) if form else None
        self._format = None if bits is None else FormatEngine(self.host, bits)
        """What the engines are filled from, if the node holds a format."""
        self._memory = EngineMemory(self.host, model) if config.replica == "engine" else None
        """The engines' memory, where it is the replica."""
        limits = RewardLimits(duration_s(config.reward_within), config.reward_memory_mb)
        self._rewards = RewardHost(config.reward, config.home / _FILES, limits)
        self.worker = NodeWorker(key, self.host, self._send, rewards=self._rewards)
        self._proof: _Proof | None = None
        self._parts: ChangedParts | None = None
        """Divides the changes of versions; None: it has to begin with a version whose hashes are known."""
        self._slots: SlotBits | None = None
        self._draft = NodeDraft(config, store, model)
        self.sleep = EngineSleep(self.host, self.worker, self._note_restored, runs_apart=bool(config.engine_url))

    @property
    def urls(self) -> tuple[str, ...]:
        """OpenAI endpoints of the engines; empty for engines of this environment."""
        return tuple(engine.url for engine in self.host.engines if engine.url)

    async def _planned(self) -> list[GroupedEngine]:
        """The engines that this machine has devices for. Waits for the model where its size decides that.

        Raises `UsageError`, with a sentence, when the model has no room, or the flags ask for what is impossible.
        """
        config = self._config
        if config.engine_url:
            return [self._server(spec, number) for number, spec in enumerate(specs_of(config), 1)]
        machine = await in_thread(machine_of, config)
        needs = None
        if needs_the_model(config, machine):
            await self._has_version.wait()
            layout = self._model.layout
            assert layout is not None
            needs = await in_thread(
                partial(needs_of_layout, config, layout, self._store.file, drafted=self._draft.loaded(layout))
            )
        plan = plan_of(config, machine, needs)
        if machine.gpus or len(plan.shares) > 1:
            _log.info("engines_planned", plan=str(plan))
        if config.engine not in SERVER_ENGINES:
            return [self._own(plan, i) for i in range(len(plan.shares))]
        specs = specs_of(config, plan)
        return [self._server(spec, number, plan.shares[number - 1].gpus) for number, spec in enumerate(specs, 1)]

    def _server(self, spec: ServerSpec, number: int, gpus: tuple[str, ...] = ()) -> GroupedEngine:
        """An engine that is an inference server."""
        host = EngineHost(spec, self._lend_replica, EngineDeadlines(commit_s=_VLLM_COMMIT_S))
        return GroupedEngine(host, number, spec.url, gpus)

    def _own(self, plan: DevicePlan, i: int) -> GroupedEngine:
        """An engine in a process of this very environment."""
        config, share = self._config, plan.shares[i]
        several = len(plan.shares) > 1
        device = None if config.device == "auto" else config.device
        if several and share.gpus:
            device = f"cuda:{i}"  # torch counts the visible ones, in the order of the plan
        threads = config.threads
        if several:
            threads = max(1, (len(share.cores) if threads is None else threads // len(plan.shares)))
        suffix = str(i + 1) if i else ""
        socket, log = (config.home / f"engine{suffix}.{kind}" for kind in ("sock", "log"))
        command = worker_command(socket, config.engine, threads, device)
        return GroupedEngine(EngineHost(EngineSpec(socket, command, log), self._lend_replica), i + 1, "", share.gpus)

    async def run(self) -> None:
        """Runs until cancelled. Raises `UsageError` when the engine cannot be started or refuses the model."""
        if self._model.version is not None:
            self._has_version.set()
            self._note_restored()
        engines = await self._planned()
        self.host.use(engines)
        self.worker.batch.engines = len(engines)
        self._draft.urls = self.urls
        async with trio.open_nursery() as nursery:
            await nursery.start(self._rewards.run)
            await nursery.start(self.host.run)
            nursery.start_soon(self._follow_replica)
            nursery.start_soon(self._draft.run)
            if self._memory is not None:
                nursery.start_soon(self._memory.run)
            if self._format is not None:
                nursery.start_soon(self._format.run)
            await nursery.start(self.worker.run)
            await trio.sleep_forever()

    def _note_restored(self) -> None:
        """The engines are started on a replica that is a version already: its adapters are to be given to them."""
        replica, version = self._model.replica, self._model.version
        if replica is None or version is None:
            return
        if replica.layout.base_blocks < replica.layout.n_blocks:
            self.committed(version, replica.root, None)

    # ------------------------------------------------------------ from the swarm

    def committed(self, version: VersionId, root: bytes, changes: Changes) -> None:
        """The replica became `version`."""
        self._commits.append(_Commit(version, root, changes))
        self._has_version.set()
        self._committed.set()

    async def _follow_replica(self) -> None:
        """Hand each commit to the worker as a patch, in order; reload the engine where the changes are not known."""
        while True:
            await self._committed.wait()
            self._committed = trio.Event()
            while self._commits:
                commit = self._commits.popleft()
                layout = self._model.layout
                assert layout is not None
                if self.sleep.asleep:  # the engines are filled from the replica when they wake
                    self._parts = None
                elif self._format is not None:
                    await self._follow_format(self._format, commit)
                elif layout.base_blocks < layout.n_blocks:
                    await self._follow_parts(commit, layout)
                elif commit.changes is None:
                    await self._reload(commit.version)
                else:
                    descriptor, _ = await in_thread(write_patch, commit.changes, layout)
                    self.worker.update(commit.version, commit.root, descriptor)

    async def _follow_format(self, engine: FormatEngine, commit: _Commit) -> None:
        """As `_follow_replica`, where the engine has the base that a format's codes stand for."""
        version, root, changes = commit
        found = None if changes is None else await engine.patch(version, changes)
        if found is None:
            await self._reload(version)
            return
        descriptor, base_root = found
        self.worker.update(version, root, descriptor, base_root=base_root)

    async def _follow_parts(self, commit: _Commit, layout: Layout) -> None:
        """As `_follow_replica`, where the model has other parts than the base: the engine gets a patch of the base if
        that changed, and a copy of each adapter's slot that changed."""
        version, root, changes = commit
        if changes is None or self._parts is None:  # begin with a version whose hashes are known
            hashes = await in_thread(self._model.hashes_at, version)
            drafted = self._draft.loaded(layout)
            self._parts = None if hashes is None else ChangedParts(layout, hashes, drafted=drafted)
            await self._reload(version)
            if self._parts is None:
                return  # the replica has gone on to a later version, which follows
            divided = self._parts.everything()
        else:
            divided = self._parts.divide(changes)
            self._draft.note(divided.parts)
        if self._slots is None:
            self._slots = SlotBits(layout)
        slots = sorted(part.slot for part in divided.parts if part.kind is Kind.ADAPTER)
        copy = partial(self._slots.copy, slots=slots, hashes=divided.hashes)
        copies = await in_thread(self._model.read, copy) if slots else []
        descriptor = None
        if divided.base:
            descriptor, _ = await in_thread(write_patch, divided.base, layout)
        change = self._slots.change(divided.parts, copies or [])
        self.worker.update(version, root, descriptor, change, divided.base_root, copies or [])

    async def _reload(self, version: VersionId) -> None:
        try:
            await self.host.reload(version)  # an engine that is not ready is loaded with what the replica is then
        except EngineLost as error:
            _log.warning("engine_lost", why=str(error))

    async def _lend_replica(self) -> ReplicaRef:
        """The bits and files to load an engine from, as they are now. Waits until the replica is a version."""
        await self._has_version.wait()
        folder = await in_thread(self._write_files)
        memory = self._memory
        layout = self._model.layout
        assert layout is not None
        draft = await in_thread(self._draft.folder, layout)
        lend = partial(in_thread, partial(self._model.lend, drafted=draft is not None))
        lend = lend if memory is None else memory.lend
        lend = lend if self._format is None else self._format.lend
        while (loan := await lend()) is None:  # noqa: ASYNC110 - a catch-up tells nobody its end
            await trio.sleep(_LEND_AGAIN_S)
        if self._format is not None:
            await self._format.write_files(folder)
        self.worker.know(loan.version, loan.swarm_root)
        window_fd = None if memory is None else memory.window_fd
        slots = None if self._format is not None else AdapterSlots.of(layout)
        return ReplicaRef(loan.layout, loan.fd, folder, loan.version, loan.root, window_fd, slots, draft)

    def _write_files(self) -> Path:
        """Write config, tokenizer and the like, as the layout names them, into a folder that an engine can load."""
        folder = self._config.home / _FILES
        folder.mkdir(parents=True, exist_ok=True)
        assert self._model.layout is not None
        for spec in base_layout(self._model.layout).files:
            data = self._store.file(spec.hash)
            if data is not None:
                (folder / spec.name).write_bytes(data)
        return folder

    async def _send(self, body: bytes) -> None:
        self._send_body(body)
        await trio.lowlevel.checkpoint()

    # ------------------------------------------------------------ for reports and people

    @property
    def engine_name(self) -> str:
        """The kind of engine while one is ready; empty until then."""
        return self._config.engine if self.host.ready else ""

    @property
    def engine_version(self) -> VersionId:
        return VersionId(*self.host.version)

    def look_at(self, look: Look) -> Look:
        """Fill in what `look` says of the engine and its work."""
        if self.sleep.asleep:
            return look
        waits_for, says = self.host.waits_for, ""
        if waits_for:
            with contextlib.suppress(OSError):
                says = last_line(self._config.home / _LOG)[:_SAYS_CHARS]
        worker = self.worker
        return look._replace(
            waits_for=waits_for, log_says=says, engine=self.host.version if self.host.ready else None,
            doing=f"generating with {{}} ({self._config.engine})",
            tokens_s=worker.tokens_per_s, accepted=worker.accepted, refused=sum(worker.refused.values()),
        )  # fmt: skip

    async def prove(self) -> None:
        """Read the bits back out of the engines; the status then has their root, and whether it is right."""
        self._proof = None
        try:
            self._proof = _Proof(*await self.host.prove())
        except EngineLost as error:
            _log.warning("engine_lost", why=str(error))

    def add_status(self, own: OwnStatus) -> None:
        """Fill in what `own` says of the engine and its work."""
        own.engine = self.host.version if self.host.ready else None
        own.live_root = None if self._proof is None else self._proof.root.hex()
        own.live_proven = None if self._proof is None else self._proof.is_right
        own.engine_restarts = self.host.restarts
        own.engine_reloads = self.host.reloads
        own.engine_urls = list(self.urls)
        own.engines = [engine_status(engine, self.host.version) for engine in self.host.engines]
        own.asleep = self.sleep.asleep
        own.draft = self._draft.status()
        if self._memory is not None:
            own.live_reads = self._memory.reads
        own.tokens_s = self.worker.tokens_per_s
        own.commits = [
            EngineCommit(version=(commit.epoch, commit.version), pause_ms=1e3 * commit.pause_s)
            for commit in self.worker.commits
        ]
        own.work = self.worker.status()
        own.work.rewards, own.work.rewards_failed = self._rewards.computed, self._rewards.failed
