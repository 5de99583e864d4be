"""The rules of work: groups of samples -> leases -> accepted rollouts. Pure: time is an argument, nothing is sent.

    offered ---> free --lease--> leased --accepted--> done --all n--> ready --taken--> forgotten
                  ^                |                    |
                  +-- expired, refused, node lost,      |
                  |   given back -------+               |
                  +-- too old before its group left ----+

A sample is in exactly one place. What changes is also noted as facts; whoever calls must make `take_facts()` durable
before it tells anybody of the outcome, so that after a crash the ledger goes on where the world believes it stands.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import replace

from blake3 import blake3

from node.engines.base import SamplingParams, Version
from node.ledger.judge import judge, lag_reason, oldest_version
from node.ledger.messages import MAX_CAPACITY, MAX_TOKENS, Reason, Rollout, WorkRequest
from node.ledger.rate import Rate
from node.ledger.state import (
    Accepted,
    Advanced,
    Discarded,
    Done,
    Dropped,
    Fact,
    Group,
    Head,
    Lease,
    Leased,
    Node,
    Offered,
    Requeued,
    Settings,
    Taken,
)

__all__ = ["Ledger", "check_offer"]


class Ledger:
    """All the state of work. Every method may add facts; none does IO. `now`: any clock that only moves forward, s."""

    def __init__(self, settings: Settings, head: Head) -> None:
        self.settings = settings
        self.head = head
        self.roots: OrderedDict[Version, bytes] = OrderedDict({head.name: head.root})
        self.groups: dict[bytes, Group] = {}
        self.leases: dict[int, Lease] = {}
        self.nodes: dict[bytes, Node] = {}
        self.members: set[bytes] = set()
        self.next_id = 1
        """Of leases and fencing tokens: rises for ever, over restarts too."""
        self.next_order = 0
        """Of the next group offered."""
        self._open: list[tuple[int, bytes]] = []
        """Heap of (order, group) that may have free samples; entries that have none are skipped."""
        self._ready: dict[str, deque[bytes]] = {}
        self._deadlines: list[tuple[float, int]] = []
        """Heap of (deadline, lease); entries of leases that ended or were renewed are skipped."""
        self._ended: OrderedDict[int, Reason] = OrderedDict()
        self._judged: OrderedDict[tuple[int, int], tuple[bytes, Reason | None]] = OrderedDict()
        self._facts: list[Fact] = [Advanced(head)]

    def take_facts(self) -> list[Fact]:
        """What happened since the last call, in order; the caller writes it down."""
        facts, self._facts = self._facts, []
        return facts

    def just_taken(self, group: bytes) -> bool:
        """`group` was taken, and the book does not know it yet."""
        return Taken(group) in self._facts

    # ------------------------------------------------------------ the trainer's side

    def offer(self, group: bytes, session: str, prompt: bytes, n: int, sampling: SamplingParams) -> bool:
        """Ask for `n` samples of `prompt` (packed tokens). False when a group of this id is known: it simply goes on.

        Raises `ValueError` for what no node could do; see `check_offer`.
        """
        check_offer(prompt, n, sampling)
        if group in self.groups:
            return False
        found = Group(group, session, self.next_order, prompt, n, sampling, free=set(range(n)))
        self.adopt(found)
        self._facts.append(Offered(found))
        return True

    def adopt(self, group: Group) -> None:
        """Take in a group as it is: a new one, or one that the book kept."""
        self.groups[group.id] = group
        self.next_order = max(self.next_order, group.order + 1)
        for sample, done in group.done.items():  # its node may not have heard, and will say it again
            self._remember(self._judged, (done.lease, sample), (blake3(done.sealed).digest(16), None))
        if group.free:
            heapq.heappush(self._open, (group.order, group.id))
        if group.complete:
            self._ready.setdefault(group.session, deque()).append(group.id)

    def adopt_lease(self, lease: Lease) -> None:
        """Take in a lease that the book kept; its samples must be marked in its group already."""
        self._watch(lease)
        node = self._node(lease.node)
        node.leases.add(lease.id)
        node.outstanding += len(lease.open)
        node.busy_since = lease.granted
        self.next_id = max(self.next_id, lease.id + 1, lease.token + 1)

    def drop(self, group: bytes) -> list[Lease]:
        """The trainer no longer wants `group`. Gives the leases that are void now, for their nodes to be told."""
        found = self.groups.pop(group, None)
        if found is None:
            return []
        leases = [self.leases[lease] for lease in sorted(set(found.leased.values()))]
        for lease in leases:
            self._end(lease, Reason.WITHDRAWN)
        ready = self._ready.get(found.session)
        if ready is not None and group in ready:
            ready.remove(group)
        self._facts.append(Dropped(group))
        return leases

    def drop_session(self, session: str) -> list[Lease]:
        """The trainer that opened `session` is gone and nobody will ask for its groups again."""
        groups = [group.id for group in self.groups.values() if group.session == session]
        return [lease for group in groups for lease in self.drop(group)]

    def reopen(self, session: str) -> None:
        """The trainer of `session` came back: what was on its way to it, and not taken, is handed over again."""
        ready = self._ready.setdefault(session, deque())
        for group in sorted(self.groups.values(), key=lambda g: g.order):
            if group.session == session and group.handed_over:
                group.handed_over = False
                ready.append(group.id)
        self.discard_old()

    def hand_over(self, session: str) -> Group | None:
        """The next complete group of `session`, or None. It stays known until `taken`."""
        ready = self._ready.get(session)
        if not ready:
            return None
        group = self.groups[ready.popleft()]
        group.handed_over = True
        return group

    def taken(self, group: bytes) -> None:
        """The trainer has `group` and has made it its own: the ledger may forget it."""
        found = self.groups.get(group)
        if found is None or not found.complete:
            return
        if not found.handed_over:  # we were restarted in between, and do not remember
            self._ready[found.session].remove(group)
        del self.groups[group]
        self._facts.append(Taken(group))

    def room(self, session: str, n: int) -> int:
        """Groups of `n` samples that the trainer should offer now: enough to keep the nodes busy, no more.

        Complete groups count until they are taken, so a trainer that is slow to take them is not drowned in them.
        """
        open_samples = sum(g.n for g in self.groups.values() if g.session == session or not g.complete)
        capacity = sum(self.nodes[key].capacity for key in self.members if key in self.nodes)
        wanted = self.settings.ahead * capacity if capacity else self.settings.cold_groups * n
        return max(0, math.ceil((min(wanted, self.settings.max_open_samples) - open_samples) / n))

    def advance(self, head: Head) -> None:
        """A version was sealed: the staleness bound moves, and what fell out of it must be drawn anew."""
        if head.name < self.head.name:
            raise ValueError(f"head: {head.name} after {self.head.name}")
        self.head = head
        self.roots[head.name] = head.root
        while len(self.roots) > self.settings.max_lag + 16:
            self.roots.popitem(last=False)
        self._facts.append(Advanced(head))
        self.discard_old()

    def allow_lag(self, max_lag: int) -> None:
        """Set the staleness bound, which holds for all work: who asked last says."""
        self.settings = replace(self.settings, max_lag=max_lag)
        self.discard_old()

    def discard_old(self) -> None:
        """Free the samples of groups not yet handed over that fell out of the staleness bound."""
        for group in self.groups.values():
            if group.handed_over:
                continue
            was_complete = group.complete
            for sample, done in list(group.done.items()):
                if lag_reason(done.oldest, self.head, self.settings.max_lag):
                    del group.done[sample]
                    self._facts.append(Discarded(group.id, sample))
                    self._free(group, (sample,))
            if was_complete and not group.complete:
                self._ready[group.session].remove(group.id)

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
        found.capacity = 0
        found.asked = float("-inf")
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
        if request.serial < found.serial:
            return Reason.NO_WORK  # an older request that was overtaken
        found.serial = request.serial
        found.asked = received
        found.rate.claimed = request.tokens_per_s
        found.capacity = request.capacity + found.outstanding
        version = (request.epoch, request.version)
        if reason := lag_reason(version, self.head, self.settings.max_lag):
            return reason
        if self.roots.get(version) != request.root:
            return Reason.WRONG_ROOT
        lost = [
            self.leases[lease]
            for lease in sorted(found.leases - set(request.holding))
            if received - self.leases[lease].granted >= self.settings.resend_after_s
        ]
        capacity = request.capacity - sum(len(lease.open) for lease in lost)
        leases = lost + self._grant(found, min(capacity, self._share(found, now)), now)
        return leases or Reason.NO_WORK

    def renew(self, node: bytes, lease: int, token: int, tokens: int, now: float) -> float | None:
        """Tokens flow: the lease's new seconds to live, or None when it is not (or no longer) this node's."""
        self.tick(now)
        found = self.leases.get(lease)
        if found is None or found.token != token or found.node != node or node not in self.members:
            return None
        group = self.groups[found.group]
        if found.progress < tokens <= group.sampling.max_tokens * len(found.samples):
            found.progress = tokens
            found.deadline = max(found.deadline, now + found.duration_s)
            self._watch(found)
        return found.deadline - now

    def submit(self, node: bytes, rollout: Rollout, sealed: bytes, now: float) -> Reason | None:
        """Take `node`'s result (its signature checked; `sealed`: as it was signed). None: accepted. Safe to repeat."""
        key, digest = (rollout.lease, rollout.sample), blake3(sealed).digest(16)
        before = self._judged.get(key)
        if before is not None and before[0] == digest:
            return before[1]
        self.tick(now)
        reason = self._lease_reason(node, rollout)
        if reason is None:
            lease = self.leases[rollout.lease]
            reason = judge(rollout, self.groups[lease.group], self.head, self.roots, self.settings.max_lag)
            if reason is None:
                self._accept(lease, rollout, sealed, now)
            else:
                self._requeue(lease, reason, now, (rollout.sample,))
            self._remember(self._judged, key, (digest, reason))
        return reason if reason is None else self._refused(node, reason)

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

    def refuse(self, node: bytes, reason: Reason) -> None:
        """Count what was refused before it reached these rules (a bad signature, say)."""
        self._refused(node, reason)

    def tick(self, now: float) -> None:
        """End leases whose deadline has passed."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            self._requeue(self.leases[self._deadlines[0][1]], Reason.EXPIRED, now)

    def next_deadline(self) -> float | None:
        """When `tick` should be called at the latest."""
        while self._deadlines:
            deadline, lease = self._deadlines[0]
            if lease in self.leases and self.leases[lease].deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    # ------------------------------------------------------------ shares and leases

    def _share(self, node: Node, now: float) -> int:
        """How many more samples `node` should get: b_i = B * rate_i / sum of rates (SparrowRL), less what it has.

        An idle node always gets one, or it could never be measured.
        """
        asking = [
            other
            for key, other in self.nodes.items()
            if key in self.members and (other.outstanding or now - other.asked <= self.settings.asking_ttl_s)
        ]
        rates = _comparable([other.rate for other in asking])
        work = sum(len(group.free) + len(group.leased) for group in self.groups.values())
        share = math.ceil(work * rates[asking.index(node)] / sum(rates)) - node.outstanding
        return max(share, 0 if node.outstanding else 1)

    def _grant(self, node: Node, count: int, now: float) -> list[Lease]:
        leases: list[Lease] = []
        skipped: list[tuple[int, bytes]] = []
        while count > 0 and self._open:
            group = self.groups.get(self._open[0][1])
            if group is None or not group.free:
                heapq.heappop(self._open)
                continue
            if node.key in group.refusers:
                skipped.append(heapq.heappop(self._open))
                continue
            samples = tuple(sorted(group.free)[:count])
            count -= len(samples)
            leases.append(self._lease(node, group, samples, now))
        for entry in skipped:
            heapq.heappush(self._open, entry)
        return leases

    def _lease(self, node: Node, group: Group, samples: tuple[int, ...], now: float) -> Lease:
        if not node.outstanding:
            node.busy_since, node.busy_tokens = now, 0
        node.outstanding += len(samples)
        settings = self.settings
        duration = settings.max_deadline_s
        if node.rate.low > 0:
            ahead = settings.deadline_slack * node.outstanding * group.sampling.max_tokens / node.rate.low
            duration = min(max(ahead, settings.min_deadline_s), settings.max_deadline_s)
        minimum = (self.head.epoch, max(0, self.head.version - settings.max_lag))
        lease = Lease(
            id=self.next_id,
            token=self.next_id,
            node=node.key,
            group=group.id,
            samples=samples,
            granted=now,
            deadline=now + duration,
            duration_s=duration,
            minimum=minimum,
            open=set(samples),
        )
        self.next_id += 1
        self._watch(lease)
        node.leases.add(lease.id)
        group.free.difference_update(samples)
        group.leased.update(dict.fromkeys(samples, lease.id))
        self._facts.append(Leased(lease))
        return lease

    def _lease_reason(self, node: bytes, rollout: Rollout) -> Reason | None:
        lease = self.leases.get(rollout.lease)
        if lease is None:
            return self._ended.get(rollout.lease, Reason.UNKNOWN_LEASE)
        if lease.node != node:
            return Reason.WRONG_NODE
        if lease.token != rollout.token:
            return Reason.FENCED
        if node not in self.members:
            return Reason.NOT_A_MEMBER
        if rollout.sample not in lease.samples:
            return Reason.WRONG_WORK
        return None if rollout.sample in lease.open else Reason.DUPLICATE

    def _accept(self, lease: Lease, rollout: Rollout, sealed: bytes, now: float) -> None:
        group, node = self.groups[lease.group], self.nodes[lease.node]
        done = Done(lease.node, lease.id, lease.token, oldest_version(rollout), rollout, sealed)
        self._close_samples(lease, (rollout.sample,), Reason.DUPLICATE)
        group.done[rollout.sample] = done
        node.accepted += 1
        node.busy_tokens += len(rollout.token_ids) // 4
        self._measure(node, now)
        self._facts.append(Accepted(group.id, rollout.sample, done))
        if group.complete:
            self._ready.setdefault(group.session, deque()).append(group.id)

    def _requeue(self, lease: Lease, why: Reason, now: float, samples: tuple[int, ...] | None = None) -> None:
        samples = tuple(sorted(lease.open)) if samples is None else samples
        group = self.groups[lease.group]
        self._close_samples(lease, samples, why)
        self._measure(self.nodes[lease.node], now)
        self._facts.append(Requeued(lease.id, group.id, samples, str(why)))
        self._free(group, samples)

    def _close_samples(self, lease: Lease, samples: tuple[int, ...], why: Reason) -> None:
        group, node = self.groups[lease.group], self.nodes[lease.node]
        lease.open.difference_update(samples)
        node.outstanding -= len(samples)
        for sample in samples:
            del group.leased[sample]
        if not lease.open:
            self._forget(lease, why)

    def _end(self, lease: Lease, why: Reason) -> None:
        """Of a group that is gone: nothing goes back to it."""
        self.nodes[lease.node].outstanding -= len(lease.open)
        lease.open.clear()
        self._forget(lease, why)

    def _forget(self, lease: Lease, why: Reason) -> None:
        del self.leases[lease.id]
        self.nodes[lease.node].leases.discard(lease.id)
        self._remember(self._ended, lease.id, why)

    def _free(self, group: Group, samples: tuple[int, ...]) -> None:
        if not group.free:
            heapq.heappush(self._open, (group.order, group.id))
        group.free.update(samples)

    def _measure(self, node: Node, now: float) -> None:
        """Tokens by the time in which the node had work, at the end of each such time, or every few seconds of it."""
        busy_s = now - node.busy_since
        if not node.outstanding or busy_s >= self.settings.busy_window_s:
            node.rate.observe(node.busy_tokens, busy_s)
            node.busy_since, node.busy_tokens = now, 0

    def _watch(self, lease: Lease) -> None:
        self.leases[lease.id] = lease
        heapq.heappush(self._deadlines, (lease.deadline, lease.id))

    def _node(self, key: bytes) -> Node:
        return self.nodes.setdefault(key, Node(key))

    def _refused(self, node: bytes, reason: Reason) -> Reason:
        found = self.nodes.get(node)
        if found is not None:
            found.refused[reason] = found.refused.get(reason, 0) + 1
        return reason

    def _remember(self, memory: OrderedDict, key: object, value: object) -> None:
        memory[key] = value
        while len(memory) > self.settings.remembered:
            memory.popitem(last=False)


def check_offer(prompt: bytes, n: int, sampling: SamplingParams) -> None:
    """Raises `ValueError` for work that no node could do."""
    if not 1 <= n <= MAX_CAPACITY:
        raise ValueError(f"n: {n} samples of one prompt; 1 to {MAX_CAPACITY} can be asked for")
    if not 4 <= len(prompt) <= 4 * MAX_TOKENS or sampling.max_tokens > MAX_TOKENS:
        raise ValueError(f"a prompt needs at least 1 token; prompt and completion have at most {MAX_TOKENS} each")


def _comparable(rates: list[Rate]) -> list[float]:
    """Rates to share by. Who is not measured yet counts as claimed, but no faster than the fastest that was measured;
    who claims nothing counts as an average one. So a boast is worth little, and not for long."""
    measured = [rate.mean for rate in rates if rate.observed_s]
    fastest = max(measured, default=math.inf)
    known = [rate.mean if rate.observed_s else min(rate.claimed, fastest) for rate in rates]
    positive = [value for value in known if value > 0]
    usual = sum(positive) / len(positive) if positive else 1.0
    floor = usual / 1000.0  # a stalled node keeps a crumb, or its rate could never rise again
    guessed = [value if rate.observed_s else value or usual for value, rate in zip(known, rates, strict=True)]
    return [max(value, floor) for value in guessed]
