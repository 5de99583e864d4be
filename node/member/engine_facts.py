"""Tells the ledger what this node's engine can do, and which adapters it has loaded."""

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
        self, engine: EngineClient, send: Callable[[bytes], Awaitable[None]], clock: Callable[[], float]
    ) -> None:
        self._engine, self._send, self._clock = engine, send, clock
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
        if self._asked or self._abilities not in (None, self._engine.abilities):
            self._asked, self._abilities = False, self._engine.abilities
            await self._send(encode(Abilities(tuple(sorted(self._engine.abilities)), self._engine.kind)))
        if not self._adapters_asked:
            return
        now, adapters = self._clock(), frozenset(self._engine.adapters)
        if now - self._told_at >= (LEAST_S if adapters != self._adapters else AGAIN_S):
            self._adapters, self._told_at = adapters, now
            await self._send(encode(LoadedAdapters(tuple(sorted(adapters))[:MAX_ADAPTERS])))

    @property
    def next_s(self) -> float:
        """When to call `tell` at the latest, by the clock; inf: nothing is asked for."""
        return self._told_at + AGAIN_S if self._adapters_asked else float("inf")
