"""The rules of work: groups of samples -> leases -> accepted rollouts. Pure: time is an argument, nothing is sent.

    offered ---> free --lease--> leased --accepted--> done --all n--> ready --taken--> forgotten
                  ^                |                    |
                  +-- expired, refused, node lost,      |
                  |   given back -------+               |
                  +-- too old, or its node lied --------+

A sample is in exactly one place. What changes is also noted as facts; whoever calls must make `take_facts()` durable
before it tells anybody of the outcome, so that after a crash the ledger goes on where the world believes it stands.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Iterable

from node.engines.base import SamplingParams, Version
from node.ledger.checks import Check, Checks
from node.ledger.conduct import Sentence
from node.ledger.dealer import Dealer
from node.ledger.facts import (
    Accepted,
    Advanced,
    Discarded,
    Dropped,
    Fact,
    Leased,
    Offered,
    Quarantined,
    Released,
    Requeued,
    Taken,
)
from node.ledger.intake import Intake
from node.ledger.judge import lag_reason, oldest_version
from node.ledger.leases import LeaseTable
from node.ledger.messages import Reason, Rollout, WorkRequest
from node.ledger.pool import Pool, check_offer
from node.ledger.settings import Settings
from node.ledger.state import Done, Group, Head, Lease, Node

__all__ = ["Ledger"]


class Ledger:
    """All the state of work. Every method may add facts; none does IO. `now`: any clock that only moves forward, s.

    `rng` picks the samples that are checked: nobody else may foresee it.
    """

    def __init__(self, settings: Settings, head: Head, rng: random.Random | None = None) -> None:
        self.settings = settings
        self.head = head
        self.roots: OrderedDict[Version, bytes] = OrderedDict({head.name: head.root})
        self.pool = Pool()
        self.table = LeaseTable(settings.remembered)
        self.nodes: dict[bytes, Node] = {}
        self.members: set[bytes] = set()
        self.checks = Checks(settings)
        self.intake = Intake(settings, self.table)
        self.dealer = Dealer(settings, self.pool, self.table, self.nodes, self.members)
        self._rng = rng or random.Random(0)
        self._facts: list[Fact] = [Advanced(head)]

    @property
    def groups(self) -> dict[bytes, Group]:
        return self.pool.groups

    @property
    def leases(self) -> dict[int, Lease]:
        return self.table.leases

    def take_facts(self) -> list[Fact]:
        """What happened since the last call, in order; the caller writes it down."""
        facts, self._facts = self._facts, []
        return facts

    @property
    def unwritten(self) -> bool:
        """Something happened that nobody has taken to write down."""
        return bool(self._facts)

    def just_taken(self, group: bytes) -> bool:
        """`group` was taken, and the book does not know it yet."""
        return Taken(group) in self._facts

    # ------------------------------------------------------------ the trainer's side

    def offer(
        self,
        group: bytes,
        session: str,
        prompt: bytes,
        n: int,
        sampling: SamplingParams,
        *,
        max_lag: int | None = None,
        affinity: bytes = b"",
        whole: bool = False,
        now: float = 0.0,
    ) -> bool:
        """Ask for `n` samples of `prompt` (packed tokens). False when a group of this id is known: it simply goes on.

        `max_lag`, `affinity`, `whole`: see `Group`. Raises `ValueError` for what no node could do; see `check_offer`.
        """
        check_offer(prompt, n, sampling)
        if group in self.groups:
            return False
        lag = self.settings.max_lag if max_lag is None else max_lag
        order, free = self.pool.next_order, set(range(n))
        found = Group(group, session, order, prompt, n, sampling, lag, affinity, whole, now, free=free)
        self.pool.add(found)
        self._facts.append(Offered(found))
        return True

    def adopt(self, group: Group) -> None:
        """Take in a group that the book kept."""
        self.pool.add(group)
        self.intake.adopt(group)

    def adopt_lease(self, lease: Lease, now: float) -> None:
        """Take in a lease that the book kept; its samples must be marked in its group already."""
        self.table.add(lease)
        node = self._node(lease.node)
        node.leases.add(lease.id)
        node.outstanding += len(lease.open)
        node.busy_since = now
        node.pulse.hear(now + self.settings.return_s)

    def drop(self, group: bytes) -> list[Lease]:
        """The trainer no longer wants `group`. Gives the leases that are void now, for their nodes to be told."""
        found = self.pool.remove(group)
        if found is None:
            return []
        leases = [self.leases[lease] for lease in sorted(set(found.leased.values()))]
        for lease in leases:  # nothing goes back to a group that is gone
            self.nodes[lease.node].outstanding -= len(lease.open)
            lease.open.clear()
            self._forget(lease, Reason.WITHDRAWN)
        self._facts.append(Dropped(group))
        return leases

    def drop_session(self, session: str) -> list[Lease]:
        """The trainer that opened `session` is gone and nobody will ask for its groups again."""
        groups = [group.id for group in self.groups.values() if group.session == session]
        return [lease for group in groups for lease in self.drop(group)]

    def reopen(self, session: str) -> None:
        """The trainer of `session` came back: what was on its way to it, and not taken, is handed over again."""
        self.pool.reopen(session)
        self.discard_old()

    def hand_over(self, session: str) -> Group | None:
        """The next complete group of `session`, or None. It stays known until `taken`."""
        return self.pool.hand_over(session)

    def taken(self, group: bytes) -> None:
        """The trainer has `group` and has made it its own: the ledger may forget it."""
        found = self.groups.get(group)
        if found is not None and found.complete:
            self.pool.remove(group)
            self._facts.append(Taken(group))

    def room(self, session: str, n: int) -> int:
        """Groups of `n` samples that the trainer should offer now: enough to keep the nodes busy, no more.

        Complete groups count until they are taken, so a trainer that is slow to take them is not drowned in them.
        """
        capacity = self.capacity
        wanted = self.settings.ahead * capacity if capacity else self.settings.cold_groups * n
        return max(0, math.ceil((min(wanted, self.settings.max_open_samples) - self.pool.samples(session)) / n))

    @property
    def capacity(self) -> int:
        """Sequences that the members can hold in all."""
        return sum(self.nodes[key].capacity for key in self.members if key in self.nodes)

    def advance(self, head: Head, now: float | None = None) -> None:
        """A version was sealed: the staleness bound moves, and what fell out of it must be drawn anew."""
        if head.name < self.head.name:
            raise ValueError(f"head: {head.name} after {self.head.name}")
        if now is not None and head.name > self.head.name:
            self.dealer.timetable.sealed(head.name, now)
        self.head = head
        self.roots[head.name] = head.root
        while len(self.roots) > self._longest_lag() + 16:
            self.roots.popitem(last=False)
        self._facts.append(Advanced(head))
        self.discard_old()

    def discard_old(self) -> None:
        """Free the samples of groups not yet handed over that fell out of their staleness bound."""
        for group in self.groups.values():
            for sample, done in list(group.done.items()):
                if (reason := lag_reason(done.oldest, self.head, group.max_lag)) and not group.handed_over:
                    self._discard(group, sample, reason)

    def _discard(self, group: Group, sample: int, why: Reason) -> None:
        self.pool.undo(group, sample)
        self._facts.append(Discarded(group.id, sample, str(why)))

    def _longest_lag(self) -> int:
        return max((group.max_lag for group in self.groups.values()), default=self.settings.max_lag)

    # ------------------------------------------------------------ the nodes' side

    def member_up(self, node: bytes) -> None:
        """`node` holds a live membership lease."""
        self.members.add(node)
        self._node(node)

    def member_lost(self, node: bytes, now: float) -> None:
        """The membership lease of `node` is dead, or it left: its work goes to others."""
        self.members.discard(node)
        found = self.nodes.get(node)
        if found is None:
            return
        found.capacity, found.asked = 0, float("-inf")
        self.checks.refuse(node)
        self.dealer.timetable.forget(node)
        for lease in sorted(found.leases):
            self._requeue(self.leases[lease], Reason.NOT_A_MEMBER, now)

    def request_work(
        self, node: bytes, request: WorkRequest, now: float, received: float | None = None
    ) -> list[Lease] | Reason:
        """Leases for `node`: new ones, and those that it should have and does not know of. Or why there are none.

        A request may wait until there is work: `received` says when it came (None: now).
        """
        received = now if received is None else received
        if node not in self.members:
            return Reason.NOT_A_MEMBER
        self.tick(now)
        found = self._node(node)
        if found.conduct.sentence is not None:
            return Reason.QUARANTINED
        if request.serial < found.serial:
            return Reason.NO_WORK  # an older request that was overtaken
        found.serial, found.asked = request.serial, received
        found.pulse.hear(received)
        found.rate.claimed = request.tokens_per_s
        unheard = [self.leases[lease] for lease in sorted(found.leases - set(request.holding))]
        """On their way, or lost: what the node has room for, it has for these too."""
        capacity = max(0, request.capacity - sum(len(lease.open) for lease in unheard))
        found.capacity = capacity + found.outstanding
        version = (request.epoch, request.version)
        lag = max(self._longest_lag(), self.settings.max_lag)
        found.version = version
        if reason := lag_reason(version, self.head, lag):
            return reason
        if self.roots.get(version) != request.root:
            return Reason.WRONG_ROOT
        self.dealer.timetable.arrived(node, version, received)
        if now - received > self.settings.fresh_s:
            return Reason.NO_WORK
        lost = [lease for lease in unheard if received - lease.granted >= self.settings.resend_after_s]
        granted, why = self.dealer.deal(found, self.head, lag, capacity, now)
        self._facts.extend(Leased(lease) for lease in granted)
        return lost + granted or why

    def renew(self, node: bytes, lease: int, token: int, tokens: int, now: float) -> float | None:
        """Tokens flow: the lease's new seconds to live, or None when it is not (or no longer) this node's."""
        self.tick(now)
        found = self.leases.get(lease)
        if found is None or found.token != token or found.node != node or node not in self.members:
            return None
        group, pulse = self.groups[found.group], self.nodes[node].pulse
        pulse.hear(now)
        if tokens < found.progress and found.begun_at < self.head.name:
            found.progress, found.begun_at = 0, self.head.name
        if found.progress < tokens <= group.sampling.max_tokens * len(found.samples):
            found.progress = tokens
            self.table.renew(found, now + found.duration_s)
            pulse.flow(now, counted=True)
        return found.deadline - now

    def submit(self, node: bytes, rollout: Rollout, sealed: bytes, now: float) -> Reason | None:
        """Take `node`'s result (its signature checked; `sealed`: as it was signed). None: accepted. Safe to repeat."""
        found = self._node(node)
        if found.leases:
            found.pulse.hear(now)
        if (before := self.intake.before(rollout, sealed)) is not None:
            return before[0]
        self.tick(now)
        if found.conduct.sentence is not None:
            reason = Reason.QUARANTINED
        else:
            reason = self.intake.lease_reason(node, rollout, member=node in self.members)
        if reason is None:
            lease = self.leases[rollout.lease]
            reason = self.intake.judge(lease, self.groups[lease.group], rollout, self.head, self.roots, now)
            if reason is None:
                self._accept(lease, rollout, sealed, now)
            else:
                self._requeue(lease, reason, now, (rollout.sample,))
            self.intake.said(rollout, sealed, reason)
        return self._note(node, reason, now)

    def give_back(self, node: bytes, leases: Iterable[int], now: float) -> None:
        """`node` will not finish these: they go to others at once."""
        for lease in leases:
            found = self.leases.get(lease)
            if found is not None and found.node == node:
                self._requeue(found, Reason.GIVEN_BACK, now)

    def cannot(self, node: bytes, lease: int, token: int, now: float) -> Group | None:
        """`node`'s engine refuses this work: others may try. The group, when enough of them have."""
        found = self.leases.get(lease)
        if found is None or found.node != node or found.token != token:
            return None
        group = self.groups[found.group]
        group.refusers.add(node)
        self._requeue(found, Reason.IMPOSSIBLE, now)
        return group if len(group.refusers) >= min(self.settings.refusers, len(self.members)) else None

    def refuse(self, node: bytes, reason: Reason, now: float) -> None:
        """Count what was refused before it reached these rules (a bad signature, say)."""
        if node in self.nodes:
            self._note(node, reason, now)

    def tick(self, now: float) -> None:
        """End leases whose deadline has passed or whose node is gone or hangs, checks that nobody can make, quarantines
        that are over."""
        while (lease := self.table.expired(now)) is not None:
            self._lapse(lease, now)
        for node in self.nodes.values():
            lost = node.pulse.lost(now, self.settings) if node.leases else None
            for lease in sorted(node.leases) if lost else ():
                if lost == "stalled":
                    self._lapse(self.leases[lease], now)
                else:  # which is no hoarding
                    self._requeue(self.leases[lease], Reason.EXPIRED, now)
        for check in self.checks.expire(now):
            self._node(check.author).conduct.disputed += 1
        for node in self.nodes.values():
            sentence = node.conduct.sentence
            if sentence is not None and sentence.until is not None and sentence.until <= now:
                self.release(node.key, "its time is over")

    def _lapse(self, lease: Lease, now: float) -> None:
        """Its time is over; where nothing ever came of it, that is held against its node."""
        if lease.id not in self.leases:  # its node was put into quarantine for the one before
            return
        node = self.nodes[lease.node]
        lapsed = len(lease.open) == len(lease.samples) and not lease.progress
        self._requeue(lease, Reason.EXPIRED, now)
        self._sentence_if(node, node.conduct.note_lease(lapsed, self.settings), now)

    def next_deadline(self) -> float | None:
        """When `tick` should be called at the latest."""
        sentences = (node.conduct.sentence for node in self.nodes.values())
        ends = [sentence.until for sentence in sentences if sentence is not None and sentence.until is not None]
        ends += [node.pulse.look_at(self.settings) for node in self.nodes.values() if node.leases]
        lease = self.table.next_deadline()
        return min(ends if lease is None else [lease, *ends], default=None)

    # ------------------------------------------------------------ bad workers

    def quarantine(self, node: bytes, why: str, seconds: float | None, now: float) -> None:
        """`node` gets no work and no say for so long (None: until it is released); what it had goes to others."""
        found = self._node(node)
        found.conduct.times += 1
        found.conduct.sentence = Sentence(why, None if seconds is None else now + seconds)
        found.capacity = 0
        self._facts.append(Quarantined(node, why, seconds, found.conduct.times))
        self.checks.refuse(node)
        for lease in sorted(found.leases):
            self._requeue(self.leases[lease], Reason.QUARANTINED, now)

    def release(self, node: bytes, why: str) -> bool:
        """`node` may work again. False: it was free."""
        found = self.nodes.get(node)
        if found is None or found.conduct.sentence is None:
            return False
        found.conduct.sentence = None
        found.conduct.clear()
        self._facts.append(Released(node, why))
        return True

    def resume_quarantine(
        self, node: bytes, why: str | None, seconds: float | None, times: int | None, now: float
    ) -> None:
        """Take in what the book kept: a quarantine, or (no `why`) its end. No fact, nothing else changes."""
        conduct = self._node(node).conduct
        until = None if seconds is None else now + seconds
        conduct.sentence = None if why is None else Sentence(why, until)
        conduct.times = times or conduct.times

    def next_check(self, node: bytes, now: float) -> Check | None:
        """A sample of another that `node` should score now."""
        found = self._node(node)
        if node not in self.members or not found.scores or found.version is None or found.conduct.sentence:
            return None
        return self.checks.ask(node, found.version, now)

    def answer_check(self, node: bytes, check: int, version: Version, logprobs: tuple[float, ...], now: float) -> None:
        """What `node` computed; nothing at all: its engine cannot."""
        if not logprobs:
            self._node(node).scores = False
            self.checks.refuse(node)
            return
        ruling = self.checks.answer(node, check, version, logprobs)
        if ruling is None:
            return
        if ruling.liar is None or ruling.liar != ruling.check.author:
            self._node(ruling.check.author).conduct.checked += 1
        if ruling.liar is not None:
            self._convict(ruling.liar, ruling.why, now)

    def accuse(self, group: bytes, sample: int, why: str, now: float) -> bool:
        """The trainer itself computed other log-probabilities for a sample that it was handed: its word needs no
        second. The group is not handed over any more. False: the ledger no longer has it."""
        found = self.groups.get(group)
        done = None if found is None else found.done.get(sample)
        if found is None or done is None:
            return False
        found.handed_over = False
        self._convict(done.node, why, now)
        return True

    def _convict(self, node: bytes, why: str, now: float) -> None:
        """Proven: nothing of it that is still here counts, and a person must let it back in."""
        self.quarantine(node, why, None, now)
        for group in self.groups.values():
            for sample, done in list(group.done.items()):
                if done.node == node and not group.handed_over:
                    self._discard(group, sample, Reason.LIED)

    def _note(self, key: bytes, outcome: Reason | None, now: float) -> Reason | None:
        """A result of `key` was judged: count it, and see whether that is enough."""
        node = self._node(key)
        if outcome is not None:
            node.refused[outcome] = node.refused.get(outcome, 0) + 1
        self._sentence_if(node, node.conduct.note(outcome, self.settings), now)
        return outcome

    def _sentence_if(self, node: Node, why: str | None, now: float) -> None:
        if why is not None and node.conduct.sentence is None:
            self.quarantine(node.key, why, node.conduct.term_s(self.settings), now)

    # ------------------------------------------------------------ results

    def _accept(self, lease: Lease, rollout: Rollout, sealed: bytes, now: float) -> None:
        group, node = self.groups[lease.group], self.nodes[lease.node]
        done = Done(lease.node, lease.id, lease.token, oldest_version(rollout), rollout, sealed)
        self._close_samples(lease, (rollout.sample,), Reason.DUPLICATE)
        group.done[rollout.sample] = done
        tokens = len(rollout.token_ids) // 4
        node.accepted += 1
        node.tokens += tokens
        node.busy_tokens += tokens
        self.dealer.length.observe(tokens)
        self._measure(node, now)
        node.pulse.flow(now, counted=False)
        self.intake.accepted(group, done)
        if self._rng.random() < self.settings.check_share:
            self.checks.begin(node.key, group.id, group.prompt, group.sampling, rollout, now)
        self._facts.append(Accepted(group.id, rollout.sample, done))
        if group.complete:
            self.pool.completed(group)

    def _requeue(self, lease: Lease, why: Reason, now: float, samples: tuple[int, ...] | None = None) -> None:
        samples = tuple(sorted(lease.open)) if samples is None else samples
        group = self.groups[lease.group]
        self._close_samples(lease, samples, why)
        self._measure(self.nodes[lease.node], now)
        self._facts.append(Requeued(lease.id, group.id, samples, str(why)))
        self.pool.free(group, samples)

    def _close_samples(self, lease: Lease, samples: tuple[int, ...], why: Reason) -> None:
        group, node = self.groups[lease.group], self.nodes[lease.node]
        lease.open.difference_update(samples)
        node.outstanding -= len(samples)
        for sample in samples:
            del group.leased[sample]
        if not lease.open:
            self._forget(lease, why)

    def _forget(self, lease: Lease, why: Reason) -> None:
        self.table.end(lease, why)
        self.nodes[lease.node].leases.discard(lease.id)
        if why is Reason.DUPLICATE:  # all of it was delivered
            self.nodes[lease.node].conduct.note_lease(False, self.settings)

    def _measure(self, node: Node, now: float) -> None:
        """Tokens by the time in which the node had work, at the end of each such time, or every few seconds of it."""
        busy_s = now - node.busy_since
        if not node.outstanding or busy_s >= self.settings.busy_window_s:
            node.rate.observe(node.busy_tokens, busy_s)
            node.busy_since, node.busy_tokens = now, 0

    def _node(self, key: bytes) -> Node:
        return self.nodes.setdefault(key, Node(key))
