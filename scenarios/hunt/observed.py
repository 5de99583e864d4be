"""The product's `Runtime` and `Coordinator`, and a look at each effect: faults strike and invariants are checked.

Nothing here decides anything that the product decides.
"""

from collections.abc import Callable
from typing import Any, Final

import trio

from codec import Replica, open_manifest
from node.coordinator.coordinator import Coordinator
from node.ledger.messages import Verdict, WorkLease, decode
from scenarios.hunt.bounds import Bounds
from scenarios.hunt.coverage import event_name, role_of, state_of
from scenarios.hunt.hostile import CONTENT
from scenarios.hunt.machine import MACHINE, Machine
from swarm.protocol.authority import Authority
from swarm.protocol.core.documents import has_bit
from swarm.protocol.core.events import (
    Announce,
    Close,
    Effect,
    Event,
    Heard,
    Notify,
    PeerDown,
    Persist,
    Run,
    Send,
    Timer,
    VersionApplied,
)
from swarm.protocol.core.notices import BadBytes, PeerStuck
from swarm.protocol.core.standing import Standing
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import HeartbeatNews, ManifestNews, Message, Reports, Welcome, Work
from swarm.protocol.member import Peer
from swarm.runtime import Runtime
from swarm.runtime.replica.model import Model

__all__ = ["HuntCoordinator", "HuntRuntime", "bits_of"]

_MAY_BE_LOST: Final = (Reports, Work)
"""Messages of which the protocol says that they may be lost or come twice."""
_LATE_TICKS: Final = 5
"""A lease that is past its end is ended within so many ticks of the authority."""


def bits_of(model: Model) -> list[Any]:
    """The bits that a replica has now, block by block."""
    replica = model.replica
    assert isinstance(replica, Replica)
    return [replica.block(number) for number in range(replica.layout.n_blocks)]


def _name_of(effect: Effect) -> str:
    """What an effect sends, runs, keeps or tells; empty: its kind says all."""
    match effect:
        case Send(_, Work() as work):
            return type(decode(work.body)).__name__
        case Send():
            return type(effect.message).__name__
        case Run():
            return effect.job.kind
        case Persist():
            return effect.name
        case Notify():
            return type(effect.notice).__name__
        case _:
            return ""


class HuntRuntime(Runtime):
    """A runtime whose effects are looked at."""

    def __init__(self, core: Any, *args: Any, **options: Any) -> None:
        self._machine: Machine = MACHINE.get()
        usual: Callable[[Event, float], list[Effect]] = core.apply
        coverage, role = self._machine.tally.coverage, role_of(core)
        coverage.note_core(core)
        self._bounds = Bounds(core, self._machine.oracle, self._machine.name)

        def apply(event: Event, now: float) -> list[Effect]:
            coverage.pairs[role, state_of(core, now), event_name(event)] += 1
            self._bounds.note_event(event)
            if isinstance(event, PeerDown):
                self._machine.oracle.noticed(event.peer)
            effects = usual(event, now)
            if isinstance(event, Timer) and isinstance(core, Authority):
                self._check_leases(core, now)
            if isinstance(event, Heard) and isinstance(event.message, HeartbeatNews) and isinstance(core, Peer):
                self._check_gives(core)
            return effects

        core.apply = apply
        self._machine.held = lambda: core.state.held
        if isinstance(core, Authority):
            self._machine.refuses = lambda: core.egress.status().refused > 0
        super().__init__(core, *args, **options)

    def perform(self, effects: list[Effect]) -> None:
        machine = self._machine
        for effect in effects:
            kind, name = type(effect).__name__, _name_of(effect)
            machine.step(f"before {kind}", name)
            self._look(effect)
            machine.look(f"{kind} {name}".strip())
            super().perform(self._performed(effect))
            machine.step(f"after {kind}", name)

    def _performed(self, effect: Effect) -> list[Effect]:
        """What is performed instead of an effect: messages may be lost or repeated, and the node may be hostile."""
        machine = self._machine
        found: list[Effect] = []
        for each in machine.hostile.instead_of(effect, machine.key, self.manifests.authority, machine.rng):
            if isinstance(each, Send) and isinstance(each.message, _MAY_BE_LOST):
                lost, twice = machine.rng.random() < machine.loses, machine.rng.random() < machine.repeats
                found += [] if lost else [each, each] if twice else [each]
            else:
                found.append(each)
        return found

    # ------------------------------------------------------------ invariants

    def _look(self, effect: Effect) -> None:
        machine, oracle, core = self._machine, self._machine.oracle, self._core
        if isinstance(effect, Announce):
            self._note_shown(effect.manifest)
        elif isinstance(effect, VersionApplied):
            oracle.shown(effect.version, effect.manifest.root, machine.name)
            self._check_replica(effect.version)
        elif isinstance(effect, Close) and effect.ban_s:
            honest = not oracle.suspects & {effect.peer, machine.key.public}
            oracle.check("no honest peer blamed", not honest, f"{machine.name} bans a peer: {effect.why}")
            if self._is_authority:
                oracle.banned.add(effect.peer)
        elif isinstance(effect, Notify) and isinstance(effect.notice, PeerStuck | BadBytes):
            oracle.noticed(effect.notice.peer)
        elif isinstance(effect, CONTENT):
            self._check_right(core, effect.peer)
        elif isinstance(effect, Send) and self._is_authority:
            self._look_at_message(effect.message)
        self._bounds.note_effect(effect)
        self._bounds.check_memory(self)
        self._check_results()

    def _look_at_message(self, message: Message) -> None:
        """A message of the seed."""
        if isinstance(message, ManifestNews | Welcome) and message.manifest:
            self._note_shown(message.manifest)
        elif isinstance(message, Work):
            said = decode(message.body)
            if isinstance(said, Verdict):
                self._machine.oracle.told(said.lease, said.sample, accepted=said.refused is None)
            elif isinstance(said, WorkLease):
                self._machine.oracle.leased(said.lease, said.token)

    def _note_shown(self, sealed: bytes) -> None:
        manifest = open_manifest(sealed, self.manifests.authority)
        version = VersionId(manifest.epoch, manifest.version)
        self._machine.oracle.shown(version, manifest.root, self._machine.name)

    def _check_replica(self, version: VersionId) -> None:
        model = None if self._jobs is None else self._jobs.model
        if model is not None and model.version == version:
            self._machine.oracle.check_bits(version, bits_of(model), self._machine.name)

    def _check_results(self) -> None:
        """A node forgets a finished rollout when the seed has answered it, or when it drops its lease."""
        machine = self._machine
        if machine.inventory is None:
            return
        now = set(machine.inventory.results)
        for lease, sample in machine.unanswered - now:
            may = (lease, sample) in machine.oracle.answered or lease in machine.dropped
            machine.oracle.check("no rollout forgotten", may, f"{machine.name}: sample {sample} of lease {lease}")
        machine.unanswered = now

    def _check_leases(self, core: Authority, now: float) -> None:
        """The authority's book has no lease that ended long ago."""
        ended_s = now - _LATE_TICKS * core.state.tuning.tick_s
        for slot in core.book.leases:
            live = core.standing(slot, ended_s) is not Standing.DEAD
            self._machine.oracle.check("no lease past its end", live, f"the lease of slot {slot} is not ended")

    def _check_gives(self, core: Peer) -> None:
        """A member whose lease is over, as the newest heartbeat says, is ready to send no content."""
        may = core.state.grant is None or not core.state.exchange.gives or _has_lease(core)
        self._machine.oracle.check("no lease past its end", may, f"{self._machine.name} gives without a lease")

    def _check_right(self, core: Any, peer: bytes) -> None:
        """Content goes only to holders of a lease, and a member without one sends none. Nothing more is sent in a
        session that is being closed."""
        session = self.peers.get(peer)
        if session is None or session._closing:
            return
        now = trio.current_time()
        if isinstance(core, Authority):
            slot = core.book.slot_of.get(peer)
            ended_s = now - core.state.tuning.tick_s  # a lease that ends is ended in the next tick
            may = slot is not None and core.standing(slot, ended_s).rights.content
            self._machine.oracle.check("no lease past its end", may, "the seed sends content to a peer without a lease")
        elif isinstance(core, Peer):
            self._machine.oracle.check(
                "no lease past its end", _has_lease(core), f"{self._machine.name} sends content without a lease"
            )


def _has_lease(core: Peer) -> bool:
    """Whether a member has a lease, as far as it can know: the newest heartbeat says so, or is older than its grant."""
    grant, heartbeat = core.state.grant, core.state.leases.heartbeat
    if grant is None or heartbeat is None:
        return grant is not None
    return grant.issued >= heartbeat.time or has_bit(heartbeat.live, grant.slot)


class HuntCoordinator(Coordinator):
    """A seed that says when it has started, and that has a trainer."""

    def __init__(self, config, key, store, model, head, boot, book) -> None:
        super().__init__(config, key, store, model, head, boot, book)
        machine = MACHINE.get()
        machine.oracle.booted(boot, machine.name)
        machine.oracle.started(self.head, machine.name)
        machine.oracle.shown(self.head, self.replica.root, machine.name)
        machine.oracle.check_bits(self.head, bits_of(model), machine.name)
        machine.oracle.ledger_started(self.ledger._ledger, book)

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        attend = MACHINE.get().attend
        async with trio.open_nursery() as nursery:
            await nursery.start(super().run)
            task_status.started()
            nursery.start_soon(attend, self)
