"""The rules of work: groups of samples -> leases -> accepted rollouts. Pure: time is an argument, nothing is sent.

What changes is also noted as facts (see `node.ledger.transitions` for the places of a sample); whoever calls must make
`take_facts()` durable before it tells anybody of the outcome, so that after a crash the ledger goes on where the world
believes it stands.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from typing import Final

from node.engines.base import SamplingParams, Version
from node.ledger.assignment.assigner import Assigner
from node.ledger.assignment.leases import remember
from node.ledger.assignment.pool import check_offer
from node.ledger.assignment.use import Use
from node.ledger.binding import KEPT, Binding, refuse, work_pairs
from node.ledger.facts import Advanced, Bound, Fact, Taken
from node.ledger.intake import Intake
from node.ledger.messages import Reason, Rollout, WorkRequest
from node.ledger.settings import Settings
from node.ledger.state import Done, Group, Head, Lease
from node.ledger.transitions import Transitions
from node.ledger.trust.judge import lag_reason, oldest_version
from node.ledger.trust.quarantine import Quarantine

__all__ = ["Ledger"]

SLOWEST: Final = 1e-3
"""Tokens a second. A claim below it is none: shares divide by it, and a number next to 0 makes infinities."""
STRANGERS: Final = 4096
"""Nodes that are no members any more and are remembered all the same, with their rates and counts."""


class Ledger:
    """All the state of work. Every method may add facts; none does IO. `now`: any clock that only moves forward, s.

    `rng` picks the samples that are checked: nobody else may foresee it.
    """

    def __init__(self, settings: Settings, head: Head, rng: random.Random | None = None) -> None:
        self.settings = settings
        self.head = head
        self.roots: OrderedDict[Version, bytes] = OrderedDict({head.name: head.root})
        self.members: set[bytes] = set()
        self.transitions = transitions = Transitions(settings)
        self.pool, self.table, self.nodes = transitions.pool, transitions.table, transitions.nodes
        self.quarantine = Quarantine(transitions, self.members, rng or random.Random(0))
        self.intake = Intake(settings, self.table)
        self.uses: dict[str, Use] = {}
        """Of the sessions of trainers: how fast each takes what is drawn for it."""
        self.assigner = Assigner(settings, self.pool, self.table, self.nodes, self.members, self.uses)
        self.bindings: OrderedDict[str, Binding] = OrderedDict()
        """By key: the work that it stands for."""
        transitions.facts.append(Advanced(head))

    @property
    def groups(self) -> dict[bytes, Group]:
        return self.pool.groups

    @property
    def leases(self) -> dict[int, Lease]:
        return self.table.leases

    def take_facts(self) -> list[Fact]:
        """What happened since the last call, in order; the caller writes it down."""
        facts, self.transitions.facts = self.transitions.facts, []
        return facts

    @property
    def unwritten(self) -> bool:
        """Something happened that nobody has taken to write down."""
        return bool(self.transitions.facts)

    def just_taken(self, group: bytes) -> bool:
        """`group` was taken, and the book does not know it yet."""
        return Taken(group) in self.transitions.facts

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
        """Ask for `n` samples of `prompt` (packed tokens). False when this very group is known: it simply goes on.

        `max_lag`, `affinity`, `whole`: see `Group`. Raises `ValueError` for what no node could do (see `check_offer`),
        and `KeyTaken` when the group that is known under this id is another.
        """
        check_offer(prompt, n, sampling)
        if (known := self.groups.get(group)) is not None:
            refuse(session, work_pairs(known.n, n, known.sampling, sampling, known.prompt, prompt))
            if known.complete and (use := self.uses.get(session)) is not None:
                use.give(n, now)
            return False
        lag = self.settings.max_lag if max_lag is None else max_lag
        order, free = self.pool.next_order, set(range(n))
        self.transitions.offer(Group(group, session, order, prompt, n, sampling, lag, affinity, whole, now, free=free))
        return True

    def bind(self, key: str, asked: Binding) -> None:
        """Work is asked for under `key`. Raises `KeyTaken` when the key stands for other work."""
        known = self.bindings.get(key)
        binding = asked if known is None else known.check(key, asked)
        remember(self.bindings, key, binding, KEPT)
        if binding != known:
            self.transitions.facts.append(Bound(key, binding))

    def pace(self, session: str, max_lag: int, now: float) -> None:
        """A trainer takes the groups of `session` one after another: no more is begun for it than it will use."""
        self.uses[session] = Use(max_lag, now, None if self.pool.complete(session) else now)

    def gone(self, session: str) -> None:
        """Nobody takes the groups of `session` at the moment."""
        self.uses.pop(session, None)

    def waits(self, session: str, now: float) -> None:
        """What the trainer of `session` was given it has refused: it may have nothing left to use."""
        if (use := self.uses.get(session)) is not None and not self.pool.complete(session):
            use.take(0, 0, now)
            self.pool.freed += 1

    def expect(self, session: str, samples: int | None) -> None:
        """So many more samples will be offered in `session`, so that all nodes can end with the last of them; None:
        nobody knows, or it is over."""
        if samples is None:
            self.pool.to_come.pop(session, None)
        else:
            self.pool.to_come[session] = samples

    def adopt(self, group: Group) -> None:
        """Take in a group that the book kept."""
        self.pool.add(group)
        self.intake.adopt(group)

    def adopt_lease(self, lease: Lease, now: float) -> None:
        """Take in a lease that the book kept; its samples must be marked in its group already."""
        self.table.add(lease)
        node = self.transitions.node(lease.node)
        node.leases.add(lease.id)
        node.outstanding += len(lease.open)
        node.busy_since = now
        node.liveness.hear(now + self.settings.return_s)

    def drop(self, group: bytes) -> list[Lease]:
        """The trainer no longer wants `group`. Gives the leases that are void now, for their nodes to be told."""
        found = self.groups.get(group)
        return [] if found is None else self.transitions.drop(found)

    def drop_session(self, session: str) -> list[Lease]:
        """The trainer that opened `session` is gone and nobody will ask for its groups again."""
        groups = [group.id for group in self.groups.values() if group.session == session]
        return [lease for group in groups for lease in self.drop(group)]

    def reopen(self, session: str) -> None:
        """The trainer of `session` came back: what was on its way to it, and not taken, is handed over again."""
        self.pool.reopen(session)
        self.discard_old()

    def hand_over(self, session: str, wanted: Container[bytes] | None = None) -> Group | None:
        """The next complete group of `session`, or None; see `Pool.hand_over`. It stays known until `taken`."""
        return self.pool.hand_over(session, wanted)

    def hand_over_all(self, session: str, wanted: Container[bytes] | None = None) -> Iterator[Group]:
        """Every complete group of `session`; see `hand_over`."""
        while (group := self.hand_over(session, wanted)) is not None:
            yield group

    def taken(self, group: bytes, now: float) -> None:
        """The trainer has `group` and has made it its own: the ledger may forget it."""
        found = self.groups.get(group)
        if found is None or not found.complete:
            return
        self.transitions.take(found)
        if (use := self.uses.get(found.session)) is not None:
            use.take(found.n, self.pool.complete(found.session), now)
            self.pool.freed += 1  # more may be begun now

    def room(self, session: str, n: int) -> int:
        """Groups of `n` samples that the trainer should offer now: enough to keep the nodes busy, and no more than it
        will use.

        Complete groups count until they are taken, so a trainer that is slow to take them is not drowned in them.
        """
        capacity, cold = self.capacity, min(self.settings.cold_groups * n, self.settings.max_open_samples)
        wanted = self.settings.open_samples(capacity) if capacity else cold
        short = wanted - self.pool.samples(session)
        if (use := self.uses.get(session)) is not None and (most := use.most_open()) is not None:
            short = min(most + n, self.settings.max_open_samples) - self.pool.held(session) + use.hand
        return max(0, math.ceil(short / n))

    @property
    def capacity(self) -> int:
        """Sequences that the members can hold in all."""
        return sum(self.nodes[key].capacity for key in self.members if key in self.nodes)

    def advance(self, head: Head, now: float | None = None) -> None:
        """A version was sealed: the staleness bound moves, and what fell out of it must be drawn anew."""
        if head.name < self.head.name:
            raise ValueError(f"head: {head.name} after {self.head.name}")
        if now is not None and head.name > self.head.name:
            self.assigner.version_timing.sealed(head.name, now)
            for use in self.uses.values():
                use.seal(now)
        self.head = head
        self.roots[head.name] = head.root
        while len(self.roots) > self._longest_lag() + 16:
            self.roots.popitem(last=False)
        self.transitions.facts.append(Advanced(head))
        self.discard_old()

    def begin(self, version: Version) -> None:
        """The trainer's weights are `version` from now on, long before nodes hold it."""
        if version > self.head.name:
            self.head = self.head._replace(coming=version)
            self.discard_old()

    def abandon(self) -> None:
        """What was begun will not be sealed."""
        self.head = self.head._replace(coming=None)

    def stale(self, group: bytes, newest: Version) -> bool:
        """`group` is on its way to the trainer, which counts from `newest`. What is too old there is drawn anew, and
        the group handed over again. False: nothing is."""
        found = self.groups.get(group)
        if found is None:
            return False
        epoch, version = max(newest, self.head.counted_from(found.max_lag))
        old = [s for s, done in found.done.items() if done.oldest < (epoch, max(0, version - found.max_lag))]
        for sample in old:
            self.transitions.discard(found, sample, Reason.TOO_OLD)
        found.handed_over = found.handed_over and not old
        return bool(old)

    def discard_old(self) -> None:
        """Free the samples of groups not yet handed over that fell out of their staleness bound."""
        for group in self.groups.values():
            for sample, done in list(group.done.items()):
                if (reason := lag_reason(done.oldest, self.head, group.max_lag)) and not group.handed_over:
                    self.transitions.discard(group, sample, reason)

    def _longest_lag(self) -> int:
        return max(self.pool.lags, default=self.settings.max_lag)

    # ------------------------------------------------------------ the nodes' side

    def member_up(self, node: bytes) -> None:
        """`node` holds a live membership lease."""
        self.members.add(node)
        self.transitions.node(node)

    def member_lost(self, node: bytes, now: float) -> None:
        """The membership lease of `node` is dead, or it left: its work goes to others."""
        self.members.discard(node)
        found = self.nodes.get(node)
        if found is None:
            return
        found.capacity, found.asked = 0, float("-inf")
        found.abilities, found.abilities_asked = None, float("-inf")  # it may come back as another release
        found.scores = True
        self.quarantine.checks.refuse(node)
        self.assigner.version_timing.forget(node)
        for lease in sorted(found.leases):
            self.transitions.requeue(self.leases[lease], Reason.NOT_A_MEMBER, now)

    def leases_of(self, node: bytes) -> int:
        """How many leases `node` holds."""
        found = self.nodes.get(node)
        return 0 if found is None else len(found.leases)

    def forget_strangers(self) -> None:
        """Of nodes that left, keep the last `STRANGERS`, and those in quarantine: these were all let in by a person's
        ticket, so they cannot be many, and must not get out by being forgotten."""
        if len(self.nodes) <= len(self.members) + 2 * STRANGERS:
            return
        gone = [
            key for key, node in self.nodes.items()
            if key not in self.members and not node.leases and node.reputation.penalty is None
        ]  # fmt: skip
        for key in gone[: max(0, len(gone) - STRANGERS)]:
            del self.nodes[key]

    def request_work(
        self, node: bytes, request: WorkRequest, now: float, received: float | None = None
    ) -> list[Lease] | Reason:
        """Leases for `node`: new ones, and those that it should have and does not know of. Or why there are none.

        A request may wait until there is work: `received` says when it came (None: now).
        """
        received = now if received is None else received
        if node not in self.members:
            return Reason.NOT_A_MEMBER
        self._expire(now)
        found = self.transitions.node(node)
        if found.reputation.penalty is not None:
            return Reason.QUARANTINED
        if request.serial < found.serial:
            return Reason.NO_WORK  # an older request that was overtaken
        found.serial, found.asked = request.serial, received
        found.liveness.hear(received)
        found.rate.claimed = request.tokens_per_s if request.tokens_per_s >= SLOWEST else 0.0
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
        self.assigner.version_timing.arrived(node, version, received)
        if now - received > self.settings.fresh_s:
            return Reason.NO_WORK
        lost = [lease for lease in unheard if received - lease.granted >= self.settings.resend_after_s]
        granted, why = self.assigner.assign(found, self.head, lag, capacity, now)
        self.transitions.grant(granted)
        return lost + granted or why

    def renew(self, node: bytes, lease: int, token: int, tokens: int, now: float) -> float | None:
        """Tokens flow: the lease's new seconds to live, or None when it is not (or no longer) this node's."""
        self._expire(now)
        found = self.leases.get(lease)
        if found is None or found.token != token or found.node != node or node not in self.members:
            return None
        group, liveness = self.groups[found.group], self.nodes[node].liveness
        liveness.hear(now)
        if tokens < found.progress and found.begun_at < self.head.name:
            found.progress, found.begun_at = 0, self.head.name
        if found.progress < tokens <= group.sampling.max_tokens * len(found.samples):
            found.progress = tokens
            self.table.renew(found, now + found.duration_s)
            liveness.flow(now, counted=True)
        return found.deadline - now

    def submit(self, node: bytes, rollout: Rollout, sealed: bytes, now: float) -> Reason | None:
        """Take `node`'s result (its signature checked; `sealed`: as it was signed). None: accepted. Safe to repeat."""
        found = self.transitions.node(node)
        if found.leases:
            found.liveness.hear(now)
        if (before := self.intake.before(rollout, sealed)) is not None:
            return before[0]
        self._expire(now)
        if found.reputation.penalty is not None:
            reason = Reason.QUARANTINED
        else:
            reason = self.intake.lease_reason(node, rollout, member=node in self.members)
        if reason is None:
            lease = self.leases[rollout.lease]
            reason = self.intake.judge(lease, self.groups[lease.group], rollout, self.head, self.roots, now)
            if reason is None:
                self._accept(lease, rollout, sealed, now)
            else:
                self.transitions.requeue(lease, reason, now, (rollout.sample,))
            self.intake.said(rollout, sealed, reason)
        if reason is not None:
            self.transitions.waste(node, len(rollout.token_ids) // 4, reason)
        return self.quarantine.note(node, reason, now)

    def void(self, node: bytes, lease: int) -> bool:
        """`node` still draws for a lease that is not its own any more. One of which all was delivered is none such: its
        verdicts are on their way."""
        found = self.leases.get(lease)
        return found.node != node if found is not None else self.table.ended(lease) is not Reason.DUPLICATE

    def give_back(self, node: bytes, leases: Iterable[int], now: float) -> int:
        """`node` will not finish these: they go to others at once. How many of them were its own."""
        count = 0
        for lease in leases:
            found = self.leases.get(lease)
            if found is not None and found.node == node:
                self.transitions.requeue(found, Reason.GIVEN_BACK, now)
                count += 1
        return count

    def cannot(self, node: bytes, lease: int, token: int, now: float) -> Group | None:
        """`node`'s engine refuses this work: others may try. The group, when each node that generates has refused it,
        and `refusers` of them: an error for the trainer, which a few members that refuse everything must not cause."""
        found = self.leases.get(lease)
        if found is None or found.node != node or found.token != token:
            return None
        group = self.groups[found.group]
        group.refusers.add(node)
        self.transitions.requeue(found, Reason.IMPOSSIBLE, now)
        enough = len(group.refusers) >= min(self.settings.refusers, len(self.members))
        return group if enough and not any(self._may_take(group, key, now) for key in self.members) else None

    def _may_take(self, group: Group, key: bytes, now: float) -> bool:
        """This member generates, and has not refused the group: it may still be asked."""
        node = self.nodes.get(key)
        if node is None or key in group.refusers or node.reputation.penalty is not None:
            return False
        return node.capacity > 0 and (bool(node.leases) or now - node.asked <= self.settings.asking_ttl_s)

    def tick(self, now: float) -> None:
        """End leases whose deadline has passed or whose node is gone or hangs, checks that nobody can make, quarantines
        that are over."""
        self._expire(now)
        for node in self.nodes.values():
            lost = node.liveness.lost(now, self.settings) if node.leases else None
            for lease in sorted(node.leases) if lost else ():
                if lost == "stalled":
                    self.quarantine.lapse(self.leases[lease], now)
                else:  # which is no hoarding
                    self.transitions.requeue(self.leases[lease], Reason.EXPIRED, now)
        self.quarantine.tick(now)

    def _expire(self, now: float) -> None:
        """Before each message: a lease whose deadline has passed is over. The rest of a `tick` looks at every node."""
        while (lease := self.table.expired(now)) is not None:
            self.quarantine.lapse(lease, now)

    def next_deadline(self) -> float | None:
        """When `tick` should be called at the latest."""
        times = [self.quarantine.next_deadline(), self.table.next_deadline()]
        times += [node.liveness.look_at(self.settings) for node in self.nodes.values() if node.leases]
        return min((time for time in times if time is not None), default=None)

    def _accept(self, lease: Lease, rollout: Rollout, sealed: bytes, now: float) -> None:
        group = self.groups[lease.group]
        done = Done(lease.node, lease.id, lease.token, oldest_version(rollout), rollout, sealed)
        self.assigner.length.observe(len(rollout.token_ids) // 4)
        self.intake.accepted(group, done)
        self.transitions.accept(lease, rollout.sample, done, now)
        if group.complete and (use := self.uses.get(group.session)) is not None:
            use.give(group.n, now)
        self.quarantine.pick(lease.node, group, rollout, now)
