"""Spot checks: a second node scores a sample's tokens under the version that it claims. Pure.

    picked --asked of a second node--> agrees: confirmed, over
                                       disagrees --asked of a third--> agrees with the second: the author lied
                                                                       agrees with the author: the second did
    nobody can in time: given up (disputed, if one disagreed)

A check costs one prefill. It shows tokens that another model (or an older version that differs enough) drew, and
invented log-probabilities; it cannot show that tokens were picked among several honest draws, nor anything where all
who are asked collude.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from node.engines.base import SamplingParams, Version, scoring_needs
from node.ledger.messages import Rollout, unpack_floats
from node.ledger.settings import Settings

__all__ = ["Check", "Checks", "Ruling", "distance", "tolerated"]

WORST: Final = 10.0
"""Nats that one token can count at most: an impossible token is 10 wrong, not infinitely."""


@dataclass(slots=True)
class Check:
    """Tokens [start, end) of a sample, which `author` says `version` drew. Others' scores: the distance each found."""

    id: int
    author: bytes
    group: bytes
    sample: int
    prompt: bytes
    sampling: SamplingParams
    rollout: Rollout
    version: Version
    start: int
    end: int
    until: float
    asked: dict[bytes, float] = field(default_factory=dict)
    """node -> when it was asked"""
    found: dict[bytes, float] = field(default_factory=dict)
    """node -> mean difference a token from what the author said, nats"""
    declined: set[bytes] = field(default_factory=set)
    """Nodes that were asked, and had moved on: each is sent the tokens once."""

    @property
    def claimed(self) -> tuple[float, ...]:
        return unpack_floats(self.rollout.logprobs)[self.start : self.end]


@dataclass(frozen=True, slots=True)
class Ruling:
    """A check is over. `liar`: who is proven to have lied, and `why`."""

    check: Check
    liar: bytes | None = None
    why: str = ""


class Checks:
    """The checks that are open."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.open: dict[int, Check] = {}
        self.begun = 0
        self.confirmed = 0
        self.given_up = 0
        self._next = 1

    def begin(
        self, author: bytes, group: bytes, prompt: bytes, sampling: SamplingParams, rollout: Rollout, now: float
    ) -> None:
        """Check the longest span of an accepted `rollout`, if there is room for another check."""
        if len(self.open) >= self.settings.checks_open:
            return
        starts = [0, *(span.end for span in rollout.spans)]
        lengths = [span.end - start for span, start in zip(rollout.spans, starts, strict=False)]
        i = lengths.index(max(lengths))
        span = rollout.spans[i]
        check = Check(
            id=self._next,
            author=author,
            group=group,
            sample=rollout.sample,
            prompt=prompt,
            sampling=sampling,
            rollout=rollout,
            version=(span.epoch, span.version),
            start=starts[i],
            end=span.end,
            until=now + self.settings.check_ttl_s,
        )
        self.open[check.id] = check
        self._next += 1
        self.begun += 1

    def ask(self, node: bytes, version: Version, now: float, abilities: frozenset[str] | None = None) -> Check | None:
        """A check that `node`, whose engine holds `version` and has `abilities`, can make: of another's sample, one
        that nobody is at."""
        for check in self.open.values():
            if check.version != version or node == check.author or node in check.asked:
                continue
            if not scoring_needs(check.sampling) <= (abilities or frozenset()):
                continue
            if node in check.declined:
                continue
            waiting = [at for other, at in check.asked.items() if other not in check.found]
            if any(now - at < self.settings.check_ttl_s / 4 for at in waiting):
                continue
            check.asked[node] = now
            return check
        return None

    def answer(self, node: bytes, check_id: int, version: Version, logprobs: Sequence[float]) -> Ruling | None:
        """What `node` computed. None: nothing follows (yet)."""
        check = self.open.get(check_id)
        if check is None or node not in check.asked or node in check.found:
            return None
        if version != check.version or len(logprobs) != check.end - check.start:
            del check.asked[node]  # it has moved on, or cannot: somebody else may
            check.declined.add(node)
            return None
        check.found[node] = distance(check.claimed, logprobs)
        bound = tolerated(self.settings.check_tolerance, check.sampling)
        verdicts = {other: found <= bound for other, found in check.found.items()}
        if len(verdicts) == 1 and not verdicts[node]:
            return None  # one word against another's
        del self.open[check_id]
        if len(verdicts) == 1:
            self.confirmed += 1
            return Ruling(check)
        (first, _), (_, agrees) = verdicts.items()
        if agrees:
            why = f"it disputed a sample that a third node confirmed (off by {check.found[first]:.3g} nats a token)"
            return Ruling(check, first, why)
        why = f"two nodes computed other log-probabilities for its tokens (off by {check.found[first]:.3g} nats each)"
        return Ruling(check, check.author, why)

    def refuse(self, node: bytes) -> None:
        """`node` cannot score, or is gone."""
        for check in self.open.values():
            if node in check.asked and node not in check.found:
                del check.asked[node]

    def expire(self, now: float) -> list[Check]:
        """Give up what nobody could do in time; those that one node had disputed."""
        over = [check for check in self.open.values() if check.until <= now]
        for check in over:
            del self.open[check.id]
            self.given_up += 1
        return [check for check in over if check.found]


def tolerated(tolerance: float, sampling: SamplingParams) -> float:
    """How far off an honest node may be: a temperature below 1 magnifies what rounding does to the logits."""
    return tolerance / sampling.temperature if 0.0 < sampling.temperature < 1.0 else tolerance


def distance(claimed: Sequence[float], found: Sequence[float]) -> float:
    """Mean absolute difference a token, each at most `WORST`: nats."""
    return sum(
        min(abs(a - b), WORST) if math.isfinite(b) else WORST for a, b in zip(claimed, found, strict=True)
    ) / len(claimed)
