"""Bad workers: what is counted against a node, spot checks of what it said, quarantine and release. Pure.

`node.ledger.trust.reputation` says when enough is enough, `node.ledger.trust.checks` whose word stands; this is what
follows.
"""

import random
from collections.abc import Set

from node.engines.base import Version
from node.ledger.facts import Quarantined, Released
from node.ledger.messages import Reason, Rollout
from node.ledger.state import Group, Lease, Node
from node.ledger.transitions import Transitions
from node.ledger.trust.checks import Check, Checks
from node.ledger.trust.reputation import Penalty

__all__ = ["Quarantine"]


class Quarantine:
    """`transitions`, `members`: the ledger's own. `rng` picks the samples that are checked: nobody else may foresee
    it."""

    def __init__(self, transitions: Transitions, members: Set[bytes], rng: random.Random) -> None:
        self.checks = Checks(transitions.settings)
        self._settings = transitions.settings
        self._transitions = transitions
        self._members = members
        self._rng = rng

    def tick(self, now: float) -> None:
        """End checks that nobody can make, and quarantines that are over."""
        for check in self.checks.expire(now):
            self._transitions.node(check.author).reputation.disputed += 1
        for node in self._transitions.nodes.values():
            penalty = node.reputation.penalty
            if penalty is not None and penalty.until is not None and penalty.until <= now:
                self.release(node.key, "its time is over")

    def next_deadline(self) -> float | None:
        """When a quarantine is over."""
        penalties = (node.reputation.penalty for node in self._transitions.nodes.values())
        ends = (penalty.until for penalty in penalties if penalty is not None)
        return min((until for until in ends if until is not None), default=None)

    # ------------------------------------------------------------ counting

    def note(self, key: bytes, outcome: Reason | None, now: float) -> Reason | None:
        """A result of `key` was judged (None: accepted): count it, and see whether that is enough."""
        node = self._transitions.node(key)
        if outcome is not None:
            node.refused[outcome] = node.refused.get(outcome, 0) + 1
        self._penalty_if(node, node.reputation.note(outcome, self._settings), now)
        return outcome

    def refuse(self, node: bytes, reason: Reason, now: float) -> None:
        """Count what was refused before it reached these rules (a bad signature, say)."""
        if node in self._transitions.nodes:
            self.note(node, reason, now)

    def lapse(self, lease: Lease, now: float) -> None:
        """Its time is over; where nothing ever came of it, that is held against its node."""
        if lease.id not in self._transitions.table.leases:  # its node was put into quarantine for the one before
            return
        node = self._transitions.nodes[lease.node]
        lapsed = len(lease.open) == len(lease.samples) and not lease.progress
        self._transitions.requeue(lease, Reason.EXPIRED, now)
        if now - node.liveness.heard > self._settings.fresh_s:  # it is gone, perhaps: one death is one lapse
            if node.gone_since == node.liveness.heard:
                return
            node.gone_since = node.liveness.heard
        self._penalty_if(node, node.reputation.note_lease(lapsed, self._settings), now)

    def _penalty_if(self, node: Node, why: str | None, now: float) -> None:
        if why is not None and node.reputation.penalty is None:
            self.quarantine(node.key, why, node.reputation.term_s(self._settings), now)

    # ------------------------------------------------------------ checking

    def pick(self, node: bytes, group: Group, rollout: Rollout, now: float) -> None:
        """`rollout` of `node` was accepted; perhaps it is checked."""
        if self._rng.random() < self._settings.check_share:
            self.checks.begin(node, group.id, group.prompt, group.sampling, rollout, now)

    def next_check(self, node: bytes, now: float) -> Check | None:
        """A sample of another that `node` should score now."""
        found = self._transitions.nodes.get(node)
        if found is None or node not in self._members or found.version is None:
            return None
        if not found.scores or found.reputation.penalty:
            return None
        return self.checks.ask(node, found.version, now, found.abilities)

    def answer_check(self, node: bytes, check: int, version: Version, logprobs: tuple[float, ...], now: float) -> None:
        """What `node` computed; nothing at all at the version that was asked for: its engine cannot score. Nothing at
        another version: the node had moved on, which says nothing about its engine."""
        asked = self.checks.open.get(check)
        if not logprobs and asked is not None and node in asked.asked and version == asked.version:
            self._transitions.node(node).scores = False
            self.checks.refuse(node)
            return
        ruling = self.checks.answer(node, check, version, logprobs)
        if ruling is None:
            return
        if ruling.liar is None or ruling.liar != ruling.check.author:
            self._transitions.node(ruling.check.author).reputation.checked += 1
        if ruling.liar is not None:
            self._convict(ruling.liar, ruling.why, now)

    def accuse(self, group: bytes, sample: int, why: str, now: float) -> bool:
        """The trainer itself computed other log-probabilities for a sample that it was handed: its word needs no
        second. The group is not handed over any more. False: the ledger no longer has it."""
        found = self._transitions.pool.groups.get(group)
        done = None if found is None else found.done.get(sample)
        if found is None or done is None:
            return False
        found.handed_over = False
        self._convict(done.node, why, now)
        return True

    def _convict(self, node: bytes, why: str, now: float) -> None:
        """Proven: nothing of it that is still here counts, and a person must let it back in."""
        self.quarantine(node, why, None, now)
        for group in self._transitions.pool.groups.values():
            for sample, done in list(group.done.items()):
                if done.node == node and not group.handed_over:
                    self._transitions.discard(group, sample, Reason.LIED)

    # ------------------------------------------------------------ quarantine

    def quarantine(self, node: bytes, why: str, seconds: float | None, now: float) -> None:
        """`node` gets no work and no say for so long (None: until it is released); what it had goes to others."""
        found = self._transitions.node(node)
        found.reputation.times += 1
        found.reputation.penalty = Penalty(why, None if seconds is None else now + seconds)
        found.capacity = 0
        self._transitions.facts.append(Quarantined(node, why, seconds, found.reputation.times))
        self.checks.refuse(node)
        for lease in sorted(found.leases):
            self._transitions.requeue(self._transitions.table.leases[lease], Reason.QUARANTINED, now)

    def release(self, node: bytes, why: str) -> bool:
        """`node` may work again. False: it was free."""
        found = self._transitions.nodes.get(node)
        if found is None or found.reputation.penalty is None:
            return False
        found.reputation.penalty = None
        found.reputation.clear()
        self._transitions.facts.append(Released(node, why))
        return True

    def resume(self, node: bytes, why: str | None, seconds: float | None, times: int | None, now: float) -> None:
        """Take in what the book kept: a quarantine, or (no `why`) its end. No fact, nothing else changes."""
        reputation = self._transitions.node(node).reputation
        until = None if seconds is None else now + seconds
        reputation.penalty = None if why is None else Penalty(why, until)
        reputation.times = times or reputation.times
