"""Byte budgets that all clients of the gateway share: for request bodies, for work, and for encoded answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

__all__ = ["Bodies", "Full", "Held"]

MOST_BYTES: Final = 64 << 20
"""Eight of the largest bodies, or thousands of usual ones."""
WAIT_S: Final = 2.0
"""A body waits this long for room: a few of the largest are read and understood in that time."""


class Full(Exception):
    """There is no room for another body at the moment."""


class Bodies:
    """Room for `most` bytes."""

    def __init__(self, most: int = MOST_BYTES, wait_s: float = WAIT_S) -> None:
        self.most = most
        self._wait_s = wait_s
        self.held = 0
        self._freed = trio.Event()

    async def reserve(self, count: int) -> None:
        """Room for a body of `count` bytes, at most `most`, until it is given back. Raises `Full`."""
        with trio.move_on_after(self._wait_s):
            while self.held + count > self.most:
                await self._freed.wait()
            self.held += count
            return
        raise Full

    def give_back(self, count: int) -> None:
        self.held -= count
        if count:
            self._freed.set()
            self._freed = trio.Event()

    @asynccontextmanager
    async def room(self, count: int) -> AsyncIterator["Held"]:
        """Reserve `count` bytes, or the whole budget if it is smaller, while the block runs. Raises `Full`."""
        held = Held(self)
        await self.reserve(min(count, self.most))
        held.count = min(count, self.most)
        try:
            yield held
        finally:
            held.resize(0)


class Held:
    """A part of a budget that one request holds. Its owner must end with `resize(0)`."""

    def __init__(self, room: Bodies) -> None:
        self._room = room
        self.count = 0

    def resize(self, count: int) -> None:
        """Hold `count` bytes from now on. Never waits: the budget may be exceeded, and is then full for others."""
        more, self.count = count - self.count, count
        if more > 0:
            self._room.held += more
        else:
            self._room.give_back(-more)
