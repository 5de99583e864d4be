"""The ledger as it runs in the seed: it connects the rules and the book with the nodes' messages and the trainer.

One task writes. It gathers the facts of everything that happened since its last turn, makes them durable in one
transaction in a thread, and only then sends what depends on them: leases, verdicts, complete groups, the number of
groups that may be offered. So a busy ledger writes seldom and in bulk, and nobody hears of anything that a crash could
undo.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import trio

from codec.errors import PeerError, UsageError
from node.engines.base import SamplingParams, Version
from node.ledger.binding import Binding, KeyTaken, refuse_if_different, work_pairs
from node.ledger.book import Book
from node.ledger.facts import Fact
from node.ledger.messages import Reason, WorkMessage, encode
from node.ledger.model_limits import NO_LIMITS, ModelLimits
from node.ledger.node_messages import Expel, NodeMessages
from node.ledger.part_history import BASE, WHOLE, Change, no_adapter
from node.ledger.report import report
from node.ledger.routes import why_no_routes
from node.ledger.rules import Ledger
from node.ledger.session import GroupOffer, WorkSession
from node.ledger.state import AcceptedRollout, Group, Head
from node.ledger.terms import PLAIN, Terms
from node.ledger.turn_log import TurnLog
from node.settings.event_log import EventLog
from node.status.schema import ClientStatus, LedgerStatus
from swarm.transport.identity import peer_id

__all__ = ["VOLATILE", "LedgerService", "Turn"]

Send = Callable[[bytes, bytes], Awaitable[None]]
"""`send(peer, body)`: hand a `Work` body to the swarm. May lose it, must not wait for a slow peer, never raises."""

OffLoop = Callable[..., Awaitable[Any]]
"""Runs a function where it may block: `trio.to_thread.run_sync`."""

ORPHAN_TTL_S: Final = 3600.0
"""A session with `keep` waits this long for its trainer to come back."""
PRUNE_EVERY_S: Final = 600.0
VOLATILE: Final = "volatile/"
"""Sessions whose names begin with this end with the process: nobody can come back for them."""

_log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the writing task found."""

    facts: list[Fact]
    """To make durable first."""
    outbox: list[tuple[bytes, WorkMessage]]
    """Then to send."""
    ready: dict[WorkSession, list[Group]]
    """Complete groups by session, to hand over after that."""


class LedgerService:
    """The coordinator calls `member_up`, `member_lost`, `begun`, `sealed` and `hear`; the trainer server and the
    gateway open sessions. All calls are made on the event loop, and only `run`, `wait_closed` and `wait_durable`
    wait."""

    def __init__(
        self,
        ledger: Ledger,
        book: Book,
        send: Send,
        *,
        is_member: Callable[[bytes], bool] = lambda node: True,
        expel: Expel = lambda node, why: None,
        clock: Callable[[], float] = trio.current_time,
        off_loop: OffLoop = trio.to_thread.run_sync,
    ) -> None:
        """`is_member(node)`: whether a node holds a live membership lease; needed for a node that is heard before its
        `member_up`."""
        self._ledger = ledger
        self._book = book
        self._send = send
        self._clock = clock
        self._off_loop = off_loop
        self._due = trio.Event()
        self._writing = False
        self._written = trio.Event()
        self._nodes = NodeMessages(
            ledger, wake=self._wake, give_up=self._give_up, is_member=is_member, expel=expel, clock=clock
        )
        self.abilities = self._nodes.abilities
        self.followers, self.images = self._nodes.followers, self._nodes.images
        self.commit_stats = self._nodes.commit_stats
        self._offers: list[GroupOffer] = []
        """Offers that become groups after the next write."""
        self._sessions: dict[str, WorkSession] = {}
        sessions = {group.session for group in ledger.groups.values()}
        self._orphans = {
            name: clock() + (0.0 if name.startswith(VOLATILE) else ORPHAN_TTL_S) for name in sorted(sessions)
        }
        """Sessions that nobody has open, and when their groups are dropped."""
        self.clients: dict[object, Callable[[], Mapping[str, ClientStatus]]] = {}
        """By gateway that is served: the keys with quotas, by name, for the status."""
        self._prune_at = clock() + PRUNE_EVERY_S
        self._turn_log = TurnLog(ledger.quarantine.rewards)

    # ------------------------------------------------------------ the task that writes

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write and send until cancelled. Raises `UsageError` when the disk is full; nothing of that turn is sent."""
        task_status.started()
        while True:
            with trio.move_on_after(self._sleep_s()):
                await self._due.wait()
            self._due = trio.Event()
            turn = self.begin_turn()
            if turn.facts:
                self._writing = True
                await self._off_loop(self._book.write, turn.facts)
                self._writing = False
            self._turn_log.tell(turn.facts)
            self._written.set()
            self._written = trio.Event()
            self.take_offers()
            for node, message in turn.outbox:
                await self._send(node, encode(message))
            self.tell_sessions(turn.ready)
            if self._clock() >= self._prune_at:
                self._prune_at = self._clock() + PRUNE_EVERY_S
                await self._off_loop(self._book.prune)
                self._nodes.parts.keep_live(self._ledger.leases)
            await trio.lowlevel.checkpoint()

    def _sleep_s(self) -> float:
        times = [self._prune_at, *self._orphans.values()]
        if (wait_s := self._nodes.pending.wait_s()) is not None:
            times.append(self._clock() + wait_s)
        deadline = self._ledger.next_deadline()
        if deadline is not None:
            times.append(deadline)
        return max(0.0, min(times) - self._clock())

    def begin_turn(self) -> Turn:
        """Do what is due by time alone (expired leases, orphaned sessions, pending requests), and collect what is to
        be written and told."""
        now = self._clock()
        self._ledger.tick(now)
        if void := self._ledger.partial.cut_due(now):
            self._nodes.withdraw(void)
        for name in [name for name, until in self._orphans.items() if until <= now]:
            del self._orphans[name]
            self._nodes.withdraw(self._ledger.drop_session(name))
        noted = self._drop_unwanted(0)  # before the samples are leased again
        self._nodes.try_pending(now)
        self._nodes.ask_judgements(now)
        self._ledger.forget_strangers()
        self._drop_unwanted(noted)
        facts, outbox = self._ledger.take_facts(), self._nodes.take_outbox()
        # The groups that are complete now are durable after this turn's write; then their trainers may have them.
        held = self._ledger.quarantine.rewards.waiting
        ready = {
            s: list(self._ledger.hand_over_all(s.name, s.wanted - held if held else s.wanted))
            for s in self._sessions.values()
        }
        return Turn(facts, outbox, ready)

    def _drop_unwanted(self, noted: int) -> int:
        """Drop the groups that their followers do not want after what happened. `noted`: how many of the facts of this
        turn were noted. Returns how many are now."""
        facts = self._ledger.transitions.facts
        for group in self.followers.note(facts[noted:]):
            self._nodes.withdraw(self._ledger.drop(group))
        return len(facts)

    def take_offers(self) -> None:
        """Turn offers into groups, after a write: a group that was taken before is read from the book, which must know
        that it was taken."""
        offers, self._offers = self._offers, []
        for offer in offers:
            session, group = offer.session, offer.group
            if self._sessions.get(session.name) is not session:
                continue
            if self._ledger.just_taken(group):
                self._offers.append(offer)
                continue
            if (adapter := offer.sampling.extra.adapter) and adapter not in self.adapters:
                session.give_up(group, no_adapter(adapter, self.adapters))
                continue
            try:
                self._take_offer(offer)
            except KeyTaken as error:
                session.refuse(group, str(error))
        if offers:
            self._ledger.discard_old()
            self._wake()

    def _take_offer(self, offer: GroupOffer) -> None:
        session, group = offer.session, offer.group
        if group not in self._ledger.groups and (known := self._book.taken_work(group)) is not None:
            prompt, n, sampling = known
            refuse_if_different(session.name, work_pairs(n, offer.n, sampling, offer.sampling, prompt, offer.prompt))
            if not session.keep:  # offered again after a restart of the seed; the trainer has taken it since
                return
            if (kept := self._book.recall(group)) is not None:
                kept.since = self._clock()
                self._ledger.adopt(kept)
        self._ledger.offer(
            group,
            session.name,
            offer.prompt,
            offer.n,
            offer.sampling,
            max_lag=offer.max_lag,
            affinity=offer.affinity,
            whole=session.work.whole,
            now=self._clock(),
            terms=session.terms,
        )
        session.wanted.add(group)

    def tell_sessions(self, ready: dict[WorkSession, list[Group]]) -> None:
        """Hand over the groups that are durable now, and tell each session how many groups it may offer."""
        for name, session in self._sessions.items():
            groups = self._fresh(ready.get(session, []))  # none for a session that was opened during the write
            room = self._ledger.room(name, session.work.n, session.part, session.terms)
            session.hand_over(groups, session.offered + room)

    def _wake(self) -> None:
        self._due.set()

    # ------------------------------------------------------------ from the swarm

    def member_up(self, node: bytes) -> None:
        """`node` joined. A member that joins again is most likely a process that was started again."""
        if node in self._ledger.members:
            self._ledger.quarantine.rewards.joined_again(node, self._clock())
            self._wake()
        self._ledger.member_up(node)

    def member_lost(self, node: bytes) -> None:
        """The membership lease of `node` ended."""
        self._nodes.pending.pop(node)
        self._ledger.member_lost(node, self._clock())
        self._wake()

    def begun(self, version: Version, part: str = BASE) -> None:
        """The trainer of `part` (the base, or an adapter by name) began to publish `version`: its weights are at that
        version from now on."""
        self._ledger.begin_version(version, part)
        self._discard_unfetched()

    def trained(self, version: Version, part: str = BASE) -> None:
        """The weights of the trainer of `part` are at `version`, which may not be published yet."""
        self._ledger.note_trained(version, part)
        self._discard_unfetched()

    def abandoned(self) -> None:
        """The version that was begun will not be sealed."""
        self._ledger.abandon_version()
        self._wake()

    def sealed(self, head: Head, change: Change = WHOLE) -> None:
        """A version was sealed, which made `change`."""
        self._give_up_orphaned(self._ledger.advance(head, self._clock(), change))
        self._discard_unfetched()

    def set_adapters(self, adapters: Mapping[str, int]) -> None:
        """The adapters that the newest version has, as its weights say (`Change.adapters`); after a restart."""
        self._give_up_orphaned(self._ledger.set_adapters(adapters))
        self._wake()

    def lag_of(self, group: Group, done: AcceptedRollout) -> tuple[Version, int]:
        """(the version that lags of `group` are counted from now, how many versions behind it `done` is)."""
        counted = group.counted_from(self._ledger.head)
        if done.oldest[0] != counted[0]:
            return counted, group.max_lag + 1
        return counted, max(0, self._ledger.parts.since(group.adapter, done.oldest, counted))

    @property
    def head(self) -> Version:
        """The newest sealed version."""
        return self._ledger.head.name

    def lag_now(self, part: str, version: Version) -> int | None:
        """How many versions after `version` changed `part`; None: it is of another epoch than the newest."""
        head = self._ledger.head.name
        return self._ledger.parts.since(part, version, head) if version[0] == head[0] else None

    def own_versions(self, part: str, versions: Iterable[Version]) -> tuple[int, ...]:
        """The own version of `part` (an adapter, or the base) at each of `versions`; see `PartHistory.owns`."""
        return self._ledger.parts.owns(part, versions)

    def contradicted(self, node: bytes) -> None:
        """The signed rollout of `node` has other tokens than it told while they were drawn."""
        _log.warning("tokens_contradicted", peer=peer_id(node))
        self._ledger.quarantine.refuse(node, Reason.MALFORMED, self._clock())
        self._wake()

    @property
    def adapters(self) -> Mapping[str, int]:
        """The adapters that the newest version has, by name: each one's own version."""
        return self._ledger.parts.adapters

    def _give_up_orphaned(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._give_up(group, f"the adapter {group.adapter!r} was removed from the swarm")

    def _discard_unfetched(self) -> None:
        """Discard what is too old now in the groups that nobody has fetched yet."""
        for session in self._sessions.values():
            session.groups = deque(self._fresh(session.groups))
        self._wake()

    def _fresh(self, groups: Iterable[Group]) -> list[Group]:
        """The groups of which nothing is too old; samples of the others are generated again."""
        return [group for group in groups if not self._ledger.discard_stale(group.id, self._ledger.head.name)]

    def hear(self, node: bytes, body: bytes) -> None:
        """The body of a `Work` message from `node`, whose key is proven; see `NodeMessages.hear`."""
        self._nodes.hear(node, body)

    def _give_up(self, group: Group, why: str) -> None:
        """No node can generate `group`."""
        self._nodes.withdraw(self._ledger.drop(group.id))
        if (session := self._sessions.get(group.session)) is not None:
            session.give_up(group.id, why)

    # ------------------------------------------------------------ from the trainer server and the gateway

    def open(
        self,
        name: str,
        work: Binding,
        *,
        keep: bool = False,
        total: int | None = None,
        paced: bool = False,
        limits: ModelLimits = NO_LIMITS,
        terms: Terms = PLAIN,
    ) -> WorkSession:
        """Open a session for request groups of this work.

        `keep`: its work outlives the session, and the trainer may come back for it. `total`: how many groups will be
        offered, if that is known. `paced`: the trainer takes groups one after another, and how fast it does limits what
        is begun for it. `limits`: those of the model. `terms`: what it asks of its groups beyond their samples.

        Raises `PeerError` when the session is open already, `KeyTaken` when its name stands for other work,
        `UsageError` when the swarm does not have the adapter that the work is for.
        """
        if name in self._sessions:
            raise PeerError(f"rollouts.session: {name!r} is open already")
        if (adapter := work.sampling.extra.adapter) and adapter not in self.adapters:
            raise UsageError(no_adapter(adapter, self.adapters))
        if keep:
            self._ledger.bind(name, work)
        self._orphans.pop(name, None)
        self._ledger.reopen(name)
        session = WorkSession(name, work, keep, total, limits, terms)
        self._sessions[name] = session
        if paced:
            self._ledger.track_consumption(name, work.max_lag, self._clock(), session.part)
        self._expect(session)
        self._wake()
        return session

    async def wait_closed(self, name: str) -> None:
        """Wait until the session is not open."""
        while (session := self._sessions.get(name)) is not None:
            await session.ended.wait()

    def offer(
        self,
        session: WorkSession,
        group: bytes,
        prompt: bytes,
        *,
        n: int | None = None,
        sampling: SamplingParams | None = None,
        affinity: bytes = b"",
        max_lag: int | None = None,
    ) -> None:
        """Ask for samples of `prompt`; `n`, `sampling` and `max_lag` default to the session's. Groups of one `affinity`
        go to one node where possible. Raises `PeerError` for work that no node could do."""
        offer = session.offer(group, prompt, n, sampling, affinity, max_lag)
        if (adapter := offer.sampling.extra.adapter) and adapter not in self.adapters:
            raise PeerError(no_adapter(adapter, self.adapters))
        if offer.sampling.extra.routes and (why := self.why_no_routes(len(prompt) // 4, offer.sampling)) is not None:
            raise PeerError(why)
        if not self.images.has(group, offer.sampling.extra.images):
            raise PeerError("rollouts.offer: images can be sent only to the gateway's /v1/chat/completions")
        self.abilities.need(offer.sampling)
        self._offers.append(offer)
        self._expect(session)
        self._wake()

    def why_no_routes(self, prompt: int, sampling: SamplingParams) -> str | None:
        """Why samples after `prompt` tokens cannot come with routes, in a sentence; None: they can."""
        return why_no_routes(self._ledger.route_shape, prompt, sampling.max_tokens)

    def _expect(self, session: WorkSession) -> None:
        if (samples := session.samples_to_come()) is not None:
            self._ledger.expect(session.name, samples)

    def skip(self, session: WorkSession, skipped: int) -> None:
        """Of the session's `total` groups, `skipped` will not be offered."""
        session.skipped = skipped
        self._expect(session)

    def withdraw(self, session: WorkSession, group: bytes) -> None:
        """Nobody waits for this group of the session any more."""
        if (found := self._ledger.groups.get(group)) is not None and found.session != session.name:
            return
        self._offers = [offer for offer in self._offers if offer.group != group or offer.session is not session]
        self._nodes.withdraw(self._ledger.drop(group))
        session.forget(group)

    def taken(self, group: bytes) -> None:
        """The trainer has `group`."""
        if (found := self._ledger.groups.get(group)) and (session := self._sessions.get(found.session)):
            session.wanted.discard(group)
        self._ledger.taken(group, self._clock())
        self._wake()

    def stale(self, group: bytes, newest: Version) -> None:
        """The trainer refused a group that may be too old for it, counted from `newest`. It gets the group again: with
        other samples in the place of those that are, or as it is if none is, because the versions that came meanwhile
        changed other parts."""
        discarded = self._ledger.discard_stale(group, newest)
        if not discarded:
            self._ledger.hand_over_again(group)
        self._refused(group, discarded)

    def accuse(self, group: bytes, sample: int, why: str) -> None:
        """The trainer refused a group, because it proved a sample to be a lie: its node goes into quarantine, and its
        samples are generated again."""
        if self._ledger.quarantine.accuse(group, sample, f"the trainer's own computation: {why}", self._clock()):
            _log.warning("rollout_false", why=why)
        self._refused(group, True)

    def _refused(self, group: bytes, discarded: bool) -> None:
        """The trainer did not take a group; `discarded`: some of it is generated again."""
        if discarded and (found := self._ledger.groups.get(group)) is not None:
            self._ledger.trainer_refused(found.session, self._clock())
        self._wake()

    def close(self, session: WorkSession) -> None:
        """The owner of `session` closed it."""
        del self._sessions[session.name]
        session.ended.set()
        self._ledger.expect(session.name, None)
        self._ledger.forget_consumption(session.name)
        if session.keep:
            self._orphans[session.name] = self._clock() + ORPHAN_TTL_S
        else:
            self._nodes.withdraw(self._ledger.drop_session(session.name))
        self._wake()

    # ------------------------------------------------------------ for people

    @property
    def capacity(self) -> int:
        """How many sequences the nodes can hold; 0: no node generates."""
        return self._ledger.capacity

    def quarantine(self, node: bytes, why: str) -> bool:
        """On a person's request: no work for `node` until it is released. False: it was so already."""
        found = self._ledger.nodes.get(node)
        if found is not None and (penalty := found.reputation.penalty) is not None and penalty.until is None:
            return False
        self._ledger.quarantine.quarantine(node, why or "put there by hand", None, self._clock())
        self._wake()
        return True

    def release(self, node: bytes, why: str) -> bool:
        """On a person's request: `node` may work again. False: it was not in quarantine."""
        released = self._ledger.quarantine.release(node, why or "released by hand")
        self._wake()
        return released

    async def wait_durable(self) -> None:
        """Wait until everything that happened so far is durable."""
        while self._ledger.has_facts or self._writing:
            self._wake()
            await self._written.wait()

    def reputation(self) -> list[dict[str, Any]]:
        """The record of quarantines and releases; see `Book.reputation`."""
        return self._book.reputation()

    def status(self) -> LedgerStatus:
        """For people and programs."""
        unmet = self.abilities.unmet(self._sessions)
        found = report(self._ledger, self._clock(), self._nodes.budgets.left_out, unmet)
        for clients in self.clients.values():
            found.clients |= clients()
        return found
