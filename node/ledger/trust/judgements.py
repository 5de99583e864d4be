"""Judgements: nodes of an author's panel compute what its tokens should look like. Pure.

    drawn --the first checker answers--> it counts for the author's evidence
      |                                      |
      |  more were wanted from the start, or what it found is beyond any rounding
      |                                      v
      |                       more checkers answer: they are compared, and the author may be proven at once
      +--none can in time: given up

A checker that does not answer is passed over for the next one after a while: that costs time and nothing else. An
answer with other lengths, another version, or a number that is not finite is no answer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from node.engines.base import SamplingParams, Version
from node.ledger.messages import JudgeAnswer, Rollout, unpack_floats
from node.ledger.settings import Settings
from node.verification.opinions import Opinion

__all__ = ["OPINIONS", "Judgements", "OpenJudgement"]

OPINIONS: Final = 3
"""Opinions where more than one is wanted."""
LOST_S: Final = 30.0
"""A checker that has not answered for so long is passed over. Its answer still counts if it comes."""
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
    asked: dict[bytes, float] = field(default_factory=dict)
    """checker -> when it was asked"""
    found: dict[bytes, Opinion] = field(default_factory=dict)
    """In the order of the answers; the first counts for the author's evidence."""
    declined: set[bytes] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def claimed(self) -> tuple[float, ...]:
        return unpack_floats(self.rollout.logprobs)[self.start : self.end]

    @property
    def settled(self) -> bool:
        """Whether no further opinion is wanted, or none is to come."""
        left = [checker for checker in self.checkers if checker not in self.declined and checker not in self.found]
        return len(self.found) >= self.wanted or not left

    def to_ask(self, now: float) -> Iterator[bytes]:
        """The checkers to ask now, one for each opinion that is wanted and not on its way."""
        lost = {checker for checker, at in self.asked.items() if checker not in self.found and now - at >= LOST_S}
        gone = self.declined | lost
        coming = sum(checker not in gone for checker in self.asked)
        for checker in self.checkers:
            if coming >= self.wanted:
                return
            if checker not in self.asked and checker not in self.declined:
                coming += 1
                yield checker


class Judgements:
    """The open judgements, and counts of all."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.open: dict[int, OpenJudgement] = {}
        self.begun = 0
        self.answered = 0
        """Judgements with an opinion at least."""
        self.given_up = 0
        self._next = 1

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
    ) -> OpenJudgement:
        """Begin a check of the longest span of an accepted `rollout`."""
        starts = [0, *(span.end for span in rollout.spans)]
        span, start = max(zip(rollout.spans, starts, strict=False), key=lambda pair: (pair[0].end - pair[1], -pair[1]))
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
        )
        self.open[check.id] = check
        self._next += 1
        self.begun += 1
        return check

    def due(self, can: Callable[[bytes, OpenJudgement], bool], now: float) -> list[tuple[bytes, OpenJudgement]]:
        """Who should be asked now. `can(node, check)`: whether this node can make it at the moment."""
        busy: dict[bytes, int] = {}
        for check in self.open.values():
            for checker in check.asked:
                if checker not in check.found and checker not in check.declined:
                    busy[checker] = busy.get(checker, 0) + 1
        found = []
        for check in self.open.values():
            for checker in check.to_ask(now):
                if busy.get(checker, 0) < AT_A_TIME and can(checker, check):
                    check.asked[checker] = now
                    busy[checker] = busy.get(checker, 0) + 1
                    found.append((checker, check))
        return found

    def answer(self, node: bytes, answer: JudgeAnswer) -> OpenJudgement | None:
        """The check to which `node` added an opinion; None when its answer is none."""
        check = self.open.get(answer.check)
        if check is None or node not in check.asked or node in check.found or node in check.declined:
            return None
        try:
            if (answer.epoch, answer.version) != check.version:
                raise ValueError("another version")
            margins = unpack_floats(answer.margins)
            if bool(margins) != check.sampling.extra.portable:
                raise ValueError("margins where there is no noise, or none where there is")
            opinion = Opinion.of(check.tokens, unpack_floats(answer.scores), unpack_floats(answer.previous), margins)
        except ValueError:
            check.declined.add(node)
            return None
        self.answered += not check.found
        check.found[node] = opinion
        return check

    def refuse(self, node: bytes) -> None:
        """`node` is gone or in quarantine: neither its opinions nor its samples are wanted."""
        for number, check in list(self.open.items()):
            if check.author == node:
                del self.open[number]
            elif node in check.checkers and node not in check.found:
                check.declined.add(node)

    def close_settled(self, now: float) -> list[OpenJudgement]:
        """End the judgements that are settled or too old; those with an opinion are returned."""
        over = [check for check in self.open.values() if check.settled or check.until <= now]
        for check in over:
            del self.open[check.id]
            self.given_up += not check.found
        return [check for check in over if check.found]
