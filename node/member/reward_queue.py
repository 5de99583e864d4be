"""Computes the rewards of this node's own samples, and those by which the ledger checks other nodes'.

Two are computed at a time: one task prefers own samples, the other those of other nodes, whose groups wait for them.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

import trio

from codec.errors import PeerError
from node.engines.base import RewardAsked
from node.ledger.messages import AskReward, RewardAnswer, encode
from node.ledger.packing import unpack_tokens
from node.rewards.outcome import Outcome
from node.settings.event_log import EventLog

__all__ = ["NO_REWARDS", "RewardClient", "RewardQueue"]

CHECKS_HELD: Final = 64
"""Of other nodes. One more is not answered, and the ledger asks another node after a while; it has no more than 32 open
questions to one node."""

_log = EventLog(__name__)


class RewardClient(Protocol):
    """What the rollout worker uses of a node's rewards; see `node.rewards.host.RewardHost`."""

    @property
    def abilities(self) -> frozenset[str]: ...

    async def compute(self, asked: RewardAsked, prompt: Sequence[int], token_ids: Sequence[int]) -> Outcome: ...


class _NoRewards:
    """A node without rewards."""

    @property
    def abilities(self) -> frozenset[str]:
        return frozenset()

    async def compute(self, asked: RewardAsked, prompt: Sequence[int], token_ids: Sequence[int]) -> Outcome:
        return Outcome.without(f"this node has no reward {asked.name}", lost=True)


NO_REWARDS: Final[RewardClient] = _NoRewards()


class _Own(NamedTuple):
    """A sample of this node. `wanted()`: whether its lease is still held. `done` gets the outcome."""

    asked: RewardAsked
    prompt: Sequence[int]
    token_ids: Sequence[int]
    wanted: Callable[[], bool]
    done: Callable[[Outcome], None]


class RewardQueue:
    """`send(body)` hands a `Work` body to the ledger and may lose it."""

    def __init__(self, rewards: RewardClient, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._rewards, self._send = rewards, send
        self._own: deque[_Own] = deque()
        self._checks: deque[AskReward] = deque()
        self._news = trio.Event()

    def compute(
        self,
        asked: RewardAsked,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        wanted: Callable[[], bool],
        done: Callable[[Outcome], None],
    ) -> None:
        """Compute the reward of an own sample when its turn comes, and call `done` with it, if it is `wanted` then."""
        self._own.append(_Own(asked, prompt, token_ids, wanted, done))
        self._news.set()

    def ask(self, message: AskReward) -> None:
        """Compute the reward of another node's sample. Raises `PeerError` for one without tokens."""
        if not message.prompt or not message.token_ids or (len(message.prompt) | len(message.token_ids)) % 4:
            raise PeerError("ask reward: no tokens")
        if len(self._checks) >= CHECKS_HELD:
            _log.warning("not_judged", why=f"{CHECKS_HELD} rewards wait already")
            return
        self._checks.append(message)
        self._news.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._work, True)
            nursery.start_soon(self._work, False)

    async def _work(self, own_first: bool) -> None:
        while True:
            if self._own and (own_first or not self._checks):
                await self._reward(self._own.popleft())
            elif self._checks:
                await self._check(self._checks.popleft())
            else:
                self._news = trio.Event() if self._news.is_set() else self._news
                await self._news.wait()

    async def _reward(self, own: _Own) -> None:
        if own.wanted():
            own.done(await self._rewards.compute(own.asked, own.prompt, own.token_ids))

    async def _check(self, message: AskReward) -> None:
        prompt, token_ids = unpack_tokens(message.prompt), unpack_tokens(message.token_ids)
        found = await self._rewards.compute(message.reward, prompt, token_ids)
        await self._send(encode(RewardAnswer(message.check, found.value, found.lost)))
