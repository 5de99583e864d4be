"""The ledger at work, in the seed: rules and book between the nodes' messages and the trainer's iterator.

One task writes: it gathers the facts of everything that happened since its last turn, makes them durable in one
transaction off the loop, and only then sends what they allow (leases, verdicts, complete groups, room for more). So a
busy ledger writes seldom and in bulk, and nobody ever hears of what a crash could undo.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import trio

from codec.errors import PeerError
from node.engines.base import SamplingParams, Version
from node.ledger.assignment.abilities import EngineAbilities
from node.ledger.assignment.assigner import MOST_LEASES
from node.ledger.assignment.commit_stats import CommitStats
from node.ledger.assignment.waiting import Waiting
from node.ledger.binding import Binding, KeyTaken, refuse, work_pairs
from node.ledger.book import Book
from node.ledger.callers import Callers
from node.ledger.messages import (
    Abilities,
    Answer,
    AskAbilities,
    Cannot,
    GiveBack,
    Reason,
    Renew,
    Renewed,
    SignedRollout,
    Timesheet,
    Unfit,
    Verdict,
    Withdraw,
    WorkMessage,
    WorkRequest,
    decode,
    encode,
    open_rollout,
    unpack_floats,
)
from node.ledger.model_limits import NO_LIMITS, Limits
from node.ledger.report import report
from node.ledger.rules import Ledger
from node.ledger.session import Offer, Session
from node.ledger.state import Group, Head, Lease
from node.ledger.wording import ask_message, lease_message, withdrawals
from node.status.schema import LedgerStatus
from swarm.guard import Source, guarded

__all__ = ["VOLATILE", "LedgerService"]

Send = Callable[[bytes, bytes], Awaitable[None]]
"""`send(peer, body)`: hand a `Work` body to the swarm. May lose it, must not wait for a slow peer, never raises."""

Expel = Callable[[bytes, str], None]
"""`expel(node, why)`: what this node sends makes no sense; close its session. Must not wait, never raises."""

OffLoop = Callable[..., Awaitable[Any]]
"""Runs a function where it may block: `trio.to_thread.run_sync`."""

ORPHAN_TTL_S: Final = 3600.0
"""A session that is kept waits this long for its trainer to come back."""
PRUNE_EVERY_S: Final = 600.0
VOLATILE: Final = "volatile/"
"""Sessions whose name begins so end with this process: nobody can come back for them."""
NOT_YET: Final = frozenset({Reason.NO_WORK, Reason.TOO_NEW})
"""A request waits for work then. TOO_NEW: the node heard of the seal before we did, which is a matter of moments."""

_log = logging.getLogger(__name__)


class LedgerService:
    """Glue. The swarm's shell calls `member_up`, `member_lost`, `begun`, `sealed` and feeds `hear`; the trainer's desk
    opens sessions. All calls are made on the loop; none of them waits."""

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
        """`is_member(node)`: whether it holds a live membership lease, for nodes heard before their `member_up`.
        `expel`: for a node whose messages make no sense."""
        self._ledger = ledger
        self._book = book
        self._send = send
        self._is_member = is_member
        self._expel = expel
        self._callers = Callers(ledger.leases_of)
        self._clock = clock
        self._off_loop = off_loop
        self._due = trio.Event()
        self._writing = False
        self._written = trio.Event()
        self._out: list[tuple[bytes, WorkMessage]] = []
        self._offers: list[Offer] = []
        self._waiting = Waiting()
        self._sessions: dict[str, Session] = {}
        self.abilities = EngineAbilities(ledger, lambda node: self._say(node, AskAbilities()), clock)
        self.commit_stats = CommitStats()
        """What each version took on the nodes' engines."""
        sessions = {group.session for group in ledger.groups.values()}
        self._orphans = {
            name: clock() + (0.0 if name.startswith(VOLATILE) else ORPHAN_TTL_S) for name in sorted(sessions)
        }
        self._prune_at = clock() + PRUNE_EVERY_S

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write and send until cancelled. Raises `UsageError` when the disk is full: nothing is told then."""
        task_status.started()
        while True:
            with trio.move_on_after(self._sleep_s()):
                await self._due.wait()
            self._due = trio.Event()
            self._turn()
            facts, out = self._ledger.take_facts(), self._out
            self._out = []
            # Groups that are complete: this turn's write makes them durable, then the trainer may have them.
            ready = {s: list(self._ledger.hand_over_all(s.name, s.wanted)) for s in self._sessions.values()}
            if facts:
                self._writing = True
                await self._off_loop(self._book.write, facts)
                self._writing = False
            self._written.set()
            self._written = trio.Event()
            self._take_offers()
            for node, message in out:
                await self._send(node, encode(message))
            self._tell_sessions(ready)
            if self._clock() >= self._prune_at:
                self._prune_at = self._clock() + PRUNE_EVERY_S
                await self._off_loop(self._book.prune)
            await trio.lowlevel.checkpoint()

    def _sleep_s(self) -> float:
        times = [self._prune_at, *self._orphans.values()]
        if (wait_s := self._waiting.wait_s()) is not None:
            times.append(self._clock() + wait_s)
        deadline = self._ledger.next_deadline()
        if deadline is not None:
            times.append(deadline)
        return max(0.0, min(times) - self._clock())

    def _turn(self) -> None:
        """What time alone brings: expired leases, orphaned sessions, work for those who wait."""
        now = self._clock()
        self._ledger.tick(now)
        for name in [name for name, until in self._orphans.items() if until <= now]:
            del self._orphans[name]
            self._withdraw(self._ledger.drop_session(name))
        state = (self._ledger.pool.freed, self._ledger.head)
        for node in self._waiting.next(state, lambda node: self._ledger.nodes[node].rate.value, now):
            if (found := self._waiting.pop(node)) is not None:
                self._ask(node, *found, now)
        self._ledger.forget_strangers()

    def _take_offers(self) -> None:
        """Just after a write. A group that was taken before is had from the book, once that knows of it."""
        offers, self._offers = self._offers, []
        for offer in offers:
            session, group = offer.session, offer.group
            if self._sessions.get(session.name) is not session:
                continue
            if self._ledger.just_taken(group):
                self._offers.append(offer)
                continue
            try:
                self._take_offer(offer)
            except KeyTaken as error:
                session.refused[group] = (str(error), True)
                session.wake()
        if offers:
            self._ledger.discard_old()
            self._due.set()

    def _take_offer(self, offer: Offer) -> None:
        session, group = offer.session, offer.group
        if group not in self._ledger.groups and (known := self._book.taken_work(group)) is not None:
            prompt, n, sampling = known
            refuse(session.name, work_pairs(n, offer.n, sampling, offer.sampling, prompt, offer.prompt))
            if not session.keep:  # it was offered to a seed that had it done, and has come since
                return
            if (kept := self._book.recall(group)) is not None:
                self._ledger.adopt(kept)
        self._ledger.offer(
            group,
            session.name,
            offer.prompt,
            offer.n,
            offer.sampling,
            max_lag=session.max_lag,
            affinity=offer.affinity,
            whole=session.whole,
            now=self._clock(),
        )
        session.wanted.add(group)

    def _tell_sessions(self, ready: dict[Session, list[Group]]) -> None:
        for name, session in self._sessions.items():
            groups = self._fresh(ready.get(session, []))  # none for one that was opened during the write
            allowed = session.offered + self._ledger.room(name, session.n)
            if groups or allowed > session.allowed:
                session.groups = deque(sorted([*session.groups, *groups], key=lambda group: group.order))
                session.allowed = max(session.allowed, allowed)
                session.wake()

    # ------------------------------------------------------------ from the swarm

    def member_up(self, node: bytes) -> None:
        self._ledger.member_up(node)

    def member_lost(self, node: bytes) -> None:
        self._waiting.pop(node)
        self._ledger.member_lost(node, self._clock())
        self._due.set()

    def begun(self, version: Version) -> None:
        """The trainer began to publish a version: those are its weights from now on."""
        self._ledger.begin(version)
        self._recall()

    def abandoned(self) -> None:
        """What was begun will not be sealed."""
        self._ledger.abandon()
        self._due.set()

    def sealed(self, head: Head) -> None:
        """A version was sealed."""
        self._ledger.advance(head, self._clock())
        self._recall()

    def _recall(self) -> None:
        """What nobody has fetched yet may be too old by now."""
        for session in self._sessions.values():
            session.groups = deque(self._fresh(session.groups))
        self._due.set()

    def _fresh(self, groups: Iterable[Group]) -> list[Group]:
        """Those that are not too old; of the others some is drawn anew."""
        return [group for group in groups if not self._ledger.stale(group.id, self._ledger.head.name)]

    def hear(self, node: bytes, body: bytes) -> None:
        """A `Work` body came from `node` (its key proven). Where a node's nonsense ends: counted, logged, dropped; and
        where there is too much of it, so is the node. What it says beyond its budget is not looked at."""
        now = self._clock()
        if not self._callers.may_say(node, len(body), now):
            return
        if node not in self._ledger.members and self._is_member(node):
            self._ledger.member_up(node)
        if node not in self._ledger.nodes:  # it never was a member: it has no work, and gets none
            return
        with guarded(Source.WORK, node) as outcome:
            self._hear(node, decode(body))
        self._due.set()
        if outcome.is_rule_broken:
            self._ledger.quarantine.refuse(node, Reason.MALFORMED, now)
            self._blame(node, outcome.why, now, bug=not isinstance(outcome.error, PeerError))

    def _blame(self, node: bytes, why: str, now: float, *, bug: bool = False) -> None:
        """A body made no sense. One too many, or one that our code could not deal with, and its node has to go."""
        if bug or not self._callers.of(node).malformed.take(1.0, now):
            self._expel(node, f"work message: {why}")

    def _hear(self, node: bytes, message: WorkMessage) -> None:
        now = self._clock()
        match message:
            case WorkRequest():
                self._ask(node, message, now, now)
            case Renew(lease, token, tokens):
                left_s = self._ledger.renew(node, lease, token, tokens, now)
                self._out.append((node, Withdraw((lease,)) if left_s is None else Renewed(lease, left_s)))
            case SignedRollout(sealed):
                try:
                    rollout = open_rollout(node, sealed)
                except PeerError as error:
                    self._ledger.quarantine.refuse(node, Reason.BAD_SIGNATURE, now)
                    self._blame(node, str(error), now)
                    return
                reason = self._ledger.submit(node, rollout, sealed, now)
                self._waiting.stir(node)
                self._out.append((node, Verdict(rollout.lease, rollout.sample, reason)))
            case GiveBack(leases):
                self._waiting.pop(node)  # or it would get the same work at once
                self._callers.of(node).returned(self._ledger.give_back(node, leases, now), now)
            case Cannot(lease, token, why):
                self._callers.of(node).returned(1, now)
                group = self._ledger.cannot(node, lease, token, now)
                if group is not None:
                    self._give_up(group, why)
            case Answer(check, epoch, version, logprobs):
                self._ledger.quarantine.answer_check(node, check, (epoch, version), unpack_floats(logprobs), now)
            case Abilities():
                if self.abilities.hear(node, message):
                    self._waiting.stir(node)
            case Timesheet():
                if (found := self._ledger.nodes.get(node)) is not None:
                    found.timesheet = message
                    self.commit_stats.note(node, message, self._ledger.roots)
            case _:
                raise PeerError(f"work message: {type(message).__name__} is not for the ledger")

    def _give_up(self, group: Group, why: str) -> None:
        self._withdraw(self._ledger.drop(group.id))
        if (session := self._sessions.get(group.session)) is not None:
            session.impossible[group.id] = why
            session.wake()

    def _ask(self, node: bytes, request: WorkRequest, received: float, now: float) -> None:
        """Serve a request, now or when its node's budget allows it."""
        if self._callers.of(node).may_have(now):
            self._serve(node, request, received)
        elif node in self._ledger.members:
            self._waiting.postpone(node, request, received)

    def _serve(self, node: bytes, request: WorkRequest, received: float) -> None:
        self._waiting.pop(node)
        now = self._clock()
        if self.abilities.needed:
            self.abilities.ask(node)
        found = self._ledger.request_work(node, request, now, received)
        leases = found if isinstance(found, list) else []
        self._out.extend((node, lease_message(lease, self._ledger.groups[lease.group], now)) for lease in leases)
        if (check := self._ledger.quarantine.next_check(node, now)) is not None:
            self._out.append((node, ask_message(check)))
        holding = tuple(self._ledger.nodes[node].leases) if node in self._ledger.nodes else ()
        unheard = set(holding).difference(request.holding)
        if void := [lease for lease in request.holding if self._ledger.void(node, lease)]:
            self._out.append((node, Withdraw(tuple(void[:1024]))))
        left = request.capacity - sum(len(self._ledger.leases[lease].open) for lease in unheard)
        if isinstance(found, Reason) and found not in NOT_YET:
            self._out.append((node, Unfit(request.serial, found)))
        elif left > 0 and request.serial >= self._ledger.nodes[node].serial:
            self._waiting.narrow(node, request, received, left, holding)
            if len(leases) >= MOST_LEASES:  # there may be more for it
                self._waiting.stir(node)

    def _say(self, node: bytes, message: WorkMessage) -> None:
        self._out.append((node, message))
        self._due.set()

    def _withdraw(self, leases: list[Lease]) -> None:
        self._out.extend(withdrawals(leases))
        self._due.set()

    # ------------------------------------------------------------ from the trainer's desk

    def open(
        self,
        name: str,
        n: int,
        sampling: SamplingParams,
        max_lag: int = 1,
        *,
        keep: bool = False,
        whole: bool = False,
        total: int | None = None,
        prompts: bytes = b"",
        count: int = 0,
        paced: bool = False,
        limits: Limits = NO_LIMITS,
    ) -> Session:
        """A trainer wants groups of `n` samples, no older than `max_lag` versions. `keep`: it may come back for them.
        `whole`: each is drawn by one node in one batch. `total`: how many groups it will offer, if that is known.
        `prompts`, `count`: with `keep`, a hash of all the prompts and their number, if they are known. `paced`: it
        takes groups one after another, and what is begun for it is limited by how fast it does. `limits`: of the model.

        Raises `PeerError` when somebody has this session open, `KeyTaken` when its name stands for other work.
        """
        if name in self._sessions:
            raise PeerError(f"rollouts.session: {name!r} is open already")
        if keep:
            self._ledger.bind(name, Binding(n, sampling, max_lag, whole, prompts, count))
        self._orphans.pop(name, None)
        self._ledger.reopen(name)
        session = Session(name, n, sampling, max_lag, keep, whole, total, limits)
        self._sessions[name] = session
        if paced:
            self._ledger.pace(name, max_lag, self._clock())
        self._expect(session)
        self._due.set()
        return session

    async def closed(self, name: str) -> None:
        """Wait until nobody has this session open."""
        while (session := self._sessions.get(name)) is not None:
            await session.ended.wait()

    def offer(
        self,
        session: Session,
        group: bytes,
        prompt: bytes,
        *,
        n: int | None = None,
        sampling: SamplingParams | None = None,
        affinity: bytes = b"",
    ) -> None:
        """Want samples of `prompt`: as many, and sampled, as the session said unless said otherwise here. Groups of one
        `affinity` go to one node where they can. Raises `PeerError` for what no node could do."""
        offer = session.offer(group, prompt, n, sampling, affinity)
        self.abilities.need(offer.sampling)
        self._offers.append(offer)
        self._expect(session)
        self._due.set()

    def _expect(self, session: Session) -> None:
        if session.total is not None:
            left = session.total - session.offered - session.skipped
            self._ledger.expect(session.name, session.n * max(0, left))

    def skip(self, session: Session, skipped: int) -> None:
        """So many of the groups that were to come, in all, will not."""
        session.skipped = skipped
        self._expect(session)

    def withdraw(self, session: Session, group: bytes) -> None:
        """Nobody waits for this group any more."""
        self._offers = [offer for offer in self._offers if offer.group != group]
        self._withdraw(self._ledger.drop(group))
        session.impossible.pop(group, None)
        session.wanted.discard(group)

    def taken(self, group: bytes) -> None:
        """The trainer has it."""
        if (found := self._ledger.groups.get(group)) and (session := self._sessions.get(found.session)):
            session.wanted.discard(group)
        self._ledger.taken(group, self._clock())
        self._due.set()

    def stale(self, group: bytes, newest: Version) -> None:
        """The trainer was sent a group that is too old for it, who counts from `newest`: some of it is drawn anew."""
        self._refused(group, self._ledger.stale(group, newest))

    def accuse(self, group: bytes, sample: int, why: str) -> None:
        """The trainer found a sample that it was sent to be a lie: whoever signed it is out, and it is drawn anew."""
        if self._ledger.quarantine.accuse(group, sample, f"the trainer's own computation: {why}", self._clock()):
            _log.warning("a node was found out by the trainer: %s", why)
        self._refused(group, True)

    def _refused(self, group: bytes, anew: bool) -> None:
        """The trainer did not take a group that it was given."""
        if anew and (found := self._ledger.groups.get(group)) is not None:
            self._ledger.waits(found.session, self._clock())
        self._due.set()

    def close(self, session: Session) -> None:
        """The trainer hung up."""
        del self._sessions[session.name]
        session.ended.set()
        self._ledger.expect(session.name, None)
        self._ledger.gone(session.name)
        if session.keep:
            self._orphans[session.name] = self._clock() + ORPHAN_TTL_S
        else:
            self._withdraw(self._ledger.drop_session(session.name))
        self._due.set()

    # ------------------------------------------------------------ for people

    @property
    def capacity(self) -> int:
        """Sequences that the nodes can hold in all; 0: there are no nodes that generate."""
        return self._ledger.capacity

    def quarantine(self, node: bytes, why: str) -> bool:
        """By a person's word: no work for `node` until it is released. False: it was so already."""
        found = self._ledger.nodes.get(node)
        if found is not None and (penalty := found.reputation.penalty) is not None and penalty.until is None:
            return False
        self._ledger.quarantine.quarantine(node, why or "put there by hand", None, self._clock())
        self._due.set()
        return True

    def release(self, node: bytes, why: str) -> bool:
        """By a person's word. False: it was free."""
        released = self._ledger.quarantine.release(node, why or "released by hand")
        self._due.set()
        return released

    async def settled(self) -> None:
        """Wait until all that happened so far is durable."""
        while self._ledger.unwritten or self._writing:
            self._due.set()
            await self._written.wait()

    def reputation(self) -> list[dict[str, Any]]:
        """The record of quarantines and releases; see `Book.reputation`."""
        return self._book.reputation()

    def status(self) -> LedgerStatus:
        return report(self._ledger, self._clock(), self._callers.left_out, self.abilities.unmet(self._sessions))
