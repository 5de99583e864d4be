"""Tells the ledger what this node's engine can do, its rewards among it, and which adapters it has loaded."""

from collections.abc import Awaitable, Callable
from typing import Final

from node.ledger.messages import MAX_ADAPTERS, Abilities, LoadedAdapters, encode
from node.member.engine_client import EngineClient

__all__ = ["EngineFacts"]

AGAIN_S: Final = 15.0
"""The adapters are told again after this time, because any message may be lost."""
LEAST_S: Final = 0.2
"""The adapters are told no more often."""


class EngineFacts:
    """`send(body)` hands a `Work` body to the ledger and may lose it."""

    def __init__(
        self,
        engine: EngineClient,
        send: Callable[[bytes], Awaitable[None]],
        clock: Callable[[], float],
        rewards: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """`rewards()`: the abilities of the node's reward functions."""
        self._engine, self._send, self._clock, self._rewards = engine, send, clock, rewards
        self._asked = self._adapters_asked = False
        self._abilities: frozenset[str] | None = None
        """What the ledger was told last; None: nothing."""
        self._adapters: frozenset[str] = frozenset()
        self._told_at = float("-inf")
        """When the adapters were told last."""

    def ask(self) -> None:
        """The ledger asks what the engine can do."""
        self._asked = True

    def ask_adapters(self) -> None:
        """The ledger asks which adapters the engine has. It is told of each change from then on."""
        self._adapters_asked, self._told_at = True, float("-inf")

    async def tell(self) -> None:
        """Tell what was asked for, and what has changed since it was told, as after a reload of the engine."""
        abilities = self._engine.abilities | self._rewards()
        if self._asked or self._abilities not in (None, abilities):
            self._asked, self._abilities = False, abilities
            await self._send(encode(Abilities(tuple(sorted(abilities)), self._engine.kind)))
        if self._adapters_asked and self._clock() >= self.next_s:
            self._adapters, self._told_at = frozenset(self._engine.adapters), self._clock()
            await self._send(encode(LoadedAdapters(tuple(sorted(self._adapters))[:MAX_ADAPTERS])))

    @property
    def next_s(self) -> float:
        """When to call `tell` next, by the clock; inf: nobody asks for the adapters."""
        if not self._adapters_asked:
            return float("inf")
        return self._told_at + (AGAIN_S if self._adapters == frozenset(self._engine.adapters) else LEAST_S)
