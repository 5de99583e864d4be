"""Checks of rewards: every reward is computed by a second node before the trainer gets the sample. Pure.

    accepted --the same from another node--> checked
       |      no other node has the function, or none answers--> unchecked
       | another one from another node: further nodes are asked, one at a time,
       v until three have the same, or nobody is left to ask and most, at least two, have the same
    these have the author's  --> checked                             the others were wrong
    these have another one   --> the sample is generated again       the author was wrong
    neither                  --> disputed: it is generated again, or the trainer decides (`Terms.arbitrates`)

Functions are deterministic, so rewards are the same when their 64 bits are. A node that was wrong gets a bad result in
its record (`node.ledger.trust.reputation`); without a number it is not blamed, since a deadline or a full memory is no
lie. Until the check of each of its rewards is over, a group is not handed over (`waiting`). So one dishonest node
cannot change a reward that is checked. Two that collude can, where one is drawn to check the other; where five nodes
have the function, these two cannot have an honest node blamed.

The node that checks follows from a secret hash of the signed sample: neither the author nor the checker can choose it.
Open checks are not durable: after a restart they begin anew.
"""

import math
import struct
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

from node.engines.base import RewardAsked
from node.ledger.messages import Reason, RewardAnswer, Rollout
from node.ledger.state import AcceptedRollout, Group, RewardCheck
from node.ledger.transitions import Transitions
from node.ledger.trust.reward_functions import PREFIX, RewardFunctions

__all__ = ["OpenRewardCheck", "RewardChecks", "has_reward_as_asked"]

LOST_S: Final = 30.0
"""A node that has not answered for so long is passed over. Its answer counts if it comes before another decides."""
NEW: Final = 3
"""Questions for its abilities after which a node that has not answered is taken for one of an older release."""
SILENT: Final = 4
"""Questions in a row that a node leaves unanswered, each of which holds up a group. Then it is not asked for
`SILENT_S`."""
SILENT_S: Final = 600.0
LOOK_S: Final = 1.0
"""Between two looks at all open checks, of which there may be thousands."""
AT_A_TIME: Final = 32
"""Open questions to one node."""
MOST_BUSY: Final = 256
"""Checks whose nodes are all busy, in one turn: then the others wait for the next one."""
AGREEING: Final = 2
"""Nodes, the author among them, that have the same reward while none has another one: with one dishonest node, one of
them is honest."""
DECIDING: Final = 3
"""Nodes that have the same reward where one has another: two that collude must not decide while there are others."""
MAX_NEWS: Final = 64


def has_reward_as_asked(rollout: Rollout, group: Group) -> bool:
    """Whether the rollout has a reward if one was asked for, and that is a finite number or has a reason."""
    claim = rollout.reward
    if claim is None or group.sampling.extra.reward is None:
        return (claim is None) == (group.sampling.extra.reward is None)
    if claim.value is None:
        return bool(claim.why) and claim.why.isprintable()
    return math.isfinite(claim.value) and not claim.why


def _bits(value: float | None) -> bytes:
    """What two rewards are compared by. Minus zero, which no node sends, is zero."""
    return b"" if value is None else struct.pack("<d", value + 0.0)


@dataclass(slots=True)
class OpenRewardCheck:
    """A check of the reward of an accepted rollout."""

    id: int
    group: Group
    sample: int
    done: AcceptedRollout
    asked: RewardAsked
    ability: str
    """Names the author's function, as it was leased to. Empty: the function that counts for this name."""
    until: float
    """When it is given up."""
    asked_at: dict[bytes, float] = field(default_factory=dict)
    """By node that was asked: when."""
    found: dict[bytes, float | None] = field(default_factory=dict)
    """By node that answered: its reward."""
    declined: set[bytes] = field(default_factory=set)
    lost: set[bytes] = field(default_factory=set)
    """Nodes that did not answer in time, or joined anew meanwhile."""
    repeated: set[bytes] = field(default_factory=set)
    """Nodes that were asked again, because nobody else was left and the question or its answer may have been lost."""

    @property
    def claimed(self) -> float | None:
        """The author's reward."""
        return None if self.done.rollout.reward is None else self.done.rollout.reward.value

    @property
    def is_current(self) -> bool:
        """Whether the rollout still counts for its sample."""
        return self.group.done.get(self.sample) is self.done

    def decided(self, *, all_asked: bool = False) -> bytes | None:
        """The bits that count; None: that is not known yet. `all_asked`: nobody is left to ask."""
        voices = Counter([_bits(self.claimed), *map(_bits, self.found.values())])
        (bits, count), *others = voices.most_common()
        if all_asked and others and others[0][1] == count:
            return None
        return bits if count >= (AGREEING if all_asked or not others else DECIDING) else None

    @property
    def unanswered(self) -> list[bytes]:
        """The nodes that were asked and may still answer, in time or too late."""
        return [node for node in self.asked_at if node not in self.found and node not in self.declined]

    def is_waiting(self, now: float) -> bool:
        """Whether a node that was asked may still answer in time."""
        return any(now - self.asked_at[node] < LOST_S for node in self.unanswered)


@dataclass(slots=True)
class RewardCounts:
    """What became of the checks that are over."""

    checked: int = 0
    unchecked: int = 0
    wrong: int = 0
    disputed: int = 0


class RewardChecks:
    """The open checks, and counts of all. `transitions` and `members` belong to the ledger. `blame(node, now)`: a
    reward of this node was wrong. `secret`: 32 bytes that only the seed knows."""

    def __init__(
        self, transitions: Transitions, members: Set[bytes], blame: Callable[[bytes, float], None], secret: bytes
    ) -> None:
        self._transitions, self._members, self._blame = transitions, members, blame
        self._settings = transitions.settings
        self._secret = blake3(b"rewards" + secret).digest()
        self.functions = RewardFunctions()
        self.open: dict[int, OpenRewardCheck] = {}
        self.counts = RewardCounts()
        self.disputes: list[tuple[str, bytes, bytes]] = []
        """(reward, its author, a node that computed another) of the disputes that nobody decided, for the log."""
        self._to_ask: dict[int, OpenRewardCheck] = {}
        """Of the open checks, those for which a node is to be asked."""
        self._of_sample: dict[tuple[bytes, int], OpenRewardCheck] = {}
        self._look_at = -math.inf
        self._patient_until = -math.inf
        """Before this time, no able node means that nodes are still to come."""
        self._waiting: Counter[bytes] = Counter()
        """Open checks by group."""
        self._questions: Counter[bytes] = Counter()
        """Questions without an answer by node."""
        self._lost: Counter[bytes] = Counter()
        """By node: questions since its last answer that it did not answer in time."""
        self._silent_until: dict[bytes, float] = {}
        """Nodes that are not asked before this time."""
        self._next = 1

    def begin(self, group: Group, sample: int, now: float, ability: str = "") -> None:
        """A rollout of `group` was accepted. Its reward is checked if it has one. `ability`: see `LiveLease`."""
        asked, done = group.sampling.extra.reward, group.done[sample]
        group.reward_checks.pop(sample, None)
        if (before := self._of_sample.get((group.id, sample))) is not None:
            self._close(before)
        if asked is None or done.rollout.reward is None:
            return
        until = max(now, self._patient_until) + self._settings.reward_ttl_s
        check = OpenRewardCheck(self._next, group, sample, done, asked, ability, until)
        self._next += 1
        self.open[check.id] = self._to_ask[check.id] = self._of_sample[group.id, sample] = check
        self._waiting[group.id] += 1

    def adopt(self, group: Group) -> None:
        """Take in a group that the book kept: its rewards are checked (again). After a restart, when nobody is a member
        yet, nodes have some time to come back."""
        if not self._members:
            self._patient_until = max(self._patient_until, group.since + self._settings.return_s)
        for sample in group.done:
            self.begin(group, sample, group.since)

    @property
    def waiting(self) -> Set[bytes]:
        """The groups with open checks, which cannot be handed over."""
        return self._waiting.keys()

    def nodes_changed(self) -> None:
        """A node came, left, was quarantined or released, or said what it can do."""
        self.functions.stale = True

    def next_deadline(self) -> float | None:
        """The latest time for the next call of `tick`."""
        return self._look_at if self.open else None

    def tick(self, now: float) -> None:
        """Choose the functions that count. At most every `LOOK_S`, end the checks that are over and ask others in the
        place of nodes that do not answer."""
        self._refresh()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for check in list(self.open.values()):
            if not check.is_current or check.group.id not in self._transitions.pool.groups:
                self._close(check)
            elif now >= check.until:
                self._end(check, now)
            elif not check.is_waiting(now):
                self._to_ask[check.id] = check
                for node in check.unanswered:
                    self._lose_question(check, node, now)

    def _lose_question(self, check: OpenRewardCheck, node: bytes, now: float) -> None:
        """`node` has not answered in time."""
        if node not in check.lost:
            check.lost.add(node)
            self._count_lost(node, now)

    def _count_lost(self, node: bytes, now: float) -> None:
        self._lost[node] += 1
        if self._lost[node] >= SILENT:
            self._silent_until[node] = now + SILENT_S

    def _refresh(self) -> None:
        nodes = (self._transitions.nodes[key] for key in self._members if key in self._transitions.nodes)
        if self.functions.choose(nodes):
            self._transitions.pool.more_may_begin()

    # ------------------------------------------------------------ asking

    def due(self, now: float) -> list[tuple[bytes, OpenRewardCheck]]:
        """Who is to be asked about what now. Ends the checks for which there is nobody to ask."""
        self._refresh()
        found: list[tuple[bytes, OpenRewardCheck]] = []
        busy, some_are_new = 0, self._some_are_new()
        for check in list(self._to_ask.values()):
            if check.is_waiting(now):
                del self._to_ask[check.id]
                continue
            able = self._able(check, now)
            free = next((node for node in able if self._questions[node] < AT_A_TIME), None)
            if free is not None:
                self._ask(check, free, now)
                found.append((free, check))
            elif not able and now >= self._patient_until and not some_are_new:
                self._end(check, now)
            elif (busy := busy + 1) >= MOST_BUSY:
                break
        return found

    def _ask(self, check: OpenRewardCheck, node: bytes, now: float) -> None:
        """`node` is asked, for the first or the second time."""
        del self._to_ask[check.id]
        if node in check.asked_at:
            check.repeated.add(node)
            check.lost.discard(node)
        else:
            self._questions[node] += 1
        check.asked_at[node] = now

    def _some_are_new(self) -> bool:
        """Whether a member has not said yet what it can do; one of an older release never does."""
        members = (self._transitions.nodes[key] for key in self._members if key in self._transitions.nodes)
        return any(node.abilities is None and node.capacity and node.abilities_questions <= NEW for node in members)

    def _able(self, check: OpenRewardCheck, now: float) -> list[bytes]:
        """The nodes to ask, in the check's order: those that have the author's function, are not silent and were not
        asked; where there are none, those that did not answer, once more."""
        silent, author = self._silent_until, check.done.node
        others = [key for key in self.functions.having.get(self._ability(check), []) if key != author]
        begin = int.from_bytes(blake3(self._secret + check.done.sealed).digest(8), "little") % max(1, len(others))
        order = others[begin:] + others[:begin]
        there = [key for key in order if silent.get(key, -math.inf) <= now]
        first = [key for key in there if key not in check.asked_at]
        return first or [key for key in there if key in check.lost and key not in check.repeated]

    def _ability(self, check: OpenRewardCheck) -> str:
        """The ability that names the author's function."""
        name, at, _ = check.asked.name.partition("@")
        if at or check.ability:
            return check.asked.ability if at else check.ability
        return f"{PREFIX}{name}@{self.functions.chosen.get(name, '')}"

    # ------------------------------------------------------------ answers

    def answer(self, node: bytes, answer: RewardAnswer, now: float) -> None:
        """What `node` computed. A number that is not finite is no answer."""
        check = self.open.get(answer.check)
        if check is None or node not in check.asked_at or node in check.found or node in check.declined:
            return
        self._answered(node)
        self._lost.pop(node, None)
        self._silent_until.pop(node, None)
        if answer.declined or not (answer.value is None or math.isfinite(answer.value)):
            check.declined.add(node)
        else:
            check.found[node] = answer.value
        if not check.is_current:
            self._close(check)
        elif (bits := check.decided()) is not None:
            self._decide(check, bits, now)
        else:
            self._to_ask[check.id] = check

    def lose(self, node: bytes) -> None:
        """`node` is gone or in quarantine: others are asked in its place."""
        self._lost.pop(node, None)
        self._silent_until.pop(node, None)
        for check in self.open.values():
            if node in check.unanswered:
                check.declined.add(node)
                self._answered(node)
                self._to_ask[check.id] = check

    def joined_again(self, node: bytes, now: float) -> None:
        """`node` is most likely a new process, which was asked nothing yet: others are asked in its place, or it is
        asked once more. However many questions it lost, they count as one that it left unanswered."""
        checks = [check for check in self.open.values() if node in check.unanswered and node not in check.lost]
        for check in checks:
            check.lost.add(node)
            check.asked_at[node] = -math.inf
            self._to_ask[check.id] = check
        if checks:
            self._count_lost(node, now)

    def _end(self, check: OpenRewardCheck, now: float) -> None:
        """Nobody is left to ask, or the time is over."""
        if (bits := check.decided(all_asked=True)) is None:
            self._give_up(check)
        else:
            self._decide(check, bits, now)

    def _decide(self, check: OpenRewardCheck, bits: bytes, now: float) -> None:
        """The reward with these bits counts."""
        right = _bits(check.claimed) == bits
        self._close(check)
        wrong = [node for node, value in check.found.items() if value is not None and _bits(value) != bits]
        if right:
            check.group.reward_checks[check.sample] = "checked"
            self.counts.checked += 1
        else:
            self.counts.wrong += 1
            self._transitions.discard(check.group, check.sample, Reason.WRONG_REWARD)
            if check.claimed is not None:
                wrong.append(check.done.node)
        for node in wrong:
            self._blame(node, now)

    def _give_up(self, check: OpenRewardCheck) -> None:
        """Nobody can tell which reward counts."""
        self._close(check)
        other = next((node for node, value in check.found.items() if _bits(value) != _bits(check.claimed)), None)
        state: RewardCheck = "unchecked" if other is None else "disputed"
        if other is None:
            self.counts.unchecked += 1
        else:
            self.counts.disputed += 1
            if len(self.disputes) < MAX_NEWS:
                self.disputes.append((check.asked.name, check.done.node, other))
        if other is None or check.group.terms.arbitrates:
            check.group.reward_checks[check.sample] = state
        else:
            self._transitions.discard(check.group, check.sample, Reason.DISPUTED)

    def _close(self, check: OpenRewardCheck) -> None:
        del self.open[check.id]
        del self._of_sample[check.group.id, check.sample]
        self._to_ask.pop(check.id, None)
        for node in check.unanswered:
            self._answered(node)
        self._waiting[check.group.id] -= 1
        if not self._waiting[check.group.id]:
            del self._waiting[check.group.id]

    def _answered(self, node: bytes) -> None:
        self._questions[node] -= 1
        if not self._questions[node]:
            del self._questions[node]
