"""Complete groups from the swarm, as an iterator that takes prompts only as fast as the nodes work them off."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blake3 import blake3
from msgspec.structs import replace

from node.engines.base import Span, Version
from node.ledger.checks import distance
from node.ledger.messages import pack_tokens, unpack_floats, unpack_tokens
from node.local import Channel, ChannelTimeout, close_fds
from node.trainers.errors import RolloutsFailed, SwarmDown, SwarmTimeout
from node.trainers.messages import Accuse, Offer, OpenRollouts, Refusal, Room, Sample, Stale, Taken
from node.trainers.seedlink import dial, speaking

__all__ = ["Check", "Rollout", "RolloutGroup", "group_id", "rollouts"]

LOOK_AGAIN_S: Final = 0.2
"""How soon a seed that went away is looked for again."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One accepted sample. For `token_ids`, `logprobs`, `finish_reason` and `spans` see `node.engines.base.Completion`.

    `node`: public key (32 bytes) of the node that signed it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    spans: tuple[Span, ...]
    node: bytes

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(epoch, version) of each token."""
        return tuple(span.version for span in self.spans for _ in range(span.start, span.end))


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All samples of one prompt. `index`: which of the prompts, counted from 0; groups come as they are complete."""

    index: int
    prompt: tuple[int, ...]
    rollouts: tuple[Rollout, ...]

    @property
    def oldest(self) -> Version:
        """The (epoch, version) of its oldest token."""
        return min(span.version for rollout in self.rollouts for span in rollout.spans)


@dataclass(frozen=True, slots=True)
class Check:
    """The trainer's own look at what nodes say, before it uses it.

    `score(prompt, rollout)`: the log-probability of each of its tokens under the version that it names, or None where
    the trainer no longer has that version. A node that is further off than `tolerance` (mean, nats a token; see
    `python -m scenarios.check_tolerance` for what rounding makes) is out, and its samples are drawn anew. `share` of
    the samples are looked at, picked by chance.
    """

    score: Callable[[tuple[int, ...], Rollout], Sequence[float] | None]
    share: float = 0.02
    tolerance: float = 0.1

    def lie(self, prompt: tuple[int, ...], rollout: Rollout) -> str | None:
        """What is wrong with a rollout, if it is looked at and something is."""
        if random.random() >= self.share or (found := self.score(prompt, rollout)) is None:
            return None
        off = distance(rollout.logprobs, found)
        return None if off <= self.tolerance else f"off by {off:.3g} nats a token"


def group_id(session: str, index: int) -> bytes:
    """The name (16 bytes) of the group of the `index`th prompt. The samples' random streams follow from it, so a `key`
    fixes them (`node.ledger.messages.stream_of`)."""
    return blake3(f"{session}/{index}".encode()).digest(16)


def rollouts(
    home: Path,
    asked: OpenRollouts,
    prompts: Iterable[Sequence[int]],
    timeout_s: float,
    check: Check | None = None,
    counted_from: Callable[[], Version] = lambda: (0, 0),
) -> Iterator[RolloutGroup]:
    """See `Swarm.rollouts`. `counted_from()`: the version that lags are counted from."""
    batch = _Batch(asked, prompts, timeout_s, check, counted_from)
    while True:
        try:
            with speaking("it was asked for rollouts"), dial(home) as channel:
                yield from batch.converse(channel)
                return
        except SwarmDown:
            if time.monotonic() >= batch.deadline:
                raise
            time.sleep(LOOK_AGAIN_S)  # a seed that is restarted kept what was done; only the news are lost


class _Batch:
    """What was offered and what is still to come, over any number of connections."""

    def __init__(
        self,
        asked: OpenRollouts,
        prompts: Iterable[Sequence[int]],
        timeout_s: float,
        check: Check | None,
        counted_from: Callable[[], Version],
    ) -> None:
        self._check = check
        self._counted_from = counted_from
        self._timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        """For the next group; starts anew when the caller asks for it."""
        self._asked = asked
        self._prompts = iter(prompts)
        self._count = 0
        self._last = False
        """There are no more prompts."""
        self._open: dict[bytes, tuple[int, tuple[int, ...]]] = {}
        self._taken: list[bytes] = []
        """Handed to the caller, and not yet confirmed to the seed."""
        self._parts: dict[bytes, list[Sample]] = {}

    def converse(self, channel: Channel) -> Iterator[RolloutGroup]:
        total = self._asked.total
        channel.send(self._asked if total is None else replace(self._asked, total=self._left(total)))
        self._parts.clear()
        for group, (_, prompt) in self._open.items():
            channel.send(Offer(group, pack_tokens(prompt)))
        offered, allowed = len(self._open), 0
        while True:
            for group in self._taken:
                channel.send(Taken(group))
            self._taken.clear()
            while offered < allowed and self._offer_next(channel):
                offered += 1
            if self._last and not self._open:
                return
            message = self._receive(channel)
            match message:
                case Room(total):
                    allowed = total
                case Sample():
                    if (group := self._collect(channel, message)) is not None:
                        yield group
                        self.deadline = time.monotonic() + self._timeout_s
                        self._taken.append(message.group)
                case Refusal(why):
                    raise RolloutsFailed(why)

    def _left(self, total: int) -> int:
        """Of `total` prompts, those whose groups were not had yet."""
        return max(0, total - self._count) + len(self._open)

    def _receive(self, channel: Channel) -> Any:
        try:
            message, fds = channel.recv(max(0.0, self.deadline - time.monotonic()))
        except ChannelTimeout as error:
            raise SwarmTimeout(
                f"No group was completed in time; {len(self._open)} are open. Are nodes connected? See swarm.state."
            ) from error
        close_fds(fds)
        return message

    def _offer_next(self, channel: Channel) -> bool:
        if self._last:
            return False
        prompt = next(self._prompts, None)
        if prompt is None:
            self._last = True
            return False
        tokens = tuple(int(token) for token in prompt)
        group = group_id(self._asked.session, self._count)
        channel.send(Offer(group, pack_tokens(tokens)))
        self._open[group] = (self._count, tokens)
        self._count += 1
        return True

    def _collect(self, channel: Channel, sample: Sample) -> RolloutGroup | None:
        if sample.group not in self._open:  # had before the connection broke
            if sample.left == 0:
                self._taken.append(sample.group)
            return None
        parts = self._parts.setdefault(sample.group, [])
        parts.append(sample)
        if sample.left:
            return None
        made = tuple(_rollout(part) for part in self._parts.pop(sample.group))
        index, prompt = self._open[sample.group]
        group, newest = RolloutGroup(index, prompt, made), self._counted_from()
        if group.oldest < (newest[0], max(0, newest[1] - self._asked.max_lag)):  # that came while it was on its way
            channel.send(Stale(sample.group, *newest))
            return None  # it comes again
        for i, rollout in enumerate(made):
            if self._check is not None and (why := self._check.lie(prompt, rollout)) is not None:
                channel.send(Accuse(sample.group, i, why))
                return None  # it comes again
        del self._open[sample.group]
        return group


def _rollout(sample: Sample) -> Rollout:
    starts = (0, *(end for _, _, end in sample.spans))
    spans = tuple(Span((e, v), start, end) for start, (e, v, end) in zip(starts, sample.spans, strict=False))
    tokens, logprobs = unpack_tokens(sample.token_ids), unpack_floats(sample.logprobs)
    return Rollout(tokens, logprobs, sample.finish_reason, spans, sample.node)
