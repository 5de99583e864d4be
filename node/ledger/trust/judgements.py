"""Judgements: nodes of an author's panel compute what its tokens should look like. Pure.

    drawn --the first checker answers--> it counts for the author's evidence
      |                                      |
      |  more were wanted from the start, or what it found is beyond any rounding, or other bits than claimed
      |                                      v
      |                       more checkers answer: they are compared, and the author may be proven at once
      +--none can in time: given up

Where author and panel are of one class and replay, an opinion is a replay: it has the author's bits, or the whole panel
is asked (`node.verification.replays`), until so many agree that nobody else can change what they say. A checker can
replay only the version that its engine holds: one whose engine is behind is asked when it gets there, and one that has
moved on never is. Where versions follow each other within the time of one replay, a panel that is asked only after a
first opinion has moved on: so the panel of an author in doubt is asked at once.

A checker that does not answer is passed over for the next one after a while: that costs time and nothing else. An
answer with other lengths, another version, or a number that is not finite is no answer.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import Final

from node.engines.base import SamplingParams, Version
from node.ledger.messages import JudgeAnswer, Rollout
from node.ledger.packing import unpack_floats
from node.ledger.part_history import PartHistory
from node.ledger.settings import Settings
from node.verification.classes import ArithmeticClass
from node.verification.opinions import Opinion
from node.verification.replays import all_alike, weigh

__all__ = ["OPINIONS", "Judgements", "OpenJudgement"]

OPINIONS: Final = 3
"""Opinions where more than one is wanted."""
LOST_S: Final = 30.0
"""A checker that has not answered for so long is passed over. Its answer still counts if it comes."""
SILENT_S: Final = 600.0
"""A checker that answers nothing is asked again so long after the last time."""
AT_A_TIME: Final = 4
"""Open requests of one checker: it drops the oldest of more than eight."""


@dataclass(slots=True)
class OpenJudgement:
    """A check of tokens [start, end) of a rollout, which `author` claims to have sampled from `version`."""

    id: int
    author: bytes
    group: bytes
    rollout: Rollout
    prompt: bytes
    sampling: SamplingParams
    """As it was leased."""
    stream: int
    version: Version
    start: int
    end: int
    checkers: list[bytes]
    """In the order in which they are asked."""
    wanted: int
    """Opinions."""
    until: float
    """When it is given up."""
    replays: ArithmeticClass | None = None
    """The class of its author and panel, if they replay."""
    asked: dict[bytes, float] = field(default_factory=dict)
    """checker -> when it was asked"""
    found: dict[bytes, Opinion] = field(default_factory=dict)
    """In the order of the answers; the first counts for the author's evidence."""
    declined: set[bytes] = field(default_factory=set)
    decided: bool = False
    """So many replays agree that no other one can change what they say of the author."""

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def adapter(self) -> str:
        """The adapter that drew it; empty: the base alone."""
        return self.sampling.extra.adapter

    @property
    def claimed(self) -> tuple[float, ...]:
        return unpack_floats(self.rollout.logprobs)[self.start : self.end]

    def is_settled(self, now: float) -> bool:
        """Whether no further opinion is wanted, none is to come, or those that came decide."""
        if len(self.found) >= self.wanted or self.decided:
            return True
        lost = {checker for checker, at in self.waits_for() if now - at >= LOST_S}
        return all(checker in self.declined or checker in self.found or checker in lost for checker in self.checkers)

    def add(self, checker: bytes, opinion: Opinion) -> None:
        """`checker` answered."""
        self.found[checker] = opinion
        if self.replays is not None and not all_alike(self.claimed, self.found):
            self.decided = weigh(self.claimed, self.found, len(self.checkers)).author is not None

    def waits_for(self) -> Iterator[tuple[bytes, float]]:
        """The checkers that have not answered yet, and when they were asked."""
        for checker, at in self.asked.items():
            if checker not in self.found and checker not in self.declined:
                yield checker, at

    def to_ask(self, now: float, able: Set[bytes]) -> Iterator[bytes]:
        """The checkers to ask now, one for each opinion that is wanted and not on its way. Those that are not `able` at
        the moment are passed over."""
        lost = {checker for checker, at in self.waits_for() if now - at >= LOST_S}
        gone = self.declined | lost
        coming = sum(checker not in gone for checker in self.asked)
        for checker in self.checkers:
            if coming >= self.wanted:
                return
            if checker in able and checker not in self.asked and checker not in self.declined:
                coming += 1
                yield checker


class Judgements:
    """The open judgements, and counts of all. `parts` belongs to the ledger."""

    def __init__(self, settings: Settings, parts: PartHistory) -> None:
        self._settings = settings
        self._parts = parts
        self.open: dict[int, OpenJudgement] = {}
        self.begun = 0
        self.answered = 0
        """Judgements with an opinion at least."""
        self.given_up = 0
        self._next = 1
        self._unanswered: dict[bytes, list[float]] = {}
        """By node, when it was asked what it has not answered, since its last answer; of judgements that are over."""

    @property
    def full(self) -> bool:
        return len(self.open) >= self._settings.checks_open

    def begin(
        self,
        author: bytes,
        group: bytes,
        rollout: Rollout,
        prompt: bytes,
        sampling: SamplingParams,
        stream: int,
        checkers: list[bytes],
        wanted: int,
        now: float,
        replays: ArithmeticClass | None = None,
        *,
        first_span: bool = False,
    ) -> OpenJudgement:
        """Begin a check of the longest span of an accepted `rollout`, or of its first one."""
        starts = [0, *(span.end for span in rollout.spans)]
        spans = list(zip(rollout.spans, starts, strict=False))[: 1 if first_span else None]
        span, start = max(spans, key=lambda pair: (pair[0].end - pair[1], -pair[1]))
        check = OpenJudgement(
            id=self._next,
            author=author,
            group=group,
            rollout=rollout,
            prompt=prompt,
            sampling=sampling,
            stream=stream,
            version=(span.epoch, span.version),
            start=start,
            end=span.end,
            checkers=checkers,
            wanted=wanted,
            until=now + self._settings.check_ttl_s,
            replays=replays,
        )
        self.open[check.id] = check
        self._next += 1
        self.begun += 1
        return check

    def due(self, version_of: Callable[[bytes, str], Version | None], now: float) -> list[tuple[bytes, OpenJudgement]]:
        """Who should be asked now: nodes that hold the bits which drew the sample. `version_of(node, adapter)`: what
        its engine holds; None: it is not there, or has not loaded the adapter."""
        waiting = [pair for check in self.open.values() for pair in check.waits_for()]
        busy = Counter(checker for checker, _ in waiting)
        silent = self._silent(waiting, now)
        found = []
        for check in sorted(self.open.values(), key=lambda check: not check.found):  # a second opinion is urgent
            held = {node: version_of(node, check.adapter) for node in check.checkers if node not in check.asked}
            there = {node: version for node, version in held.items() if version is not None}
            alike = {node for node, version in there.items() if self._is_alike(check, version)}
            check.declined |= {node for node in there.keys() - alike if there[node] > check.version}
            able = alike - silent
            for checker in check.to_ask(now, able):
                if busy[checker] < AT_A_TIME:
                    check.asked[checker] = now
                    busy[checker] += 1
                    found.append((checker, check))
        return found

    def _is_alike(self, check: OpenJudgement, version: Version) -> bool:
        """Whether an engine that holds `version` has the bits that drew the sample."""
        return self._parts.same(check.adapter, check.version, version)

    def _silent(self, waiting: list[tuple[bytes, float]], now: float) -> set[bytes]:
        """Nodes that left `AT_A_TIME` requests in a row without an answer. They are asked again after a while."""
        asked = {node: list(times) for node, times in self._unanswered.items()}
        for node, at in waiting:
            if now - at >= LOST_S:
                asked.setdefault(node, []).append(at)
        return {node for node, times in asked.items() if len(times) >= AT_A_TIME and now - max(times) < SILENT_S}

    def answer(self, node: bytes, answer: JudgeAnswer) -> OpenJudgement | None:
        """The check to which `node` added an opinion; None when its answer is none."""
        self._unanswered.pop(node, None)
        check = self.open.get(answer.check)
        if check is None or node not in check.asked or node in check.found or node in check.declined:
            return None
        try:
            if not self._is_alike(check, (answer.epoch, answer.version)):
                raise ValueError("another version")
            margins = unpack_floats(answer.margins)
            if bool(margins) != check.sampling.extra.portable:
                raise ValueError("margins where there is no noise, or none where there is")
            opinion = Opinion.of(check.tokens, unpack_floats(answer.scores), unpack_floats(answer.previous), margins)
        except ValueError:
            check.declined.add(node)
            return None
        self.answered += not check.found
        check.add(node, opinion)
        return check

    def refuse(self, node: bytes) -> None:
        """`node` is gone or in quarantine: neither its opinions nor its samples are wanted."""
        self._unanswered.pop(node, None)
        for number, check in list(self.open.items()):
            if check.author == node:
                del self.open[number]
            elif node in check.checkers and node not in check.found:
                check.declined.add(node)

    def close_settled(self, now: float) -> list[OpenJudgement]:
        """End the judgements that are settled or too old; those with an opinion are returned."""
        over = [check for check in self.open.values() if check.until <= now or check.is_settled(now)]
        for check in over:
            del self.open[check.id]
            self.given_up += not check.found
            for checker, at in check.waits_for():
                if now - at >= LOST_S:
                    self._unanswered[checker] = [*self._unanswered.get(checker, [])[1 - AT_A_TIME :], at]
        return [check for check in over if check.found]
