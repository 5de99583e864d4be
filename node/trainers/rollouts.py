"""Complete groups from the swarm, as an iterator that takes prompts only as fast as the nodes finish them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from codec.errors import UsageError
from node.engines.base import RewardAsked, SamplingParams, Version
from node.ipc.channel import Channel, ChannelTimeout, close_fds
from node.ledger.packing import pack_tokens, unpack_tokens
from node.ledger.route_reader import BadRoutes, read_routes
from node.ledger.terms import PLAIN
from node.trainers.connection.patience import Wait
from node.trainers.connection.seedlink import dial, speaking
from node.trainers.errors import RolloutsFailed, SwarmDown, SwarmTimeout
from node.trainers.messages import (
    ROLLOUTS,
    Abort,
    Accuse,
    Offer,
    OfferRefused,
    OpenRollouts,
    Refusal,
    Room,
    Sample,
    Stale,
    Taken,
    Trained,
)
from node.trainers.own_rewards import NO_REWARDS, OwnRewards, RewardLie
from node.trainers.prompts import BadPrompt, PromptSpec, asked_reward, own_terms
from node.trainers.rollout_group import Check, RefusedPrompt, Rollout, RolloutGroup, rollout_of, routed_of
from node.trainers.rollout_stream import RolloutStream
from node.trainers.standing import why_no_group

__all__ = ["Choice", "group_id", "rollouts"]

OWN_TERMS: Final = 1
"""The `ROLLOUTS` of a seed that knows prompts with their own sampling, and what came with them."""
LOOK_AGAIN_S: Final = 0.2
"""How often a seed that is down is dialed."""
ABORTED_A_MESSAGE: Final = 1024
"""Groups in one `Abort`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of the complete groups the caller gets.

    `keep(group)`: whether it gets this one; None: all. `take`: the iterator ends after this many groups, and what is
    left is aborted; None: it gets all.
    """

    keep: Callable[[RolloutGroup], bool] | None = None
    take: int | None = None


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
    choice: Choice = Choice(),
    rewards: OwnRewards = NO_REWARDS,
) -> RolloutStream:
    """See `Swarm.rollouts`. `tokens(prompt)`: its token ids; raises `BadPrompt`. `lag_base()`: the version that lags
    are counted from."""
    read = (_read(index, prompt, tokens, request.sampling, rewards.name) for index, prompt in enumerate(prompts))
    if request.keep and isinstance(prompts, list | tuple):
        known = list(read)
        read, request = iter(known), replace(request, prompts=_hash(known), count=len(known))
    explain = partial(why_no_group, home, request.session)
    batch = _Batch(request, read, timeout_s, check, lag_base, explain, choice, rewards)
    return RolloutStream(_connected(home, batch), batch)


def _connected(home: Path, batch: "_Batch") -> Generator[RolloutGroup | RefusedPrompt, None, None]:
    """The groups of `batch`, over as many connections as it takes."""
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
            if batch.stopped.wait(LOOK_AGAIN_S):  # the seed keeps finished work on its disk: a restarted one continues
                return


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, as `given` and as `packed` token ids; None if it cannot be read, and `why`. `sampling`, `n`: its own;
    None: the call's."""

    index: int
    given: Any
    packed: bytes | None
    why: str = ""
    sampling: SamplingParams | None = None
    n: int | None = None
    metadata: Any = None
    reward: RewardAsked | None = None

    @property
    def has_own_terms(self) -> bool:
        """Whether it has something of its own that only newer seeds know."""
        return self.n is not None or self.sampling is not None

    def asks(self, call: SamplingParams) -> SamplingParams | None:
        """The sampling to offer it with; None: the call's."""
        if self.reward is None:
            return self.sampling
        return (self.sampling or call).with_options(reward=self.reward)

    def refused(self, why: str) -> RefusedPrompt:
        """What the caller gets in the place of its group."""
        return RefusedPrompt(self.index, self.given, why, self.metadata)


def _read(
    index: int, given: Any, tokens: Callable[[Any], tuple[int, ...]], call: SamplingParams, reward: str = ""
) -> _Prompt:
    spec = given if isinstance(given, PromptSpec) else PromptSpec(given)
    try:
        sampling, n = own_terms(spec, call)
        asked, packed = asked_reward(spec, reward), pack_tokens(tokens(spec.prompt))
        return _Prompt(index, spec.prompt, packed, "", sampling, n, spec.metadata, asked)
    except BadPrompt as error:
        return _Prompt(index, spec.prompt, None, str(error), metadata=spec.metadata)


def _hash(prompts: Sequence[_Prompt]) -> bytes:
    """BLAKE3 over the length and bytes of each prompt, in order. One that cannot be read has the length 2^32 - 1. What
    a prompt has of its own (n, sampling, and its reward) follows it, as MessagePack."""
    state = blake3()
    for prompt in prompts:
        length = (1 << 32) - 1 if prompt.packed is None else len(prompt.packed)
        state.update(length.to_bytes(4, "little") + (prompt.packed or b""))
        if prompt.has_own_terms or prompt.reward is not None:
            own = (prompt.n, prompt.sampling) + (() if prompt.reward is None else (prompt.reward,))
            state.update(msgspec.msgpack.encode(own))
    return state.digest()


class _Stopped(Exception):
    """The caller has closed the iterator while it waited."""


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
        choice: Choice = Choice(),
        rewards: OwnRewards = NO_REWARDS,
    ) -> None:
        """`lag_base`: see `rollouts`. `explain()`: why no group comes, in a sentence, for logs and errors."""
        self._explain = explain
        self._check = check
        self._lag_base = lag_base
        self._timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        """By when the next group must come. Set again each time the caller asks for a group."""
        self.stopped = threading.Event()
        """Set by another thread: the iterator ends soon, without a group."""
        self.aborts: deque[int] = deque()
        """Prompts whose groups the caller no longer wants, by index. Any thread may append."""
        self._request = request
        self._prompts = prompts
        self._choice = choice
        self._rewards = rewards
        self._chosen = 0
        """Groups that the caller got."""
        self._count = 0
        """Prompts that were read."""
        self._skipped = 0
        """Of these, those that are not offered: they could not be read, or were aborted before."""
        self._unread: set[int] = set()
        """Aborted prompts that were not read yet."""
        self._last = False
        """There are no more prompts, or the caller has as many groups as it wanted."""
        self._open: dict[bytes, _Prompt] = {}
        """Offered and not yet handed out, by group, in the order of the prompts."""
        self._ready: dict[bytes, tuple[list[Sample], tuple[Rollout, ...]]] = {}
        """Of these, the groups whose samples have all come."""
        self._taken: list[bytes] = []
        """Handed to the caller, and not yet confirmed to the seed."""
        self._parts: dict[bytes, list[Sample]] = {}
        """Of the groups that have come in part, the samples so far."""
        self._told: Version | None = None
        """The version that the seed was told the trainer is at."""
        self._channel: Channel | None = None

    def converse(self, channel: Channel) -> Iterator[RolloutGroup | RefusedPrompt]:
        """Offer prompts and yield groups over one connection, until every prompt has its answer.

        Raises what `Swarm.rollouts` raises. After `SwarmDown` it may be called again, with a new connection.
        """
        self._channel = channel
        try:
            yield from self._converse(channel)
        except _Stopped:
            return
        finally:
            self._channel = None

    def _converse(self, channel: Channel) -> Iterator[RolloutGroup | RefusedPrompt]:
        total, skipped_before, self._told = self._request.total, self._skipped, None
        channel.send(self._request if total is None else replace(self._request, total=self._left(total)))
        self._parts.clear()
        self._ready.clear()
        for group, prompt in self._open.items():
            channel.send(self._offer(group, prompt, 0))
        offered, allowed, speaks = len(self._open), 0, 0
        while True:
            for group in self._taken:
                channel.send(Taken(group))
            self._taken.clear()
            self.drop_aborted()
            self._tell_trained(channel)
            while offered < allowed and (prompt := self._next()) is not None:
                if prompt.index in self._unread:
                    self._unread.discard(prompt.index)
                    self._skipped += 1
                    continue
                if prompt.packed is None:
                    self._skipped += 1
                    yield prompt.refused(prompt.why)
                    self.deadline = time.monotonic() + self._timeout_s
                    continue
                self._check_seed(speaks, prompt)
                group = group_id(self._request.session, prompt.index)
                self._open[group] = prompt
                offered += 1
                channel.send(self._offer(group, prompt, self._skipped - skipped_before))
            if self._last and not self._open:
                return
            while (message := self._receive(channel, wait=not self._ready)) is not None:
                match message:
                    case Room(allowed, speaks):
                        self._check_seed(speaks)
                    case Sample():
                        self._collect(channel, message)
                    case OfferRefused(group, why, usage) if (refused := self._open.pop(group, None)) is not None:
                        if usage:
                            raise UsageError(f"Prompt {refused.index}: {why}")
                        yield refused.refused(why)
                        self.deadline = time.monotonic() + self._timeout_s
                    case Refusal(why, usage):
                        raise (UsageError if usage else RolloutsFailed)(why)
                if not self._ready and not isinstance(message, Sample):
                    break  # more may be offered now, or nothing is open any more
            if (found := self._first(channel)) is not None:
                name, group = found
                if self._choice.keep is not None and not self._choice.keep(group):
                    self._taken.append(name)  # it was used: the seed counts it so
                    continue
                self._chosen += 1
                if self._choice.take is not None and self._chosen >= self._choice.take:
                    self._abort_rest()
                yield group
                self.deadline = time.monotonic() + self._timeout_s
                self._taken.append(name)

    def _offer(self, group: bytes, prompt: _Prompt, skipped: int) -> Offer:
        return Offer(group, prompt.packed or b"", skipped, prompt.n, prompt.asks(self._request.sampling))

    def _check_seed(self, speaks: int, prompt: _Prompt | None = None) -> None:
        """Raises `UsageError` when the seed is of a release that does not know what this call or `prompt` asks for."""
        if self._rewards.name and speaks < ROLLOUTS:
            raise UsageError(
                "The seed is of an older release, which knows no rewards: install the same version of swarm-node there."
            )
        asks = prompt is not None and prompt.has_own_terms
        asks = asks or self._request.terms != PLAIN or self._choice.take is not None
        if asks and speaks < OWN_TERMS:
            raise UsageError(
                "The seed is of an older release, which knows neither prompts with their own sampling or n, nor take, "
                "partial groups, priority and lags from what was trained: install the same version of swarm-node there."
            )

    def _tell_trained(self, channel: Channel) -> None:
        """Tell the seed which version the trainer is at, if its groups are counted from that."""
        if self._request.terms.from_trained and (now := self._lag_base()) != self._told:
            self._told = now
            channel.send(Trained(*now))

    # ------------------------------------------------------------ groups that are no longer wanted

    def drop_aborted(self) -> None:
        """Have the seed abort the groups in `aborts`. Called in the thread that runs the iterator, or while none does.

        Without a connection they are only forgotten: they are not offered again.
        """
        dropped = []
        while self.aborts:
            index = self.aborts.popleft()
            group = group_id(self._request.session, index)
            if group in self._open:
                dropped.append(group)
            elif index >= self._count:
                self._unread.add(index)
        self._drop(dropped)

    def _abort_rest(self) -> None:
        """The caller has as many groups as it wanted."""
        self._last = True
        self._drop(list(self._open))

    def _drop(self, groups: list[bytes]) -> None:
        for group in groups:
            del self._open[group]
            self._ready.pop(group, None)
            self._parts.pop(group, None)
        for at in range(0, len(groups), ABORTED_A_MESSAGE):
            if self._channel is not None:
                self._channel.send(Abort(tuple(groups[at : at + ABORTED_A_MESSAGE])))

    # ------------------------------------------------------------ what the seed sends

    def _left(self, total: int) -> int:
        """How many of `total` prompts have no answer yet."""
        return max(0, total - self._count) + len(self._open)

    def _receive(self, channel: Channel, *, wait: bool) -> Any:
        """The next message. None: there is none, and the caller does not `wait`, or has aborted all that was open.

        Raises `SwarmTimeout` with the cause when none comes before the deadline.
        """
        patience = Wait(self.deadline - time.monotonic(), lambda: f"rollouts: no group yet. {self._explain()}")
        while True:
            if self.stopped.is_set():
                raise _Stopped
            if self.aborts:
                self.drop_aborted()
                if not self._open:
                    return None
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
                self._tell_trained(channel)
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
        if sample.group not in self._open:  # handed out before the connection broke, or aborted while it was sent
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
            routes = read_routes([routed_of(part) for part in samples], prompt)
        except BadRoutes as error:
            channel.send(Accuse(sample.group, samples[error.index].sample, str(error)))
        else:
            adapter = self._request.sampling.extra.adapter
            found = [rollout_of(one, adapter, its) for one, its in zip(samples, routes, strict=True)]
            self._ready[sample.group] = samples, tuple(found)

    def _first(self, channel: Channel) -> tuple[bytes, RolloutGroup] | None:
        """The ready group of the earliest prompt, or None. Sends back groups that are too old or fail the check."""
        while self._ready:
            name = min(self._ready, key=lambda name: self._open[name].index)
            (samples, rollouts), prompt = self._ready.pop(name), self._open[name]
            group = RolloutGroup(
                prompt.index, unpack_tokens(prompt.packed or b""), rollouts,
                prompt.n or self._request.n, prompt.sampling or self._request.sampling, prompt.metadata,
            )  # fmt: skip
            newest = self._lag_base()
            if any(_may_be_stale(sample, newest, self._request.max_lag) for sample in samples):
                channel.send(Stale(name, *newest))
                continue
            if (lie := self._find_lie(group)) is not None:
                channel.send(Accuse(name, samples[lie[0]].sample, lie[1]))
                continue
            looked = group if prompt.reward is None else self._rewards.look(prompt.reward, group)
            if isinstance(looked, RewardLie):
                channel.send(Accuse(name, samples[looked.index].sample, looked.why))
                continue
            del self._open[name]
            return name, looked
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
