"""The seed that a front has now, if any."""

import trio

from node.gateway.front.seed_link import SeedLink

__all__ = ["Seeds"]


class Seeds:
    """The connection to the present seed."""

    def __init__(self) -> None:
        self.link: SeedLink | None = None
        """None: the seed is away."""
        self._came = trio.Event()

    def set(self, link: SeedLink | None) -> None:
        """From now on this is the seed."""
        self.link = link
        if link is not None:
            self._came.set()
            self._came = trio.Event()

    async def wait(self) -> SeedLink:
        """The present seed, or the next one."""
        while self.link is None:
            await self._came.wait()
        return self.link
