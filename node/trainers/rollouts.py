"""Complete groups from the swarm, as an iterator that takes prompts only as fast as the nodes finish them."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from blake3 import blake3
from msgspec.structs import replace

from codec.errors import UsageError
from codec.routes import Routes
from node.engines.base import Span, Version
from node.ipc.channel import Channel, ChannelTimeout, close_fds
from node.ledger.packing import pack_tokens, unpack_floats, unpack_tokens
from node.ledger.route_reader import BadRoutes, Routed, read_routes
from node.ledger.trust.checks import distance
from node.trainers.connection.patience import Wait
from node.trainers.connection.seedlink import dial, speaking
from node.trainers.errors import PromptRefused, RolloutsFailed, SwarmDown, SwarmTimeout
from node.trainers.messages import Accuse, Offer, OfferRefused, OpenRollouts, Refusal, Room, Sample, Stale, Taken
from node.trainers.prompts import BadPrompt
from node.trainers.standing import why_no_group

__all__ = ["Check", "RefusedPrompt", "Rollout", "RolloutGroup", "group_id", "rollouts"]

LOOK_AGAIN_S: Final = 0.2
"""How often a seed that is down is dialed."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One accepted sample.

    `token_ids`: the completion, without the prompt. `logprobs`: the natural logarithm of each token's probability in
    the distribution that it was sampled from, after temperature, top-p and options; for a greedy completion, at
    temperature 1. `finish_reason`: "stop" (the last token is a stop token) or "length". `spans`: which version of the
    swarm sampled which tokens, in order. `node`: public key (32 bytes) of the node that signed it.

    `adapter`: the one that drew it; empty: the base alone. `own`: for each span, the own version of the adapter, or of
    the base: how many versions of the swarm had changed it. Empty in a swarm without adapters, where that is the
    version. `lag`: how many versions that changed the adapter or the base its oldest token was behind when the seed
    sent it.

    `routes`: if they were asked for, which experts each token of prompt and completion but the last took: uint16,
    (tokens - 1, layers, k), ascending; see `node.trainers.routes`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    spans: tuple[Span, ...]
    node: bytes
    adapter: str = ""
    own: tuple[int, ...] = ()
    lag: int = 0
    routes: Routes | None = field(default=None, compare=False, repr=False)

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(epoch, version) of each token."""
        return tuple(span.version for span in self.spans for _ in range(span.start, span.end))

    @property
    def own_versions(self) -> tuple[int, ...]:
        """The own version of each token; see `own`."""
        owns = self.own or tuple(span.version[1] for span in self.spans)
        return tuple(own for own, span in zip(owns, self.spans, strict=True) for _ in range(span.start, span.end))


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """One prompt and its samples.

    `index`: which of the prompts, counted from 0. `prompt`: its token ids. `rollouts`: the samples, `n` of them.
    """

    index: int
    prompt: tuple[int, ...]
    rollouts: tuple[Rollout, ...]

    @property
    def refused(self) -> None:
        """None: the prompt was not refused. See `RefusedPrompt.refused`."""
        return None

    @property
    def oldest(self) -> Version:
        """(epoch, version) of the oldest token in the group."""
        return min(span.version for rollout in self.rollouts for span in rollout.spans)

    @property
    def lag(self) -> int:
        """The largest `Rollout.lag` in the group."""
        return max(rollout.lag for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class RefusedPrompt:
    """What the iterator yields instead of a group when a prompt cannot be generated for. The other prompts go on.

    `index`: which of the prompts, counted from 0. `prompt`: as it was given. `refused`: why, in a sentence.
    """

    index: int
    prompt: Any
    refused: str

    @property
    def rollouts(self) -> NoReturn:
        """Raises `PromptRefused`, which ends a loop that uses this object as a group."""
        raise PromptRefused(self.index, self.refused)

    @property
    def oldest(self) -> NoReturn:
        """Raises `PromptRefused`."""
        raise PromptRefused(self.index, self.refused)


@dataclass(frozen=True, slots=True)
class Check:
    """The trainer's own check of the log-probabilities that nodes report, before it uses a group.

    `score(prompt, rollout)`: the log-probability of each token of the rollout under the version that it names, or None
    if the trainer no longer has that version. `share`: the share of the samples that is checked, picked at random, 0 to
    1. `tolerance`: the mean difference in nats a token that is accepted; `python -m scenarios.bench.check_tolerance`
    measures what rounding alone causes. A node beyond it is quarantined, and other samples take the place of its own.
    """

    score: Callable[[tuple[int, ...], Rollout], Sequence[float] | None]
    share: float = 0.02
    tolerance: float = 0.1

    def find_lie(self, prompt: tuple[int, ...], rollout: Rollout) -> str | None:
        """What is wrong with a rollout, in words. None: nothing, or it was not picked for a check."""
        if random.random() >= self.share or (scores := self.score(prompt, rollout)) is None:
            return None
        difference = distance(rollout.logprobs, scores)
        return None if difference <= self.tolerance else f"off by {difference:.3g} nats a token"


def group_id(session: str, index: int) -> bytes:
    """The name (16 bytes) of the group of prompt `index`. The samples' random streams follow from it
    (`node.ledger.messages.stream_of`), so a `key` fixes them."""
    return blake3(f"{session}/{index}".encode()).digest(16)


def rollouts(
    home: Path,
    request: OpenRollouts,
    prompts: Iterable[Any],
    tokens: Callable[[Any], tuple[int, ...]],
    timeout_s: float,
    check: Check | None = None,
    lag_base: Callable[[], Version] = lambda: (0, 0),
) -> Iterator[RolloutGroup | RefusedPrompt]:
    """See `Swarm.rollouts`. `tokens(prompt)`: its token ids; raises `BadPrompt`. `lag_base()`: the version that lags
    are counted from."""
    read = (_read(index, prompt, tokens) for index, prompt in enumerate(prompts))
    if request.keep and isinstance(prompts, list | tuple):
        known = list(read)
        read, request = iter(known), replace(request, prompts=_hash(known), count=len(known))
    batch = _Batch(request, read, timeout_s, check, lag_base, partial(why_no_group, home, request.session))
    reconnecting: Wait | None = None
    while True:
        try:
            with speaking("it was asked for rollouts"), dial(home) as channel:
                reconnecting = None
                yield from batch.converse(channel)
                return
        except SwarmDown as error:
            if time.monotonic() >= batch.deadline:
                raise
            why = str(error)
            reconnecting = reconnecting or Wait(batch.deadline - time.monotonic(), lambda: f"rollouts: {why}")  # noqa: B023
            reconnecting.log_if_due()
            time.sleep(LOOK_AGAIN_S)  # the seed keeps finished work on its disk, so a restarted one continues it


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, as `given` and as `packed` token ids; None if it cannot be read, and `why`."""

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
    """BLAKE3 over the length and bytes of each prompt, in order. One that cannot be read has the length 2^32 - 1."""
    state = blake3()
    for prompt in prompts:
        length = (1 << 32) - 1 if prompt.packed is None else len(prompt.packed)
        state.update(length.to_bytes(4, "little") + (prompt.packed or b""))
    return state.digest()


class _Batch:
    """One call of `rollouts`: what was offered and what is still to come, over any number of connections."""

    def __init__(
        self,
        request: OpenRollouts,
        prompts: Iterator[_Prompt],
        timeout_s: float,
        check: Check | None,
        lag_base: Callable[[], Version],
        explain: Callable[[], str],
    ) -> None:
        """`lag_base`: see `rollouts`. `explain()`: why no group comes, in a sentence, for logs and errors."""
        self._explain = explain
        self._check = check
        self._lag_base = lag_base
        self._timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        """By when the next group must come. Set again each time the caller asks for a group."""
        self._request = request
        self._prompts = prompts
        self._count = 0
        """Prompts that were read."""
        self._skipped = 0
        """Of these, those that could not be read."""
        self._last = False
        """There are no more prompts."""
        self._open: dict[bytes, _Prompt] = {}
        """Offered and not yet handed out, by group, in the order of the prompts."""
        self._ready: dict[bytes, tuple[list[Sample], tuple[Rollout, ...]]] = {}
        """Of these, the groups whose samples have all come."""
        self._taken: list[bytes] = []
        """Handed to the caller, and not yet confirmed to the seed."""
        self._parts: dict[bytes, list[Sample]] = {}
        """Of the groups that have come in part, the samples so far."""

    def converse(self, channel: Channel) -> Iterator[RolloutGroup | RefusedPrompt]:
        """Offer prompts and yield groups over one connection, until every prompt has its answer.

        Raises what `Swarm.rollouts` raises. After `SwarmDown` it may be called again, with a new connection.
        """
        total, skipped_before = self._request.total, self._skipped
        channel.send(self._request if total is None else replace(self._request, total=self._left(total)))
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
                group = group_id(self._request.session, prompt.index)
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
                    break  # more may be offered now, or nothing is open any more
            if (found := self._first(channel)) is not None:
                name, group = found
                yield group
                self.deadline = time.monotonic() + self._timeout_s
                self._taken.append(name)

    def _left(self, total: int) -> int:
        """How many of `total` prompts have no answer yet."""
        return max(0, total - self._count) + len(self._open)

    def _receive(self, channel: Channel, *, wait: bool) -> Any:
        """The next message. None: there is none, and the caller does not `wait`.

        Raises `SwarmTimeout` with the cause when none comes before the deadline.
        """
        patience = Wait(self.deadline - time.monotonic(), lambda: f"rollouts: no group yet. {self._explain()}")
        while True:
            try:
                message, fds = channel.recv(patience.slice_s() if wait else 0.0)
            except ChannelTimeout as error:
                if not wait:
                    return None
                if patience.over:
                    raise SwarmTimeout(
                        f"No group was completed within {self._timeout_s:.0f} s; {len(self._open)} are open. "
                        f"{self._explain()}"
                    ) from error
                patience.log_if_due()
            else:
                close_fds(fds)
                return message

    def _next(self) -> _Prompt | None:
        """The next prompt; None: there are no more."""
        if self._last:
            return None
        prompt = next(self._prompts, None)
        if prompt is None:
            self._last = True
        else:
            self._count += 1
        return prompt

    def _collect(self, channel: Channel, sample: Sample) -> None:
        """Keep one more sample. With the last one its group becomes ready."""
        if sample.group not in self._open:  # handed out before the connection broke
            if sample.left == 0:
                channel.send(Taken(sample.group))
            return
        parts = self._parts.setdefault(sample.group, [])
        parts.append(sample)
        if sample.left:
            return
        samples = self._parts.pop(sample.group)
        prompt = len(self._open[sample.group].packed or b"") // 4
        try:
            routes = read_routes([_routed(part) for part in samples], prompt)
        except BadRoutes as error:
            channel.send(Accuse(sample.group, error.index, str(error)))
        else:
            adapter = self._request.sampling.extra.adapter
            found = [_rollout(one, adapter, its) for one, its in zip(samples, routes, strict=True)]
            self._ready[sample.group] = samples, tuple(found)

    def _first(self, channel: Channel) -> tuple[bytes, RolloutGroup] | None:
        """The ready group of the earliest prompt, or None. Sends back groups that are too old or fail the check."""
        while self._ready:
            name = min(self._ready, key=lambda name: self._open[name].index)
            (samples, rollouts), prompt = self._ready.pop(name), self._open[name]
            group = RolloutGroup(prompt.index, unpack_tokens(prompt.packed or b""), rollouts)
            newest = self._lag_base()
            if any(_may_be_stale(sample, newest, self._request.max_lag) for sample in samples):
                channel.send(Stale(name, *newest))
            elif (lie := self._find_lie(group)) is not None:
                channel.send(Accuse(name, *lie))
            else:
                del self._open[name]
                return name, group
        return None

    def _find_lie(self, group: RolloutGroup) -> tuple[int, str] | None:
        """The index of a sample that fails the trainer's check, and what is wrong with it."""
        for i, rollout in enumerate(group.rollouts):
            if self._check is not None and (why := self._check.find_lie(group.prompt, rollout)) is not None:
                return i, why
        return None


def _may_be_stale(sample: Sample, newest: Version, max_lag: int) -> bool:
    """Whether versions up to `newest` that came after the seed sent the sample may have made it too old. Only the seed
    knows what each of them changed; at most they all changed what drew it."""
    oldest = min((epoch, version) for epoch, version, _ in sample.spans)
    counted, lag = (oldest, 0) if sample.counted is None else (sample.counted, sample.lag)
    if newest <= counted:
        return False
    return newest[0] != counted[0] or lag + newest[1] - counted[1] > max_lag


def _routed(sample: Sample) -> Routed:
    epoch, version, _ = sample.spans[0]
    tokens = len(sample.token_ids) // 4
    return Routed(sample.routes, sample.prompt_routes, tokens, (epoch, version), sample.node)


def _rollout(sample: Sample, adapter: str, routes: Routes | None) -> Rollout:
    starts = (0, *(end for _, _, end in sample.spans))
    spans = tuple(Span((e, v), start, end) for start, (e, v, end) in zip(starts, sample.spans, strict=False))
    tokens, logprobs = unpack_tokens(sample.token_ids), unpack_floats(sample.logprobs)
    return Rollout(tokens, logprobs, sample.finish_reason, spans, sample.node, adapter, sample.own, sample.lag, routes)
