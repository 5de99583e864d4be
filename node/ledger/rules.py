"""The rules of work: request groups become work leases, and work leases become accepted rollouts. Pure.

Time is an argument, and nothing is sent or written. What changes is noted as facts; the caller makes `take_facts()`
durable before it tells anybody of the outcome, so that after a crash the ledger continues from what others know.
"""

import math
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Final

from codec.routes import RouteShape
from node.engines.base import SamplingParams, Version
from node.ledger.assignment.assigner import WorkAssigner
from node.ledger.assignment.consumption import Consumption
from node.ledger.assignment.draws import drawn_with, samplings_of
from node.ledger.assignment.leases import remember
from node.ledger.assignment.partial import PartialGroups
from node.ledger.assignment.pool import check_offer
from node.ledger.assignment.room import room
from node.ledger.binding import KEPT, Binding, refuse_if_different, work_pairs
from node.ledger.facts import AdaptersHeld, Advanced, Bound, Fact, Taken
from node.ledger.messages import Reason, Rollout, WorkRequest
from node.ledger.part_history import BASE, WHOLE, Change
from node.ledger.part_history import KEPT as KEPT_VERSIONS
from node.ledger.settings import Settings
from node.ledger.state import AcceptedRollout, Group, Head, LiveLease
from node.ledger.terms import PLAIN, Terms
from node.ledger.transitions import Transitions
from node.ledger.trust.acceptance import Acceptance
from node.ledger.trust.quarantine import Quarantine

__all__ = ["Ledger"]

SLOWEST: Final = 1e-3
"""Tokens per second. A lower claim counts as none: shares divide by it, and a number near 0 makes infinities."""
STRANGERS: Final = 4096
"""Nodes that are no longer members and are still remembered, with their rates and counts."""


class Ledger:
    """The state of all work, and the rules that change it. `now` is any clock that only moves forward, in seconds.

    `secret`: 32 bytes, by which rollouts are drawn for checks; nobody else may know them.
    """

    def __init__(self, settings: Settings, head: Head, secret: bytes = bytes(32)) -> None:
        self.settings = settings
        self.head = head
        self.roots: OrderedDict[Version, bytes] = OrderedDict({head.name: head.root})
        """The roots of the sealed versions that may still count, oldest first."""
        self.members: set[bytes] = set()
        self.transitions = transitions = Transitions(settings, head)
        self.parts = transitions.parts
        """What each version changed, and the adapters that there are."""
        self.pool, self.table, self.nodes = transitions.pool, transitions.table, transitions.nodes
        self.quarantine = Quarantine(transitions, self.members, secret)
        self.quarantine.verifier.begin_period(head.name)
        self.acceptance = Acceptance(settings, self.table, self.parts)
        self.consumption: dict[str, Consumption] = {}
        """By trainer's session: how fast its trainer takes samples."""
        self.partial = PartialGroups(transitions)
        self.assigner = WorkAssigner(transitions, self.members, self.consumption)
        self.bindings: OrderedDict[str, Binding] = OrderedDict()
        """By key: the work that it stands for."""
        self.route_shape: RouteShape | None = None
        """Of the model's routes; None: it has no experts, or nobody set it."""
        transitions.facts.append(Advanced(head))

    @property
    def groups(self) -> dict[bytes, Group]:
        """The request groups that are known, by id."""
        return self.pool.groups

    @property
    def leases(self) -> dict[int, LiveLease]:
        """The live work leases, by id."""
        return self.table.leases

    def take_facts(self) -> list[Fact]:
        """The facts since the last call, in order, for the caller to write."""
        return self.transitions.take_facts()

    @property
    def has_facts(self) -> bool:
        """Whether there are facts that the caller has not taken."""
        return bool(self.transitions.facts)

    def just_taken(self, group: bytes) -> bool:
        """Whether `group` was taken, and that fact is not written yet."""
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
        terms: Terms = PLAIN,
    ) -> bool:
        """Ask for `n` samples of `prompt` (packed tokens). False: the same group is known already, and continues.

        `max_lag`, `affinity`, `whole`, `terms`: see `Group`. Raises `ValueError` for work that no node could do (see
        `check_offer`), and `KeyTaken` when another group is known under this id.
        """
        check_offer(prompt, n, sampling)
        if (known := self.groups.get(group)) is not None:
            refuse_if_different(session, work_pairs(known.n, n, known.sampling, sampling, known.prompt, prompt))
            if known.complete and (consumption := self.consumption.get(session)) is not None:
                consumption.give(known.size, now)
            return False
        lag = self.settings.max_lag if max_lag is None else max_lag
        order, free = self.pool.next_order, set(range(n))
        offered = Group(group, session, order, prompt, n, sampling, lag, affinity, whole, now, free=free, terms=terms)
        self.transitions.offer(offered)
        self.partial.watch(offered)
        return True

    def bind(self, key: str, asked: Binding) -> None:
        """Work is asked for under `key`. Raises `KeyTaken` when the key stands for other work."""
        known = self.bindings.get(key)
        binding = asked if known is None else known.check(key, asked)
        remember(self.bindings, key, binding, KEPT)
        if binding != known:
            self.transitions.facts.append(Bound(key, binding))

    def track_consumption(self, session: str, max_lag: int, now: float, part: str = BASE) -> None:
        """A trainer takes the groups of `session`, which are work of `part`, one after another: begin no more for it
        than it will use."""
        waits_since = None if self.pool.complete(session) else now
        self.consumption[session] = Consumption(max_lag, now, waits_since, part=part)

    def forget_consumption(self, session: str) -> None:
        """No trainer takes the groups of `session` at the moment."""
        self.consumption.pop(session, None)

    def trainer_refused(self, session: str, now: float) -> None:
        """The trainer of `session` refused a group that it was given, and may have nothing left to use."""
        if (consumption := self.consumption.get(session)) is not None and not self.pool.complete(session):
            consumption.take(0, 0, now)
            self.pool.more_may_begin()

    def expect(self, session: str, samples: int | None) -> None:
        """`samples` more will be offered in `session`, so that all nodes can finish together. None: unknown, or the
        session is over."""
        if samples is None:
            self.pool.to_come.pop(session, None)
        else:
            self.pool.to_come[session] = samples

    def adopt(self, group: Group) -> None:
        """Take in a group that the book kept."""
        self.pool.add(group)
        self.partial.watch(group)
        self.acceptance.adopt(group)
        self.quarantine.rewards.adopt(group)

    def adopt_lease(self, lease: LiveLease, now: float) -> None:
        """Take in a lease that the book kept. Its samples must be marked in its group already."""
        node = self.transitions.adopt_lease(lease, now)
        node.liveness.hear(now + self.settings.return_s)

    def drop(self, group: bytes) -> list[LiveLease]:
        """The trainer no longer wants `group`. Returns the leases that are void now; their nodes should be told."""
        found = self.groups.get(group)
        return [] if found is None else self.transitions.drop(found)

    def drop_session(self, session: str) -> list[LiveLease]:
        """The trainer of `session` is gone, and nobody will ask for its groups again."""
        groups = [group.id for group in self.groups.values() if group.session == session]
        return [lease for group in groups for lease in self.drop(group)]

    def reopen(self, session: str) -> None:
        """The trainer of `session` came back: groups that were handed over and not taken are ready again."""
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
        """The trainer has `group`: the ledger may forget it."""
        found = self.groups.get(group)
        if found is None or not found.complete:
            return
        self.transitions.take(found)
        if (consumption := self.consumption.get(found.session)) is not None:
            consumption.take(found.size, self.pool.complete(found.session), now)
            self.pool.more_may_begin()

    def room(self, session: str, n: int, part: str = BASE, terms: Terms = PLAIN) -> int:
        """How many groups of `n` samples of `part` the trainer should offer now; see `node.ledger.assignment.room`."""
        return room(self.pool, self.settings, self.capacity, self.consumption.get(session), session, n, part, terms)

    @property
    def capacity(self) -> int:
        """How many sequences all members can hold."""
        return sum(self.nodes[key].capacity for key in self.members if key in self.nodes)

    def advance(self, head: Head, now: float | None = None, change: Change = WHOLE) -> list[Group]:
        """A version was sealed, which made `change`: discard the accepted rollouts that are too old now. Returns the
        groups of adapters that there are no longer, for the caller to give up."""
        if head.name < self.head.name:
            raise ValueError(f"head: {head.name} after {self.head.name}")
        if now is not None and head.name > self.head.name:
            self.assigner.version_timing.sealed(head.name, now, change)
            for consumption in self.consumption.values():
                if change.ages(consumption.part) or head.epoch != self.head.epoch:
                    consumption.seal(now)
        held = self.parts.adapters
        self.parts.note(head.name, change)
        self.head = head.with_trained(dict(self.head.trained))
        self.quarantine.verifier.begin_period(head.name)
        self.roots[head.name] = head.root
        lag = self._longest_lag() + 15
        while len(self.roots) > lag + 1 and (
            len(self.roots) > KEPT_VERSIONS or self._base_lag(next(iter(self.roots))) > lag
        ):
            self.roots.popitem(last=False)
        self.transitions.facts.append(Advanced(head, self.parts.newest, self.parts.quiet_before))
        if held != self.parts.adapters:
            self.transitions.facts.append(AdaptersHeld(self.parts.adapters))
        self.discard_old()
        return self.orphaned_groups()

    def _base_lag(self, version: Version) -> float:
        """The lag of `version` for work of the base, which is the smallest of all parts'."""
        return self.parts.since(BASE, version, self.head.name) if version[0] == self.head.epoch else math.inf

    def set_adapters(self, adapters: Mapping[str, int]) -> list[Group]:
        """The adapters that the head has, as its weights say; see `Change.adapters`. Returns the groups of adapters
        that there are no longer."""
        if adapters != self.parts.adapters:
            self.parts.set_adapters(adapters)
            self.transitions.facts.append(AdaptersHeld(self.parts.adapters))
        return self.orphaned_groups()

    def orphaned_groups(self) -> list[Group]:
        """The groups of adapters that there are no longer."""
        adapters = self.parts.adapters
        return [group for group in self.groups.values() if group.adapter and group.adapter not in adapters]

    def begin_version(self, version: Version, part: str = BASE) -> None:
        """The weights of a trainer of `part` are at `version` from now on, long before nodes hold it."""
        if version > self.head.name:
            self.head = self.head._replace(coming=version, coming_part=part)
            self.discard_old()

    def note_trained(self, version: Version, part: str = BASE) -> None:
        """The weights of the trainer of `part` are at `version`. Groups that are counted so discard what is too old."""
        self.head = self.head.with_trained(dict(self.head.trained) | {part: version})
        self.discard_old()

    def abandon_version(self) -> None:
        """The version that was begun will not be sealed."""
        self.head = self.head._replace(coming=None, coming_part=BASE)

    def discard_stale(self, group: bytes, newest: Version) -> bool:
        """The trainer, which counts lags from `newest`, was given `group`: discard the rollouts that are too old for
        it. The group is handed over again when it is complete. False: none is too old."""
        found = self.groups.get(group)
        if found is None:
            return False
        counted = max(newest, found.counted_from(self.head))
        oldest = self.parts.oldest(found.adapter, counted, found.max_lag)
        old = [s for s, done in found.done.items() if done.oldest < oldest]
        for sample in old:
            self.transitions.discard(found, sample, Reason.TOO_OLD)
        found.handed_over = found.handed_over and not old
        return bool(old)

    def hand_over_again(self, group: bytes) -> None:
        """The trainer did not take `group`, which it was handed: it is ready again."""
        if (found := self.groups.get(group)) is not None and found.handed_over:
            self.pool.return_group(found)

    def discard_old(self) -> None:
        """Discard the rollouts that are too old, in groups that were not handed over yet."""
        for group in self.groups.values():
            for sample, done in list(group.done.items()):
                reason = group.lag_reason(done.oldest, self.head, self.parts)
                if reason and not group.handed_over:
                    self.transitions.discard(group, sample, reason)

    def _longest_lag(self) -> int:
        return max(self.pool.lags, default=self.settings.max_lag)

    # ------------------------------------------------------------ the nodes' side

    def member_up(self, node: bytes) -> None:
        """`node` holds a live membership lease."""
        self.members.add(node)
        self.transitions.node(node)
        self.quarantine.nodes_changed()

    def member_lost(self, node: bytes, now: float) -> None:
        """The membership lease of `node` ended: its work goes to other nodes."""
        self.members.discard(node)
        found = self.nodes.get(node)
        if found is None:
            return
        found.leave()
        self.quarantine.lose(node)
        self.assigner.version_timing.forget(node)
        for lease in sorted(found.leases):
            self.transitions.requeue(self.leases[lease], Reason.NOT_A_MEMBER, now)

    def leases_of(self, node: bytes) -> int:
        """How many work leases `node` holds."""
        found = self.nodes.get(node)
        return 0 if found is None else len(found.leases)

    def forget_strangers(self) -> None:
        """Of the nodes that left, keep the last `STRANGERS` and those in quarantine.

        Forgetting a node in quarantine would release it. There cannot be many: each came in by a ticket.
        """
        if len(self.nodes) <= len(self.members) + 2 * STRANGERS:
            return
        gone = [
            key for key, node in self.nodes.items()
            if key not in self.members and not node.leases and node.reputation.penalty is None
        ]  # fmt: skip
        for key in gone[: max(0, len(gone) - STRANGERS)]:
            del self.nodes[key]
        self.quarantine.verifier.forget(self.nodes.__contains__)

    def request_work(
        self, node: bytes, request: WorkRequest, now: float, received: float | None = None
    ) -> list[LiveLease] | Reason:
        """Leases for `node`: new ones, and those that were lost on the way. Or the reason why there are none.

        A request may wait until there is work: `received` is when it came (None: now).
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
        # The node does not know of these leases, which are on their way or lost; they take a part of its room.
        unheard = [self.leases[lease] for lease in sorted(found.leases - set(request.holding))]
        capacity = max(0, request.capacity - sum(len(lease.open) for lease in unheard))
        found.capacity = capacity + found.outstanding
        version = (request.epoch, request.version)
        lag = max(self._longest_lag(), self.settings.max_lag)
        found.version = version
        if reason := self.head.lag_reason(version, lag, self.parts):  # no part's lag is smaller than the base's
            return reason
        if self.roots.get(version) != request.root:
            return Reason.WRONG_ROOT
        self.assigner.version_timing.arrived(node, version, received)
        if now - received > self.settings.fresh_s:
            return Reason.NO_WORK
        lost = [lease for lease in unheard if received - lease.granted >= self.settings.resend_after_s]
        granted, why = self.assigner.assign(found, self.head, lag, capacity, now)
        return lost + granted or why

    def renew(self, node: bytes, lease: int, token: int, tokens: int, now: float) -> float | None:
        """`node` reports progress. Returns the lease's remaining seconds, or None when it is not a live lease of
        `node`."""
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
        """A rollout of `node`, whose signature is verified; `sealed` is the signed form. None: accepted.

        Safe to repeat: the same bytes get the same verdict.
        """
        found = self.transitions.node(node)
        if found.leases:
            found.liveness.hear(now)
        if (earlier := self.acceptance.earlier_verdict(rollout, sealed)) is not None:
            return earlier[0]
        self._expire(now)
        if found.reputation.penalty is not None:
            reason = Reason.QUARANTINED
        else:
            reason = self.acceptance.lease_reason(node, rollout, member=node in self.members)
        if reason is None:
            lease = self.leases[rollout.lease]
            group = self.groups[lease.group]
            reason = self.acceptance.judge(lease, group, rollout, self.head, self.roots, now, self.route_shape)
            if reason is None:
                self._accept(lease, rollout, sealed, now)
            else:
                self.transitions.requeue(lease, reason, now, (rollout.sample,))
            self.acceptance.remember_verdict(rollout, sealed, reason)
        if reason is not None:
            self.transitions.count_unused(node, rollout.length, reason)
        return self.quarantine.note(node, reason, now)

    def is_void(self, node: bytes, lease: int) -> bool:
        """Whether `node`, which holds `lease`, should stop generating for it.

        False for a lease whose rollouts were all accepted: its verdicts are on their way.
        """
        found = self.leases.get(lease)
        return found.node != node if found is not None else self.table.ended(lease) is not Reason.DUPLICATE

    def give_back(self, node: bytes, leases: Iterable[int], now: float) -> int:
        """`node` will not finish `leases`: they go to other nodes at once. Returns how many were its own."""
        count = 0
        for lease in leases:
            found = self.leases.get(lease)
            if found is not None and found.node == node:
                self.transitions.requeue(found, Reason.GIVEN_BACK, now)
                count += 1
        return count

    def refuse_work(self, node: bytes, lease: int, token: int, now: float) -> Group | None:
        """The engine of `node` refuses the work of `lease`, and other nodes may try.

        Returns the group when every generating node that could do it has refused it, and at least `Settings.refusers`
        of them. That is an error for the trainer, which a few members that refuse everything must not be able to cause.
        """
        found = self.leases.get(lease)
        if found is None or found.node != node or found.token != token:
            return None
        group = self.groups[found.group]
        group.refusers.add(node)
        self.transitions.requeue(found, Reason.IMPOSSIBLE, now)
        able = sum(key not in self.nodes or group.fits(self.nodes[key]) for key in self.members)
        enough = len(group.refusers) >= min(self.settings.refusers, able)
        return group if enough and not any(self._may_take(group, key, now) for key in self.members) else None

    def _may_take(self, group: Group, key: bytes, now: float) -> bool:
        """Whether this member generates and has not refused `group`."""
        node = self.nodes.get(key)
        if node is None or key in group.refusers or node.reputation.penalty is not None or not group.fits(node):
            return False
        return node.capacity > 0 and (bool(node.leases) or now - node.asked <= self.settings.asking_ttl_s)

    def tick(self, now: float) -> None:
        """End the leases whose deadline has passed or whose node is silent or stalled, the checks that no node can
        make, and the quarantines whose time is over."""
        self._expire(now)
        for node in self.nodes.values():
            lost = node.liveness.lost(now, self.settings) if node.leases else None
            for lease in sorted(node.leases) if lost else ():
                if lost == "stalled":
                    self.quarantine.lapse(self.leases[lease], now)
                else:  # a silent node does not hoard work
                    self.transitions.requeue(self.leases[lease], Reason.EXPIRED, now)
        self.quarantine.tick(now)

    def _expire(self, now: float) -> None:
        """End the leases whose deadline has passed. Cheap enough for each message, while `tick` inspects each node."""
        while (lease := self.table.expired(now)) is not None:
            self.quarantine.lapse(lease, now)

    def next_deadline(self) -> float | None:
        """The latest time for the next call of `tick`."""
        times = [self.quarantine.next_deadline(), self.table.next_deadline(), self.partial.next_deadline()]
        times += [node.liveness.check_at(self.settings) for node in self.nodes.values() if node.leases]
        return min((time for time in times if time is not None), default=None)

    def _accept(self, lease: LiveLease, rollout: Rollout, sealed: bytes, now: float) -> None:
        group = self.groups[lease.group]
        own = self.parts.owns(group.adapter, [(span.epoch, span.version) for span in rollout.spans])
        done = AcceptedRollout(lease.node, lease.id, lease.token, rollout.oldest, rollout, sealed, own)
        self.assigner.length.observe(rollout.length)
        self.acceptance.accepted(group, done)
        self.transitions.accept(lease, rollout.sample, done, now)
        if group.complete and (consumption := self.consumption.get(group.session)) is not None:
            consumption.give(group.size, now)
        sampling = drawn_with(group.id, group.prompt, rollout, samplings_of(group, lease)) or group.sampling
        self.quarantine.pick(lease, group, sampling, rollout, sealed, now)
