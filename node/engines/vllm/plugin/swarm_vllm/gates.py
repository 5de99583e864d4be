"""The front's side of the policy `drain` for adapters: requests that wait for an adapter's next version."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Gates"]


class Gates:
    """One gate an adapter, by id. The base (id 0) has none: the engine core drains it."""

    def __init__(self) -> None:
        self._running: Counter[int] = Counter()
        self._closed: set[int] = set()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def request(self, adapter: int) -> AsyncIterator[None]:
        """A request runs while the block does; it waits while its adapter's gate is closed."""
        if not adapter:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: adapter not in self._closed)
            self._running[adapter] += 1
        try:
            yield
        finally:
            self._running[adapter] -= 1
            await asyncio.shield(self._tell())

    @asynccontextmanager
    async def drained(self, adapter: int, drain: bool) -> AsyncIterator[None]:
        """With `drain`: close the gate, and run the block when none of the adapter's requests runs any more."""
        if not drain:
            yield
            return
        self._closed.add(adapter)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._running[adapter])
            yield
        finally:
            self._closed.discard(adapter)
            await asyncio.shield(self._tell())

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
