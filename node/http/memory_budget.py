"""Memory budgets that all clients of the gateway share: for request bodies, for work in flight, for encoded answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

__all__ = ["MOST_BYTES", "BudgetFull", "MemoryBudget", "MemoryShare"]

MOST_BYTES: Final = 64 << 20
"""Eight of the largest bodies, or thousands of usual ones."""
WAIT_S: Final = 2.0
"""A body waits this long for room; in that time a few of the largest bodies are read and parsed."""


class BudgetFull(Exception):
    """The budget has no room at the moment."""


class MemoryBudget:
    """A budget of `most` bytes. `reserve` waits at most `wait_s` for room."""

    def __init__(self, most: int = MOST_BYTES, wait_s: float = WAIT_S) -> None:
        self.most = most
        self._wait_s = wait_s
        self.held = 0
        self._freed = trio.Event()

    async def reserve(self, count: int) -> None:
        """Hold `count` bytes, at most `most`, until `give_back`. Raises `BudgetFull`."""
        if self.held + count > self.most:  # else without a deadline, which costs more than all else of a token's answer
            with trio.move_on_after(self._wait_s) as waiting:
                while self.held + count > self.most:
                    await self._freed.wait()
            if waiting.cancelled_caught:
                raise BudgetFull
        self.held += count

    def give_back(self, count: int) -> None:
        """Hold `count` bytes less."""
        self.held -= count
        if count:
            self._freed.set()
            self._freed = trio.Event()

    @asynccontextmanager
    async def share(self, count: int) -> AsyncIterator["MemoryShare"]:
        """Reserve `count` bytes, or the whole budget if it is smaller, while the block runs. Raises `BudgetFull`."""
        share = MemoryShare(self)
        await self.reserve(min(count, self.most))
        share.count = min(count, self.most)
        try:
            yield share
        finally:
            share.resize(0)


class MemoryShare:
    """The part of a budget that one request holds. Its owner must end with `resize(0)`."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.count = 0

    def resize(self, count: int) -> None:
        """Hold `count` bytes from now on. Never waits: the budget may be exceeded, and is then full for others."""
        more, self.count = count - self.count, count
        if more > 0:
            self._budget.held += more
        else:
            self._budget.give_back(-more)
