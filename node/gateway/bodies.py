"""The bytes of request bodies that are held at once: bounded over all clients, however many they are."""

from typing import Final

import trio

__all__ = ["Bodies", "Full"]

MOST_BYTES: Final = 64 << 20
"""Eight of the largest bodies, or thousands of usual ones."""
WAIT_S: Final = 2.0
"""A body waits this long for room: a few of the largest are read and understood in that time."""


class Full(Exception):
    """There is no room for another body at the moment."""


class Bodies:
    """Room for `most` bytes."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = most
        self.held = 0
        self._freed = trio.Event()

    async def reserve(self, count: int) -> None:
        """Room for a body of `count` bytes, at most `most`, until it is given back. Raises `Full`."""
        with trio.move_on_after(WAIT_S):
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
