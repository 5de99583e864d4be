"""Complete groups from the swarm, as an iterator that takes prompts only as fast as the nodes work them off."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from blake3 import blake3
from msgspec.structs import replace

from codec.errors import UsageError
from node.engines.base import Span, Version
from node.ipc.channel import Channel, ChannelTimeout, close_fds
from node.ledger.messages import pack_tokens, unpack_floats, unpack_tokens
from node.ledger.trust.checks import distance
from node.trainers.connection.patience import Wait
from node.trainers.connection.seedlink import dial, speaking
from node.trainers.errors import PromptRefused, RolloutsFailed, SwarmDown, SwarmTimeout
from node.trainers.messages import Accuse, Offer, OfferRefused, OpenRollouts, Refusal, Room, Sample, Stale, Taken
from node.trainers.prompts import BadPrompt
from node.trainers.standing import why_no_group

__all__ = ["Check", "RefusedPrompt", "Rollout", "RolloutGroup", "group_id", "rollouts"]

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
    def refused(self) -> None:
        """Its prompt was drawn; see `RefusedPrompt`."""
        return None

    @property
    def oldest(self) -> Version:
        """The (epoch, version) of its oldest token."""
        return min(span.version for rollout in self.rollouts for span in rollout.spans)


@dataclass(frozen=True, slots=True)
class RefusedPrompt:
    """What the iterator gives in the place of a group when a prompt cannot be drawn; the other prompts go on.

    `index`: which of the prompts, counted from 0. `prompt`: as it was given. `refused`: why, in a sentence. A loop that
    takes it for a group ends with `PromptRefused`, which names both.
    """

    index: int
    prompt: Any
    refused: str

    @property
    def rollouts(self) -> NoReturn:
        raise PromptRefused(self.index, self.refused)

    @property
    def oldest(self) -> NoReturn:
        raise PromptRefused(self.index, self.refused)


@dataclass(frozen=True, slots=True)
class Check:
    """The trainer's own look at what nodes say, before it uses it.

    `score(prompt, rollout)`: the log-probability of each of its tokens under the version that it names, or None where
    the trainer no longer has that version. A node that is further off than `tolerance` (mean, nats a token; see
    `python -m scenarios.bench.check_tolerance` for what rounding makes) is out, and its samples are drawn anew. `share`
    of the samples are looked at, picked by chance.
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
    prompts: Iterable[Any],
    tokens: Callable[[Any], tuple[int, ...]],
    timeout_s: float,
    check: Check | None = None,
    counted_from: Callable[[], Version] = lambda: (0, 0),
) -> Iterator[RolloutGroup | RefusedPrompt]:
    """See `Swarm.rollouts`. `tokens(prompt)`: its token ids; raises `BadPrompt`. `counted_from()`: the version that
    lags are counted from."""
    read = (_read(index, prompt, tokens) for index, prompt in enumerate(prompts))
    if asked.keep and isinstance(prompts, list | tuple):
        known = list(read)
        read, asked = iter(known), replace(asked, prompts=_hash(known), count=len(known))
    batch = _Batch(asked, read, timeout_s, check, counted_from, partial(why_no_group, home, asked.session))
    away: Wait | None = None
    while True:
        try:
            with speaking("it was asked for rollouts"), dial(home) as channel:
                away = None
                yield from batch.converse(channel)
                return
        except SwarmDown as error:
            if time.monotonic() >= batch.deadline:
                raise
            why = str(error)
            away = away or Wait(batch.deadline - time.monotonic(), lambda: f"rollouts: {why}")  # noqa: B023
            away.say()
            time.sleep(LOOK_AGAIN_S)  # a seed that is restarted kept what was done; only the news are lost


@dataclass(frozen=True, slots=True)
class _Prompt:
    """`given`: by the trainer. `packed`: its token ids, or None where it is none, and `why`."""

    index: int
    given: Any
    packed: bytes | None
    why: str = ""


def _read(index: int, given: Any, tokens: Callable[[Any], tuple[int, ...]]) -> _Prompt:
    try:
        return _Prompt(index, given, pack_tokens(tokens(given)))
    except BadPrompt as error:
        return _Prompt(index, given, None, str(error))


def _hash(prompts: Sequence[_Prompt]) -> bytes:
    """Of all of them in order; what is no prompt has no length."""
    state = blake3()
    for prompt in prompts:
        length = (1 << 32) - 1 if prompt.packed is None else len(prompt.packed)
        state.update(length.to_bytes(4, "little") + (prompt.packed or b""))
    return state.digest()


class _Batch:
    """What was offered and what is still to come, over any number of connections."""

    def __init__(
        self,
        asked: OpenRollouts,
        prompts: Iterator[_Prompt],
        timeout_s: float,
        check: Check | None,
        counted_from: Callable[[], Version],
        explain: Callable[[], str],
    ) -> None:
        self._explain = explain
        self._check = check
        self._counted_from = counted_from
        self._timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        """For the next group; starts anew when the caller asks for it."""
        self._asked = asked
        self._prompts = prompts
        self._count = 0
        self._skipped = 0
        """Of these, those that are no prompts."""
        self._last = False
        """There are no more prompts."""
        self._open: dict[bytes, _Prompt] = {}
        """By group, in the order of the prompts."""
        self._ready: dict[bytes, tuple[Rollout, ...]] = {}
        """Of these, those whose samples are here, and that the caller may have."""
        self._taken: list[bytes] = []
        """Handed to the caller, and not yet confirmed to the seed."""
        self._parts: dict[bytes, list[Sample]] = {}

    def converse(self, channel: Channel) -> Iterator[RolloutGroup | RefusedPrompt]:
        total, skipped_before = self._asked.total, self._skipped
        channel.send(self._asked if total is None else replace(self._asked, total=self._left(total)))
        self._parts.clear()
        self._ready.clear()
        for group, prompt in self._open.items():
            channel.send(Offer(group, prompt.packed or b""))
        offered, allowed = len(self._open), 0
        while True:
            for group in self._taken:
                channel.send(Taken(group))
            self._taken.clear()
            while offered < allowed and (prompt := self._next()) is not None:
                if prompt.packed is None:
                    self._skipped += 1
                    yield RefusedPrompt(prompt.index, prompt.given, prompt.why)
                    self.deadline = time.monotonic() + self._timeout_s
                    continue
                group = group_id(self._asked.session, prompt.index)
                self._open[group] = prompt
                offered += 1
                channel.send(Offer(group, prompt.packed, self._skipped - skipped_before))
            if self._last and not self._open:
                return
            while (message := self._receive(channel, wait=not self._ready)) is not None:
                match message:
                    case Room(total):
                        allowed = total
                    case Sample():
                        self._collect(channel, message)
                    case OfferRefused(group, why, usage) if (refused := self._open.pop(group, None)) is not None:
                        if usage:
                            raise UsageError(f"Prompt {refused.index}: {why}")
                        yield RefusedPrompt(refused.index, refused.given, why)
                        self.deadline = time.monotonic() + self._timeout_s
                    case Refusal(why, usage):
                        raise (UsageError if usage else RolloutsFailed)(why)
                if not self._ready and not isinstance(message, Sample):
                    break  # more may be offered, or nothing is open any more
            if (found := self._first(channel)) is not None:
                group, made = found
                yield made
                self.deadline = time.monotonic() + self._timeout_s
                self._taken.append(group)

    def _left(self, total: int) -> int:
        """Of `total` prompts, those whose groups were not had yet."""
        return max(0, total - self._count) + len(self._open)

    def _receive(self, channel: Channel, *, wait: bool) -> Any:
        """The next message; None where there is none, and nobody is to `wait` for it. Raises `SwarmTimeout` with the
        cause when none came until the deadline."""
        waits = Wait(self.deadline - time.monotonic(), lambda: f"rollouts: no group yet. {self._explain()}")
        while True:
            try:
                message, fds = channel.recv(waits.slice_s() if wait else 0.0)
            except ChannelTimeout as error:
                if not wait:
                    return None
                if waits.over:
                    raise SwarmTimeout(
                        f"No group was completed within {self._timeout_s:.0f} s; {len(self._open)} are open. "
                        f"{self._explain()}"
                    ) from error
                waits.say()
            else:
                close_fds(fds)
                return message

    def _next(self) -> _Prompt | None:
        if self._last:
            return None
        prompt = next(self._prompts, None)
        if prompt is None:
            self._last = True
        else:
            self._count += 1
        return prompt

    def _collect(self, channel: Channel, sample: Sample) -> None:
        """One more sample of a group; with the last of them the caller may have the group."""
        if sample.group not in self._open:  # had before the connection broke
            if sample.left == 0:
                channel.send(Taken(sample.group))
            return
        parts = self._parts.setdefault(sample.group, [])
        parts.append(sample)
        if not sample.left:
            self._ready[sample.group] = tuple(_rollout(part) for part in self._parts.pop(sample.group))

    def _first(self, channel: Channel) -> tuple[bytes, RolloutGroup] | None:
        """Of the groups that are here, that of the earliest prompt. Those that may not be used are drawn anew."""
        while self._ready:
            name = min(self._ready, key=lambda name: self._open[name].index)
            made, prompt = self._ready.pop(name), self._open[name]
            group = RolloutGroup(prompt.index, unpack_tokens(prompt.packed or b""), made)
            newest = self._counted_from()
            if group.oldest < (newest[0], max(0, newest[1] - self._asked.max_lag)):  # that came while it was on its way
                channel.send(Stale(name, *newest))
            elif (lie := self._lie(group)) is not None:
                channel.send(Accuse(name, *lie))
            else:
                del self._open[name]
                return name, group
        return None

    def _lie(self, group: RolloutGroup) -> tuple[int, str] | None:
        """The sample that the trainer itself computes otherwise, and how."""
        for i, rollout in enumerate(group.rollouts):
            if self._check is not None and (why := self._check.lie(group.prompt, rollout)) is not None:
                return i, why
        return None


def _rollout(sample: Sample) -> Rollout:
    starts = (0, *(end for _, _, end in sample.spans))
    spans = tuple(Span((e, v), start, end) for start, (e, v, end) in zip(starts, sample.spans, strict=False))
    tokens, logprobs = unpack_tokens(sample.token_ids), unpack_floats(sample.logprobs)
    return Rollout(tokens, logprobs, sample.finish_reason, spans, sample.node)
