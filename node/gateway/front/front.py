"""Answers the clients of a gateway with what the seed answers, and keeps their requests while the seed is away.

A request that comes while there is no seed is answered with 503 and Retry-After at once, as clients expect; one that a
seed had before it ended waits for the next seed.
"""

import socket
from typing import Final

from node.gateway.front.forwarding import Forwarding, SeedLost
from node.gateway.front.seed_link import SeedLink
from node.gateway.front.seeds import Seeds
from node.http.memory_budget import MemoryBudget
from node.http.messages import Request, Response, failure
from swarm.guard import Source, guarded

__all__ = ["BODIES_BYTES", "Front"]

AWAY_S: Final = 120.0
"""A request that was asked waits this long for a seed that comes back: a start that reads a large replica takes tens of
seconds."""
WITHIN_S: Final = 1800.0
"""For an answer with all its seeds. Each seed gives up after 600 s."""
BODIES_BYTES: Final = 32 << 20
"""Memory of all bodies. The seed has each of them once more while it reads it."""
KEPT_BYTES: Final = 24 << 20
"""Of the bodies that are kept, so that there is always room for one that is read."""
NOTES_BYTES: Final = 64 << 20
"""Memory of the notes of streams, about 100 bytes a token."""
RETRY_AFTER_S: Final = 2
"""What clients are told to wait: a restart of the seed takes seconds."""


class Front:
    """The handler of an `HttpServer`."""

    def __init__(self, *, away_s: float = AWAY_S, within_s: float = WITHIN_S) -> None:
        self._away_s, self._within_s = away_s, within_s
        self._seeds = Seeds()
        self._notes = MemoryBudget(NOTES_BYTES, 0.0)
        self._kept_bytes = 0

    async def serve_seed(self, sock: socket.socket) -> None:
        """Have the seed at the other end of `sock` answer, until it ends."""
        link = SeedLink(sock)
        self._seeds.set(link)
        try:
            await link.run()
        finally:
            self._seeds.set(None)

    async def __call__(self, request: Request) -> Response:
        """The answer to a request."""
        if self._seeds.link is None:
            why = "The seed of this swarm is away, so no completion can be generated now. Try again in a moment."
            return failure(503, why, "seed_away", (("Retry-After", str(RETRY_AFTER_S)),))
        with guarded(Source.HTTP):
            return await self._forward(request)
        return failure(500, "This is a bug in the gateway; the log of its process has more.")

    async def _forward(self, request: Request) -> Response:
        count = len(request.body)
        keep = request.method == "POST" and self._kept_bytes + count <= KEPT_BYTES
        if keep:
            self._kept_bytes += count
            request.until_sent.callback(self._release, count)
        forwarding = Forwarding(
            request, self._seeds, self._notes, keep=keep, away_s=self._away_s, within_s=self._within_s
        )
        try:
            return await forwarding.answer()
        except SeedLost as error:
            return failure(503, str(error), "seed_away", (("Retry-After", str(RETRY_AFTER_S)),))

    def _release(self, count: int) -> None:
        self._kept_bytes -= count
