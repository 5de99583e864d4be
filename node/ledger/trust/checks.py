"""Checks: other nodes score the tokens of an accepted rollout under the version that the rollout claims. Pure.

    begun --a second node scores--> it agrees: confirmed
                                    it disagrees --others score, until three are of one mind:
                                                                          the author lied, or those who disputed it did
    no node can score in time: given up (disputed, if one disagreed)

This is the check of nodes whose engines cannot judge (`node.ledger.trust.judgements`). It costs one prefill. It finds
tokens that another model generated, or an older version that differs enough, and invented log-probabilities. It cannot
find that a node selected among several honest samples. Two nodes that collude convict nobody; three do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from node.engines.base import SamplingParams, Version, scoring_needs
from node.ledger.messages import Rollout
from node.ledger.packing import unpack_floats
from node.ledger.part_history import PartHistory
from node.ledger.settings import Settings

__all__ = ["Checks", "OpenCheck", "Ruling", "distance", "tolerated"]

WORST: Final = 10.0
"""Nats. The difference at one token counts at most this much: an impossible token is wrong by 10, not by infinity."""
DECIDING: Final = 3
"""Nodes of one mind that decide a disputed check: two that collude must not."""


@dataclass(slots=True)
class OpenCheck:
    """A check of tokens [start, end) of a rollout, which `author` claims to have sampled from `version`."""

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
    """When it is given up."""
    asked: dict[bytes, float] = field(default_factory=dict)
    """node -> when it was asked"""
    found: dict[bytes, float] = field(default_factory=dict)
    """node -> the mean difference per token from the author's log-probabilities, in nats"""
    declined: set[bytes] = field(default_factory=set)
    """Nodes that were asked, and no longer held the version: each node is sent the tokens only once."""

    @property
    def claimed(self) -> tuple[float, ...]:
        return unpack_floats(self.rollout.logprobs)[self.start : self.end]


@dataclass(frozen=True, slots=True)
class Ruling:
    """A check is over. `liars` are the nodes that are proven to have lied, if any, and `why` the evidence."""

    check: OpenCheck
    liars: tuple[bytes, ...] = ()
    why: str = ""


class Checks:
    """The open checks, and counts of all. `parts` belongs to the ledger."""

    def __init__(self, settings: Settings, parts: PartHistory) -> None:
        self.settings = settings
        self._parts = parts
        self.open: dict[int, OpenCheck] = {}
        self.begun = 0
        self.confirmed = 0
        self.given_up = 0
        self._next = 1

    def begin(
        self, author: bytes, group: bytes, prompt: bytes, sampling: SamplingParams, rollout: Rollout, now: float
    ) -> None:
        """Begin a check of the longest span of an accepted `rollout`, if fewer than `Settings.checks_open` are open."""
        if len(self.open) >= self.settings.checks_open:
            return
        starts = [0, *(span.end for span in rollout.spans)]
        lengths = [span.end - start for span, start in zip(rollout.spans, starts, strict=False)]
        i = lengths.index(max(lengths))
        span = rollout.spans[i]
        check = OpenCheck(
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

    def holds(self, check: OpenCheck, version: Version) -> bool:
        """Whether an engine at `version` has the bits that drew the sample."""
        return self._parts.same(check.sampling.extra.adapter, check.version, version)

    def ask(
        self,
        node: bytes,
        version: Version,
        now: float,
        abilities: frozenset[str] | None = None,
        adapters: frozenset[str] = frozenset(),
    ) -> OpenCheck | None:
        """A check that `node`, whose engine holds `version`, has `abilities` and has loaded `adapters`, should make
        now, if any.

        Never of its own rollout, and never one that another node is working on.
        """
        for check in self.open.values():
            if not self.holds(check, version) or node == check.author or node in check.asked:
                continue
            if (adapter := check.sampling.extra.adapter) and adapter not in adapters:
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
        """The log-probabilities that `node` computed. None: the check is not decided yet."""
        check = self.open.get(check_id)
        if check is None or node not in check.asked or node in check.found:
            return None
        if not self.holds(check, version) or len(logprobs) != check.end - check.start:
            del check.asked[node]  # it no longer holds the version, or cannot score: another node may
            check.declined.add(node)
            return None
        check.found[node] = distance(check.claimed, logprobs)
        bound = tolerated(self.settings.check_tolerance, check.sampling)
        agreeing = [other for other, found in check.found.items() if found <= bound]
        disputing = tuple(other for other, found in check.found.items() if found > bound)
        if agreeing and not disputing:
            del self.open[check_id]
            self.confirmed += 1
            return Ruling(check)
        if max(len(agreeing), len(disputing)) < DECIDING:
            return None  # others decide
        del self.open[check_id]
        least = min(check.found[other] for other in disputing)
        if len(agreeing) == DECIDING:
            why = f"it disputed a sample that {DECIDING} nodes confirmed (off by {least:.3g} nats a token)"
            return Ruling(check, disputing, why)
        why = f"{DECIDING} nodes computed other log-probabilities for its tokens (off by {least:.3g} nats each)"
        return Ruling(check, (check.author,), why)

    def refuse(self, node: bytes) -> None:
        """`node` cannot score, or is gone: ask other nodes instead."""
        for check in self.open.values():
            if node in check.asked and node not in check.found:
                del check.asked[node]

    def expire(self, now: float) -> list[OpenCheck]:
        """Give up the checks that no node could make in time. Returns those that one node had disputed."""
        over = [check for check in self.open.values() if check.until <= now]
        for check in over:
            del self.open[check.id]
            self.given_up += 1
        return [check for check in over if check.found]


def tolerated(tolerance: float, sampling: SamplingParams) -> float:
    """The difference that an honest node may have, in nats per token: a temperature below 1 magnifies the rounding of
    the logits."""
    return tolerance / sampling.temperature if 0.0 < sampling.temperature < 1.0 else tolerance


def distance(claimed: Sequence[float], found: Sequence[float]) -> float:
    """The mean absolute difference per token, each at most `WORST`, in nats."""
    return sum(
        min(abs(a - b), WORST) if math.isfinite(b) else WORST for a, b in zip(claimed, found, strict=True)
    ) / len(claimed)
