"""Quarantine: gives no work to nodes that failed too often or were proven to lie, and releases them. Pure.

`node.ledger.trust.reputation` decides when the failures of a node are too many, and `node.ledger.trust.verifier` (of
nodes whose engines judge) and `node.ledger.trust.checks` (of others) which node lied. This module carries out what
follows.
"""

from collections.abc import Iterable, Set

from node.engines.base import SamplingParams, Version, scoring_needs
from node.ledger.facts import Quarantined, Released
from node.ledger.messages import JudgeAnswer, Reason, Rollout
from node.ledger.state import Group, LiveLease, Node
from node.ledger.transitions import Transitions
from node.ledger.trust.checks import Checks, OpenCheck
from node.ledger.trust.judgements import OpenJudgement
from node.ledger.trust.reputation import Penalty
from node.ledger.trust.rewards import RewardChecks
from node.ledger.trust.verifier import Liar, Verifier

__all__ = ["Quarantine"]


class Quarantine:
    """`transitions` and `members` belong to the ledger. `secret`: 32 bytes, by which rollouts are drawn for checks;
    nobody else may know them."""

    def __init__(self, transitions: Transitions, members: Set[bytes], secret: bytes) -> None:
        self.verifier = Verifier(transitions, members, secret)
        self.checks = Checks(transitions.settings, transitions.parts)
        self.rewards = RewardChecks(transitions, members, self._blame_reward, secret)
        self._settings = transitions.settings
        self._transitions = transitions
        self._members = members

    def tick(self, now: float) -> None:
        """End the checks that no node can make, and the quarantines whose time is over."""
        for check in self.checks.expire(now):
            self._transitions.node(check.author).reputation.disputed += 1
        self._convict_all(self.verifier.tick(now), now)
        self.rewards.tick(now)
        for node in self._transitions.nodes.values():
            penalty = node.reputation.penalty
            if penalty is not None and penalty.until is not None and penalty.until <= now:
                self.release(node.key, "its time is over")

    def next_deadline(self) -> float | None:
        """When the next quarantine ends, or checks of rewards are to be looked at."""
        penalties = (node.reputation.penalty for node in self._transitions.nodes.values())
        ends = [penalty.until for penalty in penalties if penalty is not None]
        return min((until for until in (*ends, self.rewards.next_deadline()) if until is not None), default=None)

    # ------------------------------------------------------------ counting

    def note(self, key: bytes, outcome: Reason | None, now: float) -> Reason | None:
        """Count a verdict on a rollout of `key` (None: accepted), and quarantine the node when it failed too often."""
        node = self._transitions.node(key)
        if outcome is not None:
            node.refused[outcome] = node.refused.get(outcome, 0) + 1
        self._quarantine_if(node, node.reputation.note(outcome, self._settings), now)
        return outcome

    def refuse(self, node: bytes, reason: Reason, now: float) -> None:
        """Count a message that was refused before the rules saw it, for example for a bad signature."""
        if node in self._transitions.nodes:
            self.note(node, reason, now)

    def lapse(self, lease: LiveLease, now: float) -> None:
        """`lease` expired. That counts against its node when it never reported progress."""
        if lease.id not in self._transitions.table.leases:  # the lapse before this one put its node into quarantine
            return
        node = self._transitions.nodes[lease.node]
        lapsed = len(lease.open) == len(lease.samples) and not lease.progress
        self._transitions.requeue(lease, Reason.EXPIRED, now)
        if now - node.liveness.heard > self._settings.fresh_s:  # perhaps it is gone: one silence counts as one lapse
            if node.gone_since == node.liveness.heard:
                return
            node.gone_since = node.liveness.heard
        self._quarantine_if(node, node.reputation.note_lease(lapsed, self._settings), now)

    def _blame_reward(self, node: bytes, now: float) -> None:
        """Other nodes computed another reward than `node`, and agree."""
        self.note(node, Reason.WRONG_REWARD, now)

    def _quarantine_if(self, node: Node, why: str | None, now: float) -> None:
        if why is not None and node.reputation.penalty is None:
            self.quarantine(node.key, why, node.reputation.term_s(self._settings), now)

    # ------------------------------------------------------------ checking

    def pick(
        self, lease: LiveLease, group: Group, sampling: SamplingParams, rollout: Rollout, sealed: bytes, now: float
    ) -> None:
        """Draw whether an accepted `rollout`, leased with `sampling` and signed as `sealed`, is checked. Its reward
        always is."""
        node = lease.node
        self.rewards.begin(group, rollout.sample, now, lease.reward)
        judged = self.verifier.pick(node, group, sampling, rollout, sealed, now)
        if not judged and self.verifier.draws(sealed) and self._is_scored(node, sampling):
            self.checks.begin(node, group.id, group.prompt, sampling, rollout, now)

    def _is_scored(self, author: bytes, sampling: SamplingParams) -> bool:
        """Whether another node may score what was drawn so. Without an adapter that depends on what asks later."""
        if not sampling.extra.adapter:
            return True
        others = (self._transitions.nodes.get(key) for key in self._members if key != author)
        return any(node is not None and scoring_needs(sampling) <= (node.abilities or frozenset()) for node in others)

    def due_judgements(self, now: float) -> list[tuple[bytes, OpenJudgement]]:
        """Which nodes are to be asked for which judgements now."""
        return self.verifier.due(now)

    def hear_judgement(self, node: bytes, answer: JudgeAnswer, now: float) -> None:
        """What `node` computed for a judgement."""
        self._convict_all(self.verifier.answer(node, answer, now), now)

    def next_check(self, node: bytes, now: float) -> OpenCheck | None:
        """A check that `node` should make now, if any."""
        found = self._transitions.nodes.get(node)
        if found is None or node not in self._members or found.version is None:
            return None
        if not found.scores or found.reputation.penalty:
            return None
        return self.checks.ask(node, found.version, now, found.abilities, found.adapters)

    def answer_check(self, node: bytes, check: int, version: Version, logprobs: tuple[float, ...], now: float) -> None:
        """The log-probabilities that `node` computed for a check.

        None at the version that was asked for: its engine cannot score. None at another version: the engine no longer
        holds the version that was asked for.
        """
        asked = self.checks.open.get(check)
        if not logprobs and asked is not None and node in asked.asked and self.checks.holds(asked, version):
            self._transitions.node(node).scores = False
            self.checks.refuse(node)
            return
        ruling = self.checks.answer(node, check, version, logprobs)
        if ruling is None:
            return
        if ruling.check.author not in ruling.liars:
            self._transitions.node(ruling.check.author).reputation.checked += 1
        self._convict_all([Liar(liar, ruling.why) for liar in ruling.liars], now)

    def accuse(self, group: bytes, sample: int, why: str, now: float) -> bool:
        """The trainer computed other log-probabilities for a sample that it was handed; that needs no confirmation.

        The group counts as not handed over. False: the ledger no longer has it.
        """
        found = self._transitions.pool.groups.get(group)
        done = None if found is None else found.done.get(sample)
        if found is None or done is None:
            return False
        found.handed_over = False
        self._convict(done.node, why, now)
        return True

    def _convict_all(self, liars: Iterable[Liar], now: float) -> None:
        for liar in liars:
            self._convict(liar.node, liar.why, now)
            self.verifier.convicted(liar.node)

    def _convict(self, node: bytes, why: str, now: float) -> None:
        """`node` was proven to lie: discard its rollouts that were not handed over, and quarantine it until a person
        releases it."""
        self.quarantine(node, why, None, now)
        for group in self._transitions.pool.groups.values():
            for sample, done in list(group.done.items()):
                if done.node == node and not group.handed_over:
                    self._transitions.discard(group, sample, Reason.LIED)

    # ------------------------------------------------------------ quarantine

    def quarantine(self, node: bytes, why: str, seconds: float | None, now: float) -> None:
        """Give `node` no work and refuse its results for `seconds` (None: until it is released). Its work goes to other
        nodes."""
        found = self._transitions.node(node)
        found.reputation.times += 1
        found.reputation.penalty = Penalty(why, None if seconds is None else now + seconds)
        found.capacity = 0
        self._transitions.facts.append(Quarantined(node, why, seconds, found.reputation.times))
        self.lose(node)
        for lease in sorted(found.leases):
            self._transitions.requeue(self._transitions.table.leases[lease], Reason.QUARANTINED, now)

    def lose(self, node: bytes) -> None:
        """`node` is gone or in quarantine: others are asked in its place."""
        self.checks.refuse(node)
        self.verifier.judgements.refuse(node)
        self.rewards.lose(node)
        self.nodes_changed()

    def nodes_changed(self) -> None:
        """A node came, left, was quarantined or released, or said what it can do."""
        self.verifier.nodes_changed()
        self.rewards.nodes_changed()

    def release(self, node: bytes, why: str) -> bool:
        """`node` may work again. False: it was not in quarantine."""
        found = self._transitions.nodes.get(node)
        if found is None or found.reputation.penalty is None:
            return False
        found.reputation.penalty = None
        found.reputation.clear()
        self.verifier.clear(node)
        self.nodes_changed()
        self._transitions.facts.append(Released(node, why))
        return True

    def resume(self, node: bytes, why: str | None, seconds: float | None, times: int | None, now: float) -> None:
        """Take in a quarantine that the book kept, or (without `why`) its end. Notes no fact."""
        reputation = self._transitions.node(node).reputation
        until = None if seconds is None else now + seconds
        reputation.penalty = None if why is None else Penalty(why, until)
        reputation.times = times or reputation.times
