"""A member's process: a rollout node (replica and engine), or a relay (neither).

swarm --> shell --commit--> changes --> engine        (node.member.engine_runtime: staged while it generates)
swarm <-- Work messages <-- rollouts <--- engine
"""

import random
import secrets
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from codec import Manifest
from codec.errors import PeerError, SwarmError, UsageError
from codec.sign import Key
from node.host.announce import announced, resolved
from node.host.audit import audit, close
from node.host.daily import Daily
from node.host.endpoint import Endpoint, NetworkOptions, open_store
from node.member import following
from node.settings import keyfile, logs
from node.settings.config import JoinConfig, MemberConfig
from node.settings.memory import disk_free_bytes, free_bytes, keep_on_disk
from node.settings.ticket import Ticket
from node.status import query
from node.status.reached import reached, relayed, tell
from swarm.protocol.core.boots import latest_boot
from swarm.protocol.core.events import Damaged, VersionId
from swarm.protocol.core.notices import (
    AuthorityUnreachable,
    CatchupFailed,
    ClocksApart,
    Equivocation,
    Joined,
    JoinRefused,
    Notice,
    SuccessionHeard,
    WorkHeard,
)
from swarm.protocol.core.reach import circuit
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import Join
from swarm.protocol.member import Peer
from swarm.runtime import in_thread
from swarm.store import Store
from swarm.transport.base import Unreachable
from swarm.transport.identity import peer_id

if TYPE_CHECKING:
    from node.member.engine_runtime import EngineRuntime
    from swarm.runtime.replica.model import Model

__all__ = ["Member", "run"]

_log = structlog.get_logger(__name__)
_PROGRESS_EVERY_S: Final = 5.0
_LOG_EVERY_S: Final = 10.0
"""A seed that does not answer is dialed more often than anybody wants to read of."""


async def run(
    ticket: Ticket, config: JoinConfig, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run a node until cancelled. Raises `UsageError`, or `Unreachable` when no seed answers.

    Where the swarm gets a new key the node follows: it comes into the new swarm in this process, with its bits.
    """
    from codec import Checkpoint

    logs.configure()
    config = await in_thread(resolved, announced(config))
    if config.model is not None:
        await in_thread(Checkpoint.open, config.model)  # a wrong folder is told before it takes a place of the ticket
    key = keyfile.load_or_make(config.home / keyfile.NODE_KEY)
    while True:
        way = await in_thread(following.follow, config.home, ticket)
        await _run_in(way, config, key, task_status)
        task_status = trio.TASK_STATUS_IGNORED


async def _run_in(way: following.Way, config: JoinConfig, key: Key, task_status: trio.TaskStatus[None]) -> None:
    """Take part in one swarm until it has a successor, which is on disk then."""
    from node.host import kernels
    from swarm.runtime.replica.model import Model

    ticket = way.ticket
    with open_store(config.home, ticket.authority) as store:
        if config.replica == "none":
            await Member(way, config, key, store, relay=True).run(task_status)
            return
        model = Model(store, base=way.base or config.model, on_disk=partial(_on_disk, config))
        seal = await in_thread(model.restore) or model.nearly
        layout_hash = None if seal is None or model.layout is None else model.layout.hash
        held = None if seal is None else seal.manifest
        member = Member(way, config, key, store, relay=False, held=held, layout_hash=layout_hash, model=model)
        async with trio.open_nursery() as nursery:
            tensors = () if model.layout is None else model.layout.tensors
            nursery.start_soon(kernels.warm_up, {spec.dtype for spec in tensors})
            if config.engine != "none":
                from node.member.engine_runtime import EngineRuntime

                engine_runtime = EngineRuntime(config, key, store, model, member.send_work)
                member.employ(engine_runtime)
                nursery.start_soon(engine_runtime.run)
            if config.raw_out is not None:
                nursery.start_soon(_keep_file, member, model, config.raw_out)
            nursery.start_soon(audit, model, partial(_damaged, member))
            if model.nearly is not None:
                await _damaged(member, model.lost)
            try:
                await member.run(task_status)
                if model.version not in {anchor.version for anchor in store.anchors.list()}:
                    await in_thread(model.write_checkpoint)  # what the new swarm's replica begins with
            finally:
                await close(model)
            nursery.cancel_scope.cancel()


async def _keep_file(member: "Member", model: "Model", out: Path) -> None:
    """Write each version of the file that the swarm carries to `out`. Raises `UsageError` when that cannot be."""
    from node.host.raw import raw_content, write_raw

    while True:
        news = member.committed_next
        content = await in_thread(model.read, raw_content)
        if content is not None:
            try:
                await in_thread(write_raw, content, out)
            except OSError as error:
                raise UsageError(f"Cannot write {out}: {error.strerror}.") from error
            _log.info("wrote", file=str(out), bytes=len(content))
        await news.wait()


def _on_disk(config: JoinConfig, model_bytes: int) -> bool:
    """Where the replica goes; see `node.settings.memory`. Raises `UsageError`, in the middle of a sentence, when
    nowhere."""
    memory_bytes = free_bytes()
    on_disk = keep_on_disk(config.replica, model_bytes, memory_bytes, disk_free_bytes(config.home))
    _log.info("replica", place="disk" if on_disk else "ram", model_bytes=model_bytes, memory_bytes=memory_bytes)
    return on_disk


async def _damaged(member: "Member", blocks: int) -> None:
    """Have the blocks fetched anew from others."""
    await member.endpoint.runtime.post(Damaged(blocks))


class Member:
    """The running member: the face of its shell."""

    def __init__(
        self,
        way: following.Way,
        config: MemberConfig,
        key: Key,
        store: Store,
        *,
        relay: bool,
        held: bytes | None = None,
        layout_hash: bytes | None = None,
        model: Any = None,
    ) -> None:
        self.config, self.key, self.ticket = config, key, way.ticket
        ticket, self._store = way.ticket, store
        self._patience_s = max(config.wait_for_seed_s, following.PATIENCE_S if way.followed else 0.0)
        self._relay = relay
        tuning = Tuning.named(ticket.preset)
        addrs = config.announce + tuple(circuit(relay) for relay in config.via)
        up_mbit, down_mbit = config.planned_up_mbit, config.planned_down_mbit
        join = Join(ticket.capability, addrs, config.name, config.region, up_mbit, down_mbit, relay)
        self.core = Peer(
            key, ticket.authority, ticket.addrs, join, tuning,
            random.Random(secrets.randbits(64)), held=held, layout_hash=layout_hash,
            latest_boot=lambda now: latest_boot(time.time()),
        )  # fmt: skip
        self.endpoint = Endpoint.build(
            self.core, key, ticket.authority, store, self,
            NetworkOptions(
                config.listen, config.announce, config.via, config.up_mbit,
                relay_for=self._may_have_place if relay else None,
            ),
            tuning=tuning, model=model,
        )  # fmt: skip
        self._daily: Daily | None = None
        if config.up_gb_day is not None:
            traffic = self.endpoint.transport.traffic
            self._daily = Daily(config.home, config.up_gb_day, up_mbit, lambda: traffic.sent)
        self._joined = trio.Event()
        self._over: SwarmError | None = None
        self._end = trio.Event()
        self._engine_runtime: EngineRuntime | None = None
        self.committed_next = trio.Event()
        """Set when the replica becomes another version; then another one stands here."""
        self.news = ""
        self._refused = ""
        """Why the seed does not let us in for now; empty: it has not said so."""
        self._quiet_until = 0.0

    def employ(self, engine_runtime: "EngineRuntime") -> None:
        """Tell `engine_runtime` of commits and of work."""
        self._engine_runtime = engine_runtime

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled, until the authority turns us away for good, or until the swarm has a successor:
        then this returns, with that on disk."""
        try:
            async with self.endpoint.running(leave=True), trio.open_nursery() as nursery:
                await nursery.start(query.serve, self.config.home, self.state, self._prove)
                nursery.start_soon(self._account)
                nursery.start_soon(tell, self.endpoint.transport)
                nursery.start_soon(self._expect_contact)
                nursery.start_soon(self._tell_progress)
                _log.info("starting", peer_id=peer_id(self.key.public), addrs=", ".join(self.endpoint.addrs))
                task_status.started()
                await self._end.wait()
                if self._over is not None:
                    raise self._over
                nursery.cancel_scope.cancel()
        finally:
            if self._daily is not None:
                self._daily.close()

    async def _expect_contact(self) -> None:
        with trio.move_on_after(self._patience_s):
            await self._joined.wait()
        if not self._joined.is_set():
            if self._refused:
                self.stop(Unreachable(f"The swarm does not let this machine in yet: {self._refused}"))
            why = self.news or f"nothing answers at {', '.join(self.ticket.addrs)}"
            self.stop(Unreachable(
                f"The swarm's seed cannot be reached: {why}. Is it running, and is that port open to this machine? "
                "A new ticket names its present addresses; --wait-for-seed 1h waits longer."
            ))  # fmt: skip

    async def _tell_progress(self) -> None:
        """A first catch-up takes minutes where the model is large: say how far it is."""
        while True:
            await trio.sleep(_PROGRESS_EVERY_S)
            if self.core.catchup.active:
                received_mb = round(self.endpoint.transport.traffic.received / 1e6, 1)
                _log.info("catching_up", percent=round(100 * self.core.caught_up), received_mb=received_mb)

    async def _account(self) -> None:
        """What our reports say of us, kept up to date."""
        account = self.core.membership.renewals.account
        while True:
            account.sent_bytes = self.endpoint.transport.traffic.sent
            account.received_bytes = self.endpoint.transport.traffic.received
            if self._engine_runtime is not None:
                account.engine = self._engine_runtime.engine_name
                account.engine_version = self._engine_runtime.engine_version
                account.tokens_s = self._engine_runtime.worker.tokens_per_s
            if self._daily is not None and (told := self._daily.look()) is not None:
                await self.endpoint.runtime.post(told)
            await trio.sleep(0.2)

    def stop(self, why: SwarmError) -> None:
        """End, for this reason; the first one counts."""
        self._over = self._over or why
        self._end.set()

    # ------------------------------------------------------------ what the shell tells us

    def committed(self, version: VersionId, manifest: Manifest, changes: Any) -> None:
        _log.info("holds", version=str(version), root=manifest.root)
        self.committed_next.set()
        self.committed_next = trio.Event()
        if self._engine_runtime is not None:
            self._engine_runtime.committed(version, manifest.root, changes)

    def notify(self, notice: Notice) -> None:
        match notice:
            case WorkHeard(peer, body):
                if self._engine_runtime is not None and peer == self.ticket.authority:
                    self._engine_runtime.worker.hear(body)
                return
            case Joined():
                self._joined.set()
                self.news = ""
            case AuthorityUnreachable(why):
                self.news = why
                if trio.current_time() < self._quiet_until:
                    return
                self._quiet_until = trio.current_time() + _LOG_EVERY_S
            case JoinRefused("ticket" | "capability", why):
                self.stop(UsageError(why))
            case SuccessionHeard(sealed):
                self._succeeded(sealed)
            case ClocksApart():
                self.news = (
                    "This machine's clock and the seed's are a month apart or more: set them. What the seed says is "
                    "passed over meanwhile."
                )
            case JoinRefused("later", why):
                self.news = self._refused = why
            case CatchupFailed(detail):
                self.stop(SwarmError(
                    f"This machine cannot hold the swarm's model: {detail}. "
                    "Remove what this home keeps of it, or use another (--home), and join again."
                ))  # fmt: skip
            case Equivocation(version):
                self.stop(SwarmError(
                    f"The seed has signed two different versions {version}. Nothing of it can be believed: "
                    "stop, and ask whoever runs it."
                ))  # fmt: skip
            case _:
                pass
        _log.info(notice.log_name, **notice.log_fields())

    def _succeeded(self, sealed: bytes) -> None:
        """The swarm has a new key: write down where it is, and end here."""
        try:
            following.ticket_of(sealed, self.ticket.authority)
        except PeerError as error:
            _log.warning("succession_ignored", why=str(error))
            return
        following.note(self._store, sealed)
        self._end.set()

    def send_work(self, body: bytes) -> None:
        """Hand a `Work` body to the authority; lost when there is no session, which is then looked for at once."""
        if self.endpoint.runtime.peers.get(self.ticket.authority) is None:
            self.core.membership.come_back()
        self.endpoint.send_work(self.ticket.authority, body)

    def _may_have_place(self, peer: bytes) -> bool:
        """As a relay: the authority and the members are reached through us if they like."""
        roster = self.core.state.roster
        if self._daily is not None and self._daily.spent:
            return False
        return peer == self.ticket.authority or (roster is not None and roster.member_of(peer) is not None)

    # ------------------------------------------------------------ for people

    async def _prove(self) -> None:
        if self._engine_runtime is not None:
            await self._engine_runtime.prove()

    def state(self) -> dict[str, Any]:
        """Plain values for `status`."""
        core = self.core.state
        now = trio.current_time()
        held = core.held
        roster = core.roster
        stripes = [] if roster is None else [
            {m.slot: None if p < 0 else p for m, p in zip(roster.members, row, strict=True)} for row in roster.parents
        ]  # fmt: skip
        own = {
            "slot": -1 if core.grant is None else core.grant.slot,
            "name": self.config.name,
            "peer": peer_id(self.key.public),
            "standing": self.core.standing(now).value,
            "dialable": roster is not None and (me := roster.member_of(self.key.public)) is not None and me.dialable,
            "held": None if held is None else list(held),
            "root": None if core.manifest is None or held is None else core.manifest.root.hex(),
            "catching_up": self.core.caught_up,
            "phase": self.core.catchup.phase.value,
            "sent_bytes": self.endpoint.transport.traffic.sent,
            "received_bytes": self.endpoint.transport.traffic.received,
            "pushed_bytes": self.endpoint.runtime.counts.pushed,
            "duplicate_bytes": self.endpoint.runtime.counts.duplicates,
        }
        if self._daily is not None:
            own["uplink_today"] = self._daily.state()
        if self._engine_runtime is not None:
            own |= self._engine_runtime.state()
        return {
            "role": "relay" if self._relay else "node",
            "swarm": peer_id(self.ticket.authority),
            "head": None if core.leases.heartbeat is None else list(core.leases.heartbeat.head),
            "nodes": [own],
            "stripes": stripes,
            "message": self.news or (self._daily.news if self._daily is not None else ""),
            "seed_reached": reached(self.endpoint.transport, self.ticket.authority, None),
            "relays": self.endpoint.transport.reservations.state,
            **relayed(self.endpoint.transport),
        }
