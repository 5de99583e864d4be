"""A member's process: a node, which has a replica and usually an engine, or a relay, which has neither.

swarm --> runtime --commit--> changes --> engine      (node.member.engine_runtime: staged while it generates)
swarm <-- Work messages <-- rollouts <--- engine
"""

import random
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog
import trio

from codec import Layout, Manifest
from codec.errors import PeerError, SwarmError, UsageError
from codec.formats.share import fields_of
from codec.sign import Key
from node.host.announce import announced, resolved
from node.host.audit import audit, close
from node.host.daily import Daily
from node.host.endpoint import Endpoint, NetworkOptions, open_store
from node.member import following
from node.member.finishing import Finishing
from node.member.held_shard import keep_to
from node.member.milestones import Look, Milestones
from node.member.placing import Placing
from node.member.state_room import room_of
from node.monitor import own_status, serve_monitor
from node.settings import keyfile, logs
from node.settings.config import JoinConfig, MemberConfig
from node.settings.memory import give_back_promptly
from node.settings.memory_plan import Plan
from node.settings.ticket import Ticket
from node.status import query
from node.status.memory import memory_status
from node.status.piece_map import piece_map
from node.status.reached import add_relay_counts, how_reached, log_reservations
from node.status.roster import stripes_of
from node.status.schema import NodeStatus, OwnStatus, RelayStatus
from node.status.sleeping import Rested, Sleep, Wake
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
from swarm.protocol.membership.renewals import Account
from swarm.protocol.startup import SavedReplica
from swarm.runtime import in_thread
from swarm.store import Store
from swarm.transport.base import Unreachable
from swarm.transport.identity import peer_id

if TYPE_CHECKING:
    from node.member.engine_runtime import EngineRuntime
    from swarm.runtime.replica.model import Model

__all__ = ["LEAVES_WITHIN_S", "Member", "OpenedModel", "run"]

_log = structlog.get_logger(__name__)
_LOG_EVERY_S: Final = 10.0
"""Interval of the log's lines about a seed that does not answer; it is dialed more often."""
LEAVES_WITHIN_S: Final = 10.0
"""For a node that has finished its work to say goodbye, stop its engines, and close its replica."""
_BUDGET_EVERY_S: Final = 0.2
"""Interval at which the bytes sent are counted against `--up-gb-day`."""


async def run(
    ticket: Ticket,
    config: JoinConfig,
    *,
    finishing: Finishing | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a node until cancelled, or until `finishing` was asked for and is over. Raises `UsageError`, or `Unreachable`
    when no seed answers.

    When the swarm gets a new key the node goes on in the new swarm, in this process and with its bits.
    """
    from codec import Checkpoint
    from node.engines.devices import check_numbers

    logs.configure(config.log_level, file=config.log_file)
    give_back_promptly()
    config = await in_thread(resolved, announced(config))
    if config.model is not None:
        await in_thread(Checkpoint.open, config.model)  # a wrong folder is reported before it uses the ticket
    await in_thread(check_numbers, config)
    key = keyfile.load_or_make(config.home / keyfile.NODE_KEY)
    finishing = finishing or Finishing(0.0)
    while not finishing.asked.is_set():
        way = await in_thread(following.follow, config.home, ticket)
        await _run_in_swarm(way, config, key, finishing, task_status)
        task_status = trio.TASK_STATUS_IGNORED


async def _run_in_swarm(
    way: following.Way, config: JoinConfig, key: Key, finishing: Finishing, task_status: trio.TaskStatus[None]
) -> None:
    """Run in one swarm until it has a successor, which is on disk on return, or until `finishing` is over."""
    from node.host import kernels
    from swarm.runtime.replica.holding import Holding
    from swarm.runtime.replica.model import Model

    with open_store(config.home, way.ticket.authority) as store:
        if config.replica == "none":
            await Member(way, config, key, store, finishing=finishing).run(task_status)
            return
        placing = Placing(config)
        refer = way.base is None and not config.copy_model  # the predecessor's checkpoint is removed in the end
        await in_thread(keep_to, store, config.held_shard)
        base, holding = way.base or config.model, Holding(config.held_shard)
        model = Model(store, base=base, refer=refer, on_disk=placing.on_disk, holding=holding)
        seal = await in_thread(model.restore) or model.nearly
        if model.changed_base is not None:
            _log.warning(
                "base_changed",
                folder=str(model.changed_base),
                hint="files in it were changed or removed since the last run; what is missing is fetched from members",
            )
        layout_hash = None if seal is None or model.layout is None else model.layout.hash
        opened = OpenedModel(model, None if seal is None else seal.manifest, layout_hash)
        member = Member(way, config, key, store, opened, _engine_maker(config, key, store, model), finishing)
        member.memory_plan = lambda: placing.plan
        async with trio.open_nursery() as nursery:
            tensors = () if model.layout is None else model.layout.tensors
            nursery.start_soon(kernels.warm_up, {spec.dtype for spec in tensors})
            if member.engine_runtime is not None:
                nursery.start_soon(member.engine_runtime.run)
            if config.raw_out is not None:
                nursery.start_soon(_write_raw_versions, member, model, config.raw_out)
            nursery.start_soon(audit, model, partial(_refetch, member))
            if model.nearly is not None:
                await _refetch(member, model.lost)
            try:
                await member.run(task_status)
                if not finishing.asked.is_set() and model.version not in {
                    saved.version for saved in store.checkpoints.list()
                }:
                    await in_thread(model.write_checkpoint)  # the base of the replica in the new swarm
            finally:
                await close(model)
            nursery.cancel_scope.cancel()


async def _write_raw_versions(member: "Member", model: "Model", out: Path) -> None:
    """Write each version of the file that the swarm carries to `out`. Raises `UsageError` when it cannot be written."""
    from node.host.raw import raw_content, write_raw

    while True:
        committed = member.next_commit
        content = await in_thread(model.read, raw_content)
        if content is not None:
            try:
                await in_thread(write_raw, content, out)
            except OSError as error:
                raise UsageError(f"Cannot write {out}: {error.strerror}.") from error
            _log.info("wrote", file=str(out), bytes=len(content))
        await committed.wait()


async def _refetch(member: "Member", blocks: int) -> None:
    """So many blocks are damaged: have them fetched from other members."""
    await member.endpoint.runtime.post(Damaged(blocks))


def _engine_maker(config: JoinConfig, key: Key, store: Store, model: "Model") -> "MakeEngine | None":
    """Makes the engine's runtime once it is known how to send; None: the node has no engine."""
    if config.engine == "none":
        return None
    from node.member.engine_runtime import EngineRuntime

    return partial(EngineRuntime, config, key, store, model)


MakeEngine = Callable[[Callable[[bytes], None]], "EngineRuntime"]


class OpenedModel(NamedTuple):
    """A node's replica as the store left it."""

    model: "Model"
    held: bytes | None
    """Sealed manifest of the version that it is; None: no version yet."""
    layout_hash: bytes | None


class Member:
    """A running member. The runtime notifies it (`swarm.runtime.Application`).

    `opened` None: a relay. `make_engine` gets `send_work`, which hands a `Work` body to the authority.
    """

    def __init__(
        self,
        way: following.Way,
        config: MemberConfig,
        key: Key,
        store: Store,
        opened: OpenedModel | None = None,
        make_engine: MakeEngine | None = None,
        finishing: Finishing | None = None,
    ) -> None:
        self.config, self.key, self.ticket = config, key, way.ticket
        self._store = store
        self._finishing = finishing
        self._patience_s = max(config.wait_for_seed_s, following.PATIENCE_S if way.followed else 0.0)
        self._is_relay = opened is None
        self._model = None if opened is None else opened.model
        self._joined = trio.Event()
        self._over: SwarmError | None = None
        """Why it ends."""
        self._end = trio.Event()
        self.next_commit = trio.Event()
        """Set when the replica becomes another version, and replaced then."""
        self.memory_plan: Callable[[], Plan | None] = lambda: None
        """What this process needs, for the status; None: not known yet."""
        self.news = ""
        """A sentence about what is wrong, for people; empty: nothing."""
        self._refused = ""
        """Why the seed does not admit this member for now; empty: it has not said so."""
        self._quiet_until = 0.0
        """When the log may mention an unreachable seed again."""
        self.engine_runtime = None if make_engine is None else make_engine(self.send_work)
        self.core = self._core(opened)
        self._daily: Daily | None = None
        if config.up_gb_day is not None:
            self._daily = Daily(
                config.home, config.up_gb_day, config.planned_up_mbit, lambda: self.endpoint.transport.traffic.sent
            )
        # The runtime calls `committed` and `notify`, so what they use is set before it is built.
        self.endpoint = Endpoint.build(
            self.core, key, way.ticket.authority, store, self,
            NetworkOptions(
                config.listen, config.announce, config.via, config.up_mbit,
                relay_for=self._may_reserve if self._is_relay else None, state_room=room_of(config, self.core),
            ),
            tuning=Tuning.named(way.ticket.preset), model=None if opened is None else opened.model,
        )  # fmt: skip
        self.core.membership.renewals.fill_account = self._fill_account
        logs.name_peers(self._name_of)

    def _core(self, opened: OpenedModel | None) -> Peer:
        config, ticket = self.config, self.ticket
        shard = config.held_shard if isinstance(config, JoinConfig) else None
        join = Join(
            ticket.capability, config.announce + tuple(circuit(relay) for relay in config.via), config.name,
            config.region, config.planned_up_mbit, config.planned_down_mbit, self._is_relay,
            *fields_of(shard),
        )  # fmt: skip
        return Peer(
            self.key, ticket.authority, ticket.addrs, join, Tuning.named(ticket.preset),
            random.Random(secrets.randbits(64)),
            SavedReplica() if opened is None else SavedReplica(opened.held, opened.layout_hash),
            latest_boot=lambda now: latest_boot(time.time()),
        )  # fmt: skip

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled. Returns when the swarm has a successor, which is on disk then. Raises `SwarmError`
        when the authority refuses this member for good."""
        try:
            async with self.endpoint.running(leave=True), trio.open_nursery() as nursery:
                await nursery.start(query.serve, self.config.home, self.status, self._prove, self._rest)
                if self.config.monitor_address is not None:
                    await nursery.start(
                        serve_monitor, self.config.monitor_address, self.config.home, own_status(self.status)
                    )
                if self._daily is not None:
                    nursery.start_soon(self._watch_budget, self._daily)
                nursery.start_soon(log_reservations, self.endpoint.transport)
                nursery.start_soon(self._give_up_without_seed)
                nursery.start_soon(Milestones(trio.current_time()).tell, self._look)
                if self._finishing is not None:
                    nursery.start_soon(self._finish, self._finishing)
                _log.info("starting", peer_id=peer_id(self.key.public), addrs=", ".join(self.endpoint.addrs))
                task_status.started()
                await self._end.wait()
                if self._over is not None:
                    raise self._over
                nursery.cancel_scope.cancel()
        finally:
            if self._daily is not None:
                self._daily.close()

    async def _give_up_without_seed(self) -> None:
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

    async def _finish(self, finishing: Finishing) -> None:
        """Once asked to: finish the work that the engine holds, then end; the lease is released as at any end."""
        await finishing.asked.wait()
        if self.engine_runtime is not None:
            _log.info("finishing", within_s=finishing.within_s)
            done = await self.engine_runtime.worker.finish(finishing.within_s)
            _log.info("finished", given_back=not done)
        self._end.set()

    def _look(self) -> Look:
        """What is told to the person who started this process."""
        core, layout = self.core, self._layout()
        active = core.catchup.active
        block_bytes = layout.nbytes / layout.n_blocks if layout is not None and layout.n_blocks else 0.0
        heartbeat = core.state.leases.heartbeat
        look = Look(
            held=None if active else core.state.held,
            head=None if heartbeat is None else heartbeat.head,
            fetched=core.caught_up if active else None,
            of_bytes=round(core.catchup.total_blocks * block_bytes) or None,
            received_bytes=self.endpoint.transport.traffic.received,
            pushed_bytes=self.endpoint.runtime.counts.pushed,
            doing="passing chunks on, up to {}" if self._is_relay else "holding {} and passing it on",
        )
        return look if self.engine_runtime is None else self.engine_runtime.look_at(look)

    def _layout(self) -> Layout | None:
        return None if self._model is None or self._model.replica is None else self._model.replica.layout

    def _name_of(self, peer: bytes) -> str:
        """The name of a peer in the log."""
        if peer == self.ticket.authority:
            return "the seed"
        member = None if self.core.state.roster is None else self.core.state.roster.member_of(peer)
        return "" if member is None else member.name

    def _fill_account(self, account: Account) -> None:
        """Bring the figures that heartbeats report up to date."""
        traffic = self.endpoint.transport.traffic
        account.sent_bytes, account.received_bytes = traffic.sent, traffic.received
        if self.engine_runtime is not None:
            account.engine = self.engine_runtime.engine_name
            account.engine_version = self.engine_runtime.engine_version
            account.tokens_s = self.engine_runtime.worker.tokens_per_s

    async def _watch_budget(self, daily: Daily) -> None:
        """Keep the core's budget for today up to date."""
        while True:
            if (budget := daily.look()) is not None:
                await self.endpoint.runtime.post(budget)
            await trio.sleep(_BUDGET_EVERY_S)

    def stop(self, why: SwarmError) -> None:
        """End for this reason; the first one counts."""
        self._over = self._over or why
        self._end.set()

    # ------------------------------------------------------------ what the runtime tells us

    def committed(self, version: VersionId, manifest: Manifest, changes: Any) -> None:
        _log.info("holds", version=str(version), root=manifest.root)
        self.next_commit.set()
        self.next_commit = trio.Event()
        if self.engine_runtime is not None:
            self.engine_runtime.committed(version, manifest.root, changes)

    def notify(self, notice: Notice) -> None:
        match notice:
            case WorkHeard(peer, body):
                if self.engine_runtime is not None and peer == self.ticket.authority:
                    self.engine_runtime.worker.hear(body)
                return
            case Joined():
                self._joined.set()
                self.news = ""
            case AuthorityUnreachable(why):
                self.news = why
                if trio.current_time() < self._quiet_until:
                    return
                self._quiet_until = trio.current_time() + _LOG_EVERY_S
            case JoinRefused("ticket" | "capability" | "shard", why):
                self.stop(UsageError(why))
            case SuccessionHeard(sealed):
                self._succeeded(sealed)
            case ClocksApart():
                self.news = (
                    "This machine's clock and the seed's differ by a month or more: set them. Until then this machine "
                    "ignores the seed's messages."
                )
            case JoinRefused("later", why):
                self.news = self._refused = why
            case CatchupFailed(detail):
                self.stop(SwarmError(
                    f"This machine cannot hold the swarm's model: {detail}. "
                    "Remove the swarm's folder from this home, or use another home (--home), and join again."
                ))  # fmt: skip
            case Equivocation(version):
                self.stop(SwarmError(
                    f"The seed has signed two different versions {version}, so nothing that it signs can be trusted. "
                    "Leave the swarm, and ask the person who runs the seed."
                ))  # fmt: skip
            case _:
                pass
        _log.info(notice.log_name, **notice.log_fields())

    def _succeeded(self, sealed: bytes) -> None:
        """The swarm has a new key: write down its successor, and end in this swarm."""
        try:
            following.ticket_of(sealed, self.ticket.authority)
        except PeerError as error:
            _log.warning("succession_ignored", why=str(error))
            return
        following.note(self._store, sealed)
        self._end.set()

    def send_work(self, body: bytes) -> None:
        """Hand a `Work` body to the authority. Without a session it is lost, and a session is looked for at once. It is
        also lost until the authority has welcomed us or answered our hello: before that it bans us for work."""
        authority = self.ticket.authority
        if self.endpoint.runtime.peers.get(authority) is None:
            self.core.membership.come_back()
        elif self.core.admits(authority):
            self.endpoint.send_work(authority, body)

    def _may_reserve(self, peer: bytes) -> bool:
        """Whether this relay gives `peer` a reservation: the authority and members, while it may send today."""
        roster = self.core.state.roster
        if self._daily is not None and self._daily.spent:
            return False
        return peer == self.ticket.authority or (roster is not None and roster.member_of(peer) is not None)

    # ------------------------------------------------------------ for people and programs

    async def _prove(self) -> None:
        if self.engine_runtime is not None:
            await self.engine_runtime.prove()

    async def _rest(self, request: Sleep | Wake) -> Rested:
        if self.engine_runtime is None:
            return Rested(why="This member has no engine: name the home of a node that has one (--home).")
        return await self.engine_runtime.sleep.answer(request)

    def status(self) -> NodeStatus | RelayStatus:
        state, transport = self.core.state, self.endpoint.transport
        status = (RelayStatus if self._is_relay else NodeStatus)(
            swarm=peer_id(self.ticket.authority),
            head=None if state.leases.heartbeat is None else state.leases.heartbeat.head,
            nodes=[self._own_status()],
            stripes=stripes_of(state.roster),
            pieces=piece_map(state, is_seed=False),
            message=self.news or (self._daily.news if self._daily is not None else ""),
            seed_reached=how_reached(transport, self.ticket.authority, None),
            relays=transport.reservations.state,
        )
        if isinstance(status, RelayStatus) and transport.relay is not None:
            add_relay_counts(status, transport.relay)
        return status

    def _own_status(self) -> OwnStatus:
        state, traffic, counts = self.core.state, self.endpoint.transport.traffic, self.endpoint.runtime.counts
        listed = None if state.roster is None else state.roster.member_of(self.key.public)
        own = OwnStatus(
            slot=-1 if state.grant is None else state.grant.slot,
            name=self.config.name,
            peer=peer_id(self.key.public),
            standing=self.core.standing(trio.current_time()).value,
            dialable=listed is not None and listed.dialable,
            held=state.held,
            root=None if state.manifest is None or state.held is None else state.manifest.root.hex(),
            catching_up=self.core.caught_up,
            phase=self.core.catchup.phase.value,
            sent_bytes=traffic.sent,
            received_bytes=traffic.received,
            pushed_bytes=counts.pushed,
            duplicate_bytes=counts.duplicates,
            memory=memory_status(self.memory_plan()),
        )
        if state.shard is not None:
            own.shard = str(state.shard)
        if self._daily is not None:
            own.uplink_today = self._daily.status()
        if self.engine_runtime is not None:
            self.engine_runtime.add_status(own)
        return own
