"""The seed process: it holds the key and the authoritative bits, admits members, publishes versions, leases work.

the user's trainer --trainer.sock--> trainer server --> publisher --> chunks, seals --> runtime --> swarm
                                     trainer server <--> ledger service <-- Work messages <---- runtime <-- nodes
"""

import contextlib
import random
import secrets
import shutil
import subprocess
import time
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import trio

from codec import BlockDelta, Checkpoint, Chunk, ChunkKey, Layout, Manifest, Replica, StagedChunk
from codec.choice import arrival_mbit, choose_coder, usual_changes, usual_payload_bytes
from codec.chunk import CODER_PCO, CODER_RICE, BlockEntry
from codec.errors import SwarmError, UsageError
from codec.experts import Experts
from codec.formats.share import formats_of
from codec.parts import BASE, Part, base_layout, part_of
from codec.shards import Parallel, block_ranks, has_experts
from codec.sign import Key
from node.coordinator.adapters import AdaptersHeld
from node.coordinator.admin import AdminService
from node.coordinator.draft import DraftHeld, open_draft
from node.coordinator.format_parts import CLASSES, FormatParts
from node.coordinator.handover import Handover, hand_over
from node.coordinator.home_layout import format_bytes, layout_of
from node.coordinator.leading import run_in_council
from node.coordinator.recovery import CHECKPOINTS_KEPT, open_newest_version
from node.coordinator.seed_log import SeedLog, next_command
from node.coordinator.seed_status import seed_status
from node.coordinator.state_saver import StateSaver
from node.coordinator.track import SentBytes, Track
from node.coordinator.trainer_server import TrainerServer
from node.coordinator.version_changes import VersionChanges
from node.council.journal import Journal
from node.council.leading import add_pending_seal
from node.host import kernels
from node.host.announce import announced, reached_at
from node.host.audit import audit, close
from node.host.child import child_environment, python_module
from node.host.endpoint import Endpoint, NetworkOptions, open_store
from node.host.raw import write_raw_base
from node.host.state_room import FRAGMENTS
from node.ledger.book import LEDGER, Book
from node.ledger.routes import route_shape_of
from node.ledger.service import LedgerService
from node.ledger.settings import Settings
from node.ledger.state import Head
from node.monitor import own_status, serve_monitor
from node.saved.placer import STATE_FOLDER, Placer
from node.settings import keyfile, logs, memory, memory_plan
from node.settings.client_keys import KEYS_FILE
from node.settings.config import SeedConfig
from node.settings.contact import Contact
from node.status import query
from node.status.reached import log_reservations
from node.status.schema import SeedStatus
from node.trainers.connection.seedlink import SOCKET_NAME
from node.trainers.messages import Evict, Evicted
from swarm.protocol.authority import Authority
from swarm.protocol.core.boots import latest_boot, next_boot
from swarm.protocol.core.events import VersionId
from swarm.protocol.core.notices import (
    LeaseExpired,
    MemberHolds,
    MemberJoined,
    MemberLeft,
    Notice,
    Superseded,
    WorkHeard,
)
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.startup import Boot, Budget, Saved, Site
from swarm.protocol.transfer.egress import Egress
from swarm.runtime import in_thread
from swarm.runtime.publishing import Attempt, SeedPublisher
from swarm.runtime.replica.model import Model
from swarm.runtime.replica.own import OwnChunk
from swarm.runtime.sessions.blob_service import cost_of, model_bytes
from swarm.store import Seal, Store
from swarm.store.records import Records
from swarm.transport.identity import peer_id

__all__ = ["Coordinator", "run"]

_log = structlog.get_logger(__name__)
_WATCH_AGAIN_S: Final = 5.0
"""Pause before the watching process is started again. It ends only when a checkpoint was truncated while it was read,
or by a bug of ours; without a pause the restarts would be a busy loop."""


async def run(config: SeedConfig, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Run a seed until cancelled. `started()` once it serves. Raises `UsageError` for what the user can correct."""
    logs.configure(config.log_level, file=config.log_file)
    memory.give_back_promptly()
    config = announced(config)
    config.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    if config.base is not None:
        await in_thread(Checkpoint.open, config.base)  # a wrong folder is reported before a key is made
    own_key = config.home / keyfile.AUTHORITY_KEY
    if Handover.read(config.home) is not None and config.key is None and not own_key.exists():
        raise UsageError(
            f"The members of this home's old swarm are still to be told of their new key, and {own_key} is missing. "
            "Give the new key's file with --key, or run swarm-node rotate-key again."
        )
    made_key = config.key is None and keyfile.make(own_key)
    key = keyfile.load(config.key or own_key)
    serving = _Serving(task_status)
    try:
        await _run_with_key(config, key, serving)
    finally:
        # Nobody has heard of this key, so the next start makes another one.
        if made_key and not serving.started_once:
            _forget_key(config.home, key)


def _forget_key(home: Path, key: Key) -> None:
    """Remove the key of a start that failed, and its store; unless another seed runs with it."""
    with contextlib.suppress(SwarmError, OSError), open_store(home, key.public) as store:
        (home / keyfile.AUTHORITY_KEY).unlink(missing_ok=True)
        shutil.rmtree(store.folder, ignore_errors=True)


def _is_in(path: Path, key: Key) -> bool:
    try:
        return keyfile.load(path).public == key.public
    except UsageError:
        return False


class _Serving(trio.TaskStatus[None]):
    """Passes `started` on, and remembers it."""

    def __init__(self, task_status: trio.TaskStatus[None]) -> None:
        self._task_status = task_status
        self.started_once = False

    def started(self, value: None = None) -> None:
        self.started_once = True
        self._task_status.started(value)


async def _run_with_key(config: SeedConfig, key: Key, task_status: trio.TaskStatus[None]) -> None:
    await hand_over(config, key.public)
    base = config.base or await in_thread(write_raw_base, config.home / "raw", config.raw_mb * 10**6)
    checkpoint = await in_thread(Checkpoint.open, base)
    if config.shards and not has_experts(checkpoint.layout):
        raise UsageError(f"--shards deals experts over ranks, and {base} has none: leave it out.")
    smaller = f"carry smaller files (--raw-mb {config.raw_mb})" if config.raw_mb else "use a machine with more"
    draft = None if config.draft is None else await in_thread(open_draft, config.draft, checkpoint)
    held_bytes = checkpoint.layout.nbytes + format_bytes(checkpoint.layout, config.format)
    held_bytes += 0 if draft is None else draft.layout.nbytes
    memory_plan.require(memory_plan.seed(held_bytes), memory.free_bytes(), smaller)
    with open_store(config.home, key.public, checkpoints_kept=CHECKPOINTS_KEPT) as store:
        if config.key is None and not _is_in(config.home / keyfile.AUTHORITY_KEY, key):
            raise UsageError(f"Another start in {config.home} failed and took its new key back. Start the seed again.")
        if store.records.get("succession"):
            raise UsageError("This key was replaced (swarm-node rotate-key): start the seed with the new one.")
        model = Model(store, base=base, refer=not config.copy_base)
        layout = await in_thread(layout_of, config, store, checkpoint, key, draft)
        with contextlib.closing(Book(config.home / LEDGER)) as book:
            if config.council:
                await in_thread(add_pending_seal, store, Journal(config.home, book).records(), key.public)
            head = await in_thread(open_newest_version, store, model, checkpoint, layout, key, draft)
            del checkpoint, draft  # its files are mapped, and the pages that were read count as this process's memory

            async def serve(boot: int) -> None:
                await Coordinator(config, key, store, model, head, boot, book).run(task_status)

            try:
                if config.council:
                    await run_in_council(config, key.public, store, book, serve)
                else:
                    boot = next_boot(int(store.records.get("boot") or 0), time.time())
                    store.records.put([("boot", str(boot).encode())])
                    await serve(boot)
            finally:
                await close(model)


async def _report_damage(blocks: int) -> None:
    """A seed has no peer whose bits it would trust; the next start hashes everything and repairs it or says what is
    lost."""
    raise SwarmError(
        f"{blocks} blocks of the replica have changed on disk since the last run. Start the seed again: it repairs "
        "them. If it happens again, that disk is failing."
    )


async def _watch_folder(config: SeedConfig) -> None:
    """Run a process that publishes what appears in a folder; start it again when it ends.

    A process of its own, so that its encoding does not delay the seed's event loop, and a file that shrinks while it is
    mapped (SIGBUS) ends that process only. It ends when its stdin does, so Ctrl-C in a terminal is for the seed alone.
    """
    assert config.watch is not None
    command = python_module("node.trainers.watch", str(config.home), str(config.watch))
    command += ["--marker", config.watch_marker, "--quiet-s", str(config.watch_quiet_s)]
    command += ["--log-file", str(config.log_file)] if config.log_file is not None else []
    environment = child_environment() | ({"SWARM_LOG": config.log_level} if config.log_level is not None else {})
    while True:
        async with trio.open_nursery() as nursery:
            run = partial(
                trio.run_process, command, stdin=subprocess.PIPE, check=False, env=environment, start_new_session=True
            )
            process = await nursery.start(run)
            code = await process.wait()
        _log.warning("watch_ended", code=code, again_s=_WATCH_AGAIN_S)
        await trio.sleep(_WATCH_AGAIN_S)


class Coordinator:
    """The running seed. The runtime notifies it (`swarm.runtime.Application`); the trainer server publishes through it.

    `head`: the sealed manifest of the newest version. `boot`: how often this key has started, already durable.
    """

    def __init__(
        self, config: SeedConfig, key: Key, store: Store, model: Model, head: bytes, boot: int, book: Book
    ) -> None:
        self._config, self._key, self._store, self._model = config, key, store, model
        self._superseded = trio.Event()
        """Another seed with this key has started since."""
        self._kernels_loaded = trio.Event()
        now = trio.current_time()
        self.core = _authority(config, key, store, model, head, boot, now)
        assert model.layout is not None
        self.track = Track(self._sent_bytes, trio.current_time, Experts(model.layout))
        self._seed_log = SeedLog(self.core)
        logs.name_peers(self._seed_log.name_of)
        self.ledger = self._restored_ledger(book, now)
        # The runtime calls `committed` and `notify`, so what they use is built before it.
        self.endpoint = Endpoint.build(
            self.core, key, key.public, store, self,
            NetworkOptions(
                config.listen, config.announce, config.via, config.up_mbit, outward=partial(reached_at, config)
            ),
            tuning=Tuning.named(config.preset), model=model,
        )  # fmt: skip
        assert self.endpoint.jobs is not None
        self._publisher = SeedPublisher(key, self.endpoint.runtime, store, self.endpoint.jobs, self.endpoint.manifests)
        self._admin = AdminService(self.core, self.endpoint.runtime, trio.current_time)
        self._adapters = AdaptersHeld(self._publisher.replica)
        self._draft = DraftHeld(self._publisher.replica)
        self._changes = VersionChanges(self._adapters)
        self._placer = Placer(
            key, config.home / STATE_FOLDER, self.endpoint.transport, lambda: self.core.state.roster,
            self.endpoint.runtime.peers.pacer, store.folder / FRAGMENTS,
        )  # fmt: skip
        self._state_saver = StateSaver(self._placer)
        self.ledger.set_adapters(self._adapters.adapters)

    def _restored_ledger(self, book: Book, now: float) -> LedgerService:
        config, manifest = self._config, self.core.state.manifest
        assert manifest is not None
        head = Head(manifest.epoch, manifest.version, manifest.root)
        settings = Settings(
            check_share=config.check_share,
            check_tolerance=config.check_tolerance,
            portable_draws=not config.own_draws,
        )
        ledger = book.restore(settings, head, now)
        assert self._model.layout is not None
        ledger.route_shape = route_shape_of(self._files(), self._model.layout)
        return LedgerService(
            ledger,
            book,
            self._send_work,
            is_member=self._is_member,
            expel=lambda node, why: self.endpoint.runtime.expel(node, why),
        )

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Serve until cancelled. Raises `SwarmError` when another seed with the same key takes over."""
        config = self._config
        async with self.endpoint.running(leave=False), trio.open_nursery() as nursery:
            addrs = reached_at(config, self.endpoint.addrs)
            Contact(self._key.public, addrs, config.preset).write(config.home)
            trainer_server = TrainerServer(
                self, self.ledger, self._files, self._kernels_loaded.is_set, _classes(config, self.replica.layout),
                config.home / KEYS_FILE, self._state_saver,
            )  # fmt: skip
            await nursery.start(self.ledger.run)
            await nursery.start(query.serve, config.home, self.status)
            await nursery.start(trainer_server.run, config.home / SOCKET_NAME)
            if config.monitor_address is not None:
                await nursery.start(serve_monitor, config.monitor_address, config.home, own_status(self.status))
            _log.info(
                "serving", peer_id=peer_id(self._key.public), addrs=", ".join(addrs), version=str(self.head),
                next=next_command(config.home),
            )  # fmt: skip
            task_status.started()
            nursery.start_soon(log_reservations, self.endpoint.transport)
            nursery.start_soon(self._placer.run)
            if config.watch is not None:
                nursery.start_soon(_watch_folder, config)
            nursery.start_soon(self._load_kernels)
            nursery.start_soon(audit, self._model, _report_damage)
            await self._superseded.wait()
            raise SwarmError(
                "Another seed with this swarm's key has started since, and the nodes follow that one, so this one has "
                "stopped. Run one seed per key."
            )

    async def _load_kernels(self) -> None:
        if await kernels.warm_up({spec.dtype for spec in self.replica.layout.tensors}):
            self._kernels_loaded.set()

    # ------------------------------------------------------------ for the trainer server and its publisher

    @property
    def replica(self) -> Replica:
        return self._publisher.replica

    @property
    def key(self) -> Key:
        return self._key

    @property
    def records(self) -> Records:
        return self._store.records

    @property
    def head(self) -> VersionId:
        held = self.core.state.held
        assert held is not None
        return held

    def coder(self) -> int:
        """The coder that the user chose; else the one by which nodes finish sooner, judged by the last version and the
        roster's uplinks."""
        config, last = self._config, self.core.state.manifest
        if config.coder != "auto":
            return {"rice": CODER_RICE, "pco": CODER_PCO}[config.coder]
        layout = self._publisher.replica.layout
        changed = last.changed if last is not None and last.changed else usual_changes(layout)
        return choose_coder(layout.base_bytes, changed, self._link_mbit, config.node_cores)

    @property
    def _link_mbit(self) -> float:
        """The rate, Mbit/s, at which a version reaches all nodes at best."""
        roster = self.core.state.roster
        ups = [member.up_mbit for member in roster.members] if roster is not None else []
        return arrival_mbit(self._config.planned_up_mbit, ups, self.core.down_mbits)

    async def find(self, root: bytes | None, version: int | None) -> Seal:
        return await self._publisher.find(root, version)

    async def open_attempt(
        self, back_to: Seal | None = None, trainer_step: int | None = None, part: Part = BASE
    ) -> Attempt:
        self.track.begin_publish(trainer_step)
        usual_bytes = usual_payload_bytes(self.replica.layout)
        attempt = await self._publisher.open_attempt(back_to)
        attempt = attempt._replace(link_mbit=self._link_mbit, expected_bytes=usual_bytes)
        self.ledger.begun((attempt.epoch, attempt.version), self._adapters.name_of(part))
        _log.info(
            "publishing", version=str(VersionId(attempt.epoch, attempt.version)), attempt=attempt.attempt,
            step=trainer_step or None,
        )  # fmt: skip
        return attempt

    def rewind(self, to: Seal, skip: range = range(0)) -> AsyncGenerator[list[tuple[BlockDelta, int]], None]:
        return self._publisher.rewind(to, skip)

    async def add_chunk(self, chunk: Chunk, known: OwnChunk | None = None) -> None:
        await self._publisher.add_chunk(chunk, known)
        self.track.chunk_left(chunk, known)

    def payload(self, key: ChunkKey, block: int) -> tuple[BlockEntry, bytes] | None:
        return self._publisher.payload(key, block)

    async def seal(self, manifest: Manifest, parts: frozenset[Part]) -> bytes:
        members = [lease.grant.peer for lease in self.core.book.leases.values()]
        elements = self._elements_of(parts)
        self.track.sealed(manifest, elements, members)
        with self._changes.sealing(VersionId(manifest.epoch, manifest.version), parts):
            sealed = await self._publisher.seal(manifest)
        self._draft.note(parts)
        self._seed_log.sealed(manifest, elements, self.track.trainer_step)
        return sealed

    def _elements_of(self, parts: frozenset[Part]) -> int:
        """Elements of these parts of the model."""
        return sum(spec.elements for spec in self.replica.layout.tensors if part_of(spec.name) in parts)

    async def abandon(self) -> None:
        await self._publisher.abandon()
        self.ledger.abandoned()

    async def evict(self, request: Evict) -> Evicted:
        return await self._admin.evict(request)

    # ------------------------------------------------------------ what the runtime tells us

    def committed(self, version: VersionId, manifest: Manifest, changes: tuple[StagedChunk, ...] | None) -> None:
        head = Head(manifest.epoch, manifest.version, manifest.root)
        self.ledger.sealed(head, self._changes.confirmed(version))

    def notify(self, notice: Notice) -> None:
        match notice:
            case WorkHeard(peer, body):
                self.ledger.hear(peer, body)
                return
            case MemberHolds(_, peer, version):
                self._seed_log.arrived(self.track.held(peer, version))
            case MemberJoined(peer):
                self.ledger.member_up(peer)
            case MemberLeft(peer) | LeaseExpired(_, peer):
                self.ledger.member_lost(peer)
                self.track.gone(peer)
            case Superseded(boot):
                self._store.records.put([("boot", str(boot).encode())])  # our next one is to count again
                self._superseded.set()
            case _:
                pass
        self._seed_log.notice(notice)

    async def _send_work(self, peer: bytes, body: bytes) -> None:
        self.endpoint.send_work(peer, body)

    def _is_member(self, peer: bytes) -> bool:
        slot = self.core.book.slot_of.get(peer)
        now = trio.current_time()
        return slot is not None and self.core.standing(slot, now).rights.content

    # ------------------------------------------------------------ for people and programs

    def _sent_bytes(self) -> SentBytes:
        counts = self.endpoint.runtime.counts
        payload = counts.pushed + counts.pulled + counts.blobs
        return SentBytes(self.endpoint.transport.traffic.sent, payload, counts.control_sent)

    def _files(self) -> dict[str, bytes]:
        """The base checkpoint's small files by name, such as the tokenizer's."""
        layout = self._model.layout
        assert layout is not None
        found = {spec.name: self._store.file(spec.hash) for spec in base_layout(layout).files}
        return {name: data for name, data in found.items() if data is not None}

    def status(self) -> SeedStatus:
        status = seed_status(
            self.core,
            self.endpoint,
            self.ledger,
            self.track,
            addrs=reached_at(self._config, self.endpoint.addrs),
            now=trio.current_time(),
        )
        status.parts, status.draft = self._adapters.status(), self._draft.status()
        status.saved_states = self._state_saver.status()
        return status


def _classes(config: SeedConfig, layout: Layout) -> list[int] | None:
    """Of each block its class, if some members hold only some: by the ranks that need it, if experts are dealt over
    ranks, and by the formats that replace it."""
    ranks = block_ranks(layout, config.shards, Parallel.EXPERT) if config.shards else None
    if not formats_of(layout):
        return ranks
    found = FormatParts(layout)
    return [CLASSES * (ranks[block] if ranks else 0) + found.class_of(block) for block in range(layout.n_blocks)]


def _authority(
    config: SeedConfig, key: Key, store: Store, model: Model, head: bytes, boot: int, now: float
) -> Authority:
    """The core, as `store` and `config` have it. `now`: local time, s."""
    assert model.layout is not None
    started_at = time.time() - now  # read once: authority time must not jump when the machine's clock is set
    grants = [record for record in store.records.all("grant/").values() if record]
    bars = [record for kind in ("bar/", "kick/") for record in store.records.all(kind).values() if record]
    return Authority(
        key, Tuning.named(config.preset), random.Random(secrets.randbits(64)),
        Boot(boot, clock=lambda local: started_at + local, latest=lambda local: latest_boot(time.time())),
        Saved(head, grants, list(store.records.all("ticket/").values()), bars),
        Site(
            region=config.region, up_mbit=config.planned_up_mbit, shards=config.shards,
            formats=formats_of(model.layout),
        ),
        Budget(Egress(config.egress_copies, model_bytes(model.layout)), partial(cost_of, model.layout)),
        now=now,
    )  # fmt: skip
