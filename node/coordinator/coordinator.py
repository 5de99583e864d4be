"""The trainer's own process: it holds the key and the truth, admits nodes, deals versions, leases work.

the user's trainer --trainer.sock--> desk --> publisher --> seed (attempts, seals) --> shell --> swarm
                                      desk <--> ledger service <-- Work messages <---- shell <-- nodes
"""

import random
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, Final

import structlog
import trio

from codec import BlockDelta, Checkpoint, Manifest, Replica, Staged, open_manifest
from codec.choice import arrival_mbit, choose_coder
from codec.chunk import CODER_PCO, CODER_RICE
from codec.errors import SwarmError, UsageError
from codec.sign import Key
from node.coordinator.admin import AdminService
from node.coordinator.handover import hand_over
from node.coordinator.track import Track
from node.coordinator.trainer_server import TrainerServer
from node.host import kernels
from node.host.announce import announced, reached_at
from node.host.audit import audit, close
from node.host.endpoint import Endpoint, NetworkOptions, open_store
from node.host.raw import write_raw_base
from node.ledger.book import Book
from node.ledger.service import LedgerService
from node.ledger.settings import Settings
from node.ledger.state import Head
from node.settings import keyfile, logs, memory
from node.settings.config import SeedConfig
from node.settings.contact import Contact
from node.status import query
from node.status.reached import reached, tell
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
from swarm.protocol.membership.lease import Standing
from swarm.protocol.startup import Boot, Budget, Saved, Site
from swarm.protocol.transfer.egress import Egress
from swarm.runtime import in_thread
from swarm.runtime.publishing import Attempt, SeedPublisher, genesis
from swarm.runtime.replica.model import Model
from swarm.runtime.sessions.blob_service import cost_of, model_bytes
from swarm.store import Seal, Store
from swarm.transport.identity import peer_id

__all__ = ["run"]

_log = structlog.get_logger(__name__)
_USUAL_DENSITY: Final = 0.01
"""Of what an RL step changes, until one has told."""

_WATCH_AGAIN_S: Final = 5.0
"""It ends only when a checkpoint was cut short while it was read, or by our own mistake: never in a tight loop."""


async def run(config: SeedConfig, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Run until cancelled. Raises `UsageError` for what the user can mend."""
    logs.configure()
    memory.give_back_promptly()
    config = announced(config)
    config.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = keyfile.load(config.key) if config.key is not None else _own_key(config)
    await hand_over(config, key.public)
    base = config.base or await in_thread(write_raw_base, config.home / "raw", config.raw_mb * 10**6)
    checkpoint = await in_thread(Checkpoint.open, base)
    with open_store(config.home, key.public) as store:
        if store.records.get("succession"):
            raise UsageError("This key was replaced (swarm-node rotate-key): start the seed with the new one.")
        store.anchors.keep = 2  # so that there is always a way back, of eight versions or more
        model = Model(store, base=base)
        head = await in_thread(_open_truth, store, model, checkpoint, key)
        boot = next_boot(int(store.records.get("boot") or 0), time.time())
        store.records.put([("boot", str(boot).encode())])
        book = Book(config.home / "ledger.sqlite")
        try:
            coordinator = Coordinator(config, key, store, model, head, boot, book)
            await coordinator.run(task_status)
        finally:
            book.close()
            await close(model)


async def _damaged(blocks: int) -> None:
    """There is nobody to fetch them from whom we would believe; the next start hashes all, and finds a way or says what
    is lost."""
    raise SwarmError(
        f"{blocks} blocks of the replica have changed on disk since the last run. Start again: they will be made anew. "
        "If it happens again, that disk is failing."
    )


def _own_key(config: SeedConfig) -> Key:
    return keyfile.load_or_make(config.home / keyfile.AUTHORITY_KEY)


def _open_truth(store: Store, model: Model, checkpoint: Checkpoint, key: Key) -> bytes:
    """The sealed manifest of the newest version: what the store proves, or the base as version 0.

    Never an older one: what was sealed is out, and a second version of its number would be a lie.
    """
    layout, newest = checkpoint.layout, store.newest()
    if newest is None and (store.chunks.all() or any(anchor.version > (0, 0) for anchor in store.anchors.list())):
        raise UsageError(
            f"{store.folder} holds versions, but not the record of which were sealed. Put its swarm.sqlite back from a "
            "backup; or begin a new swarm, with another home (--home) and another key."
        )
    if newest is None:
        replica = Replica.from_checkpoint(checkpoint, layout)
        return genesis(store, model, replica, key, files=checkpoint.files).manifest
    if open_manifest(newest.manifest, key.public).layout_hash != layout.hash:
        raise UsageError(
            f"{store.folder} holds the swarm of another model than {checkpoint.path}. "
            "Give the folder it began with (--base), or another home (--home)."
        )
    seal = model.restore()
    if seal is None or seal.id < newest.id:
        seal = model.restore_from(Replica.from_checkpoint(checkpoint, layout))
        if seal is None or seal.id < newest.id:
            raise UsageError(
                f"What {store.folder} holds of version {newest.id}, the newest, is damaged. Give the checkpoint that "
                "was published as that version as --base, or put the folder back from a backup."
            )
        model.write_checkpoint()
    _mend(store, model, checkpoint)
    return seal.manifest


def _mend(store: Store, model: Model, checkpoint: Checkpoint) -> None:
    """What joiners ask for and nobody else may have: put back where it is damaged."""
    assert model.replica is not None
    for data in (*checkpoint.files.values(), model.replica.layout.to_bytes()):
        store.put_file(data)
    store.put_hashes(model.replica.root, model.replica.hashes)


async def _watch(config: SeedConfig) -> None:
    """Publish what appears in a folder, by a process apart: its encoding keeps no event of ours waiting, and a file
    that shrinks under a map (SIGBUS) ends it alone."""
    assert config.watch is not None
    command = [sys.executable, "-m", "node.trainers.watch", str(config.home), str(config.watch)]
    command += ["--marker", config.watch_marker, "--quiet-s", str(config.watch_quiet_s)]
    while True:
        async with trio.open_nursery() as nursery:
            process = await nursery.start(partial(trio.run_process, command, stdin=subprocess.PIPE, check=False))
            code = await process.wait()
        _log.warning("watch_ended", code=code, again_s=_WATCH_AGAIN_S)
        await trio.sleep(_WATCH_AGAIN_S)


class Coordinator:
    """The running seed: the face of its shell, and what the trainer's desk talks to."""

    def __init__(
        self, config: SeedConfig, key: Key, store: Store, model: Model, head: bytes, boot: int, book: Book
    ) -> None:
        self._config, self._key, self._store, self._model = config, key, store, model
        start, tuning = trio.current_time(), Tuning.named(config.preset)
        wall = time.time() - start  # one reading: authority time must not jump when somebody sets the clock
        grants = [record for record in store.records.all("grant/").values() if record]
        tickets = list(store.records.all("ticket/").values())
        bars = [record for kind in ("bar/", "kick/") for record in store.records.all(kind).values() if record]
        assert model.layout is not None
        self.core = Authority(
            key, tuning, random.Random(secrets.randbits(64)),
            Boot(boot, clock=lambda local: wall + local, latest=lambda now: latest_boot(time.time())),
            Saved(head, grants, tickets, bars),
            Site(region=config.region, up_mbit=config.planned_up_mbit),
            Budget(Egress(config.egress_copies, model_bytes(model.layout)), partial(cost_of, model.layout)),
            now=start,
        )  # fmt: skip
        self.endpoint = Endpoint.build(
            self.core, key, key.public, store, self,
            NetworkOptions(
                config.listen, config.announce, config.via, config.up_mbit, outward=partial(reached_at, config)
            ),
            tuning=tuning, model=model,
        )  # fmt: skip
        assert self.endpoint.jobs is not None
        self._seed = SeedPublisher(key, self.endpoint.runtime, store, self.endpoint.jobs, self.endpoint.manifests)
        self._admin = AdminService(self.core, self.endpoint.runtime, trio.current_time)
        self.track = Track(self.endpoint.transport.traffic, self.endpoint.runtime.counts, trio.current_time)
        manifest = self.core.state.manifest
        assert manifest is not None
        at = Head(manifest.epoch, manifest.version, manifest.root)
        settings = Settings(check_share=config.check_share, check_tolerance=config.check_tolerance)
        ledger = book.restore(settings, at, start, random.Random(secrets.randbits(64)))
        self.ledger = LedgerService(
            ledger, book, self._send_work, is_member=self._is_member, expel=self.endpoint.runtime.expel
        )
        self._superseded = trio.Event()

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        config = self._config
        async with self.endpoint.running(leave=False), trio.open_nursery() as nursery:
            addrs = reached_at(config, self.endpoint.addrs)
            Contact(self._key.public, addrs, config.preset).write(config.home)
            trainer_server = TrainerServer(self, self._head, self.ledger, self._files)
            await nursery.start(self.ledger.run)
            await nursery.start(query.serve, config.home, self.state)
            await nursery.start(trainer_server.run, config.home / SOCKET_NAME)
            _log.info("serving", peer_id=peer_id(self._key.public), addrs=", ".join(addrs), version=str(self._head()))
            task_status.started()
            nursery.start_soon(tell, self.endpoint.transport)
            if config.watch is not None:
                nursery.start_soon(_watch, config)
            nursery.start_soon(kernels.warm_up, {spec.dtype for spec in self.replica.layout.tensors})
            nursery.start_soon(audit, self._model, _damaged)
            await self._superseded.wait()
            raise SwarmError(
                "Another seed with this swarm's key has started since, and the nodes follow that one: this one has "
                "stopped. Run one seed a key."
            )

    # ------------------------------------------------------------ what the publisher asks of us

    @property
    def replica(self) -> Replica:
        return self._seed.replica

    @property
    def key(self) -> Key:
        return self._key

    @property
    def head(self) -> tuple[int, int]:
        return self._head()

    def coder(self) -> int:
        """What the user says; else what lets the nodes finish sooner, as the last version and the roster have it."""
        config, last = self._config, self.core.state.manifest
        if config.coder != "auto":
            return {"rice": CODER_RICE, "pco": CODER_PCO}[config.coder]
        elements = sum(spec.elements for spec in self.replica.layout.tensors)
        changed = last.changed if last is not None and last.changed else round(elements * _USUAL_DENSITY)
        return choose_coder(self.replica.layout.full_bytes, changed, self._link_mbit, config.node_cores)

    @property
    def _link_mbit(self) -> float:
        """At what a version reaches all nodes at best."""
        roster = self.core.state.roster
        ups = [member.up_mbit for member in roster.members] if roster is not None else []
        return arrival_mbit(self._config.planned_up_mbit, ups, self.core.down_mbits)

    async def find(self, root: bytes | None, version: int | None) -> Seal:
        return await self._seed.find(root, version)

    async def open_attempt(self, back_to: Seal | None = None) -> Attempt:
        self.track.begin()
        attempt = (await self._seed.open_attempt(back_to))._replace(link_mbit=self._link_mbit)
        self.ledger.begun((attempt.epoch, attempt.version))
        _log.info("publishing", version=str(VersionId(attempt.epoch, attempt.version)), attempt=attempt.attempt)
        return attempt

    def rewind(self, to: Seal) -> AsyncGenerator[list[tuple[BlockDelta, int]], None]:
        return self._seed.rewind(to)

    async def add_chunk(self, chunk: Any) -> None:
        await self._seed.add_chunk(chunk)
        self.track.assigned()

    async def seal(self, manifest: Manifest) -> bytes:
        members = [lease.grant.peer for lease in self.core.book.leases.values()]
        elements = sum(spec.elements for spec in self.replica.layout.tensors)
        self.track.sealed(manifest, elements, members)
        return await self._seed.seal(manifest)

    async def abandon(self) -> None:
        await self._seed.abandon()
        self.ledger.abandoned()

    async def put_out(self, asked: Evict) -> Evicted:
        return await self._admin.put_out(asked)

    # ------------------------------------------------------------ what the shell tells us

    def committed(self, version: VersionId, manifest: Manifest, changes: tuple[Staged, ...] | None) -> None:
        self.ledger.sealed(Head(manifest.epoch, manifest.version, manifest.root))

    def notify(self, notice: Notice) -> None:
        match notice:
            case WorkHeard(peer, body):
                self.ledger.hear(peer, body)
                return
            case MemberHolds(_, peer, version):
                self.track.held(peer, version)
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
        _log.info(notice.log_name, **notice.log_fields())

    async def _send_work(self, peer: bytes, body: bytes) -> None:
        self.endpoint.send_work(peer, body)

    def _is_member(self, peer: bytes) -> bool:
        slot = self.core.book.slot_of.get(peer)
        now = trio.current_time()
        return slot is not None and self.core.standing(slot, now) is not Standing.DEAD

    # ------------------------------------------------------------ for people

    def _head(self) -> VersionId:
        held = self.core.state.held
        assert held is not None
        return held

    def _files(self) -> dict[str, bytes]:
        found = {spec.name: self._store.file(spec.hash) for spec in self.replica.layout.files}
        return {name: data for name, data in found.items() if data is not None}

    def state(self) -> dict[str, Any]:
        """Plain values for `status`, for `Swarm.state` and for the terminal view."""
        now = trio.current_time()
        work = self.ledger.state()
        manifest = self.core.state.manifest
        assert manifest is not None
        roster = self.core.state.roster
        parents = [] if roster is None else [
            {m.slot: None if p < 0 else p for m, p in zip(roster.members, row, strict=True)} for row in roster.parents
        ]  # fmt: skip
        return {
            "role": "seed",
            "swarm": peer_id(self._key.public),
            "head": list(self._head()),
            "root": manifest.root.hex(),
            "model_bytes": self.replica.layout.full_bytes,
            "addrs": list(reached_at(self._config, self.endpoint.addrs)),
            "relays": self.endpoint.transport.reservations.state,
            "sent_bytes": self.endpoint.transport.traffic.sent,
            "control_bytes": self.endpoint.runtime.counts.control_sent,
            "egress": self.core.egress.state(),
            "nodes": [self._node(slot, now, work) for slot in sorted(self.core.book.leases)],
            "stripes": parents,
            "steps": [step | self.ledger.commit_stats.of(tuple(step["version"])) for step in self.track.steps()],
            "work": work,
            **self._admin.state(),
        }

    def _node(self, slot: int, now: float, work: dict[str, Any]) -> dict[str, Any]:
        core = self.core
        lease = core.book.leases[slot]
        report = lease.report
        member = core.state.roster.member(slot) if core.state.roster is not None else None
        done = work["nodes"].get(lease.grant.peer.hex(), {})
        return {
            "slot": slot,
            "peer": peer_id(lease.grant.peer),
            "name": member.name if member is not None else "",
            "reached": reached(
                self.endpoint.transport, lease.grant.peer, member.dialable if member is not None else None
            ),
            "standing": core.standing(slot, now).value,
            "lease_s": core.lease_left_s(slot, now),
            "held": None if report is None else list(report.held),
            "engine": None if report is None or not report.engine else [report.engine_epoch, report.engine_version],
            "catching_up": 1.0 if report is None else report.catching_up,
            "sent_bytes": 0 if report is None else report.sent_bytes,
            "received_bytes": 0 if report is None else report.received_bytes,
            "saving": report is not None and report.saving,
            "tokens_s": done.get("tokens_per_s", 0.0),
            "accepted": done.get("accepted", 0),
            "refused": done.get("refused", {}),
            "useful": done.get("useful"),
            "seconds": done.get("seconds"),
            "quarantine": done.get("quarantine"),
            "outstanding": done.get("outstanding", 0),
        }
