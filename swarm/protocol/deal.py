"""Dealing: the authority gives each chunk to one stripe, the one whose head would take most at once.

That is demand: credit comes back as a branch drains, so a stripe with a slow interior node is dealt fewer chunks, and
no bandwidth has to be known.
"""

from collections import deque

from swarm.protocol.chunks import Chunk
from swarm.protocol.events import Effect
from swarm.protocol.exchange import HEADER, Exchange

__all__ = ["Dealer"]


class Dealer:
    """Chunks that no stripe has been given yet, in the order in which they were sealed."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._queue: deque[Chunk] = deque()
        self._dealt_bytes: dict[int, int] = {}

    def add(self, chunk: Chunk) -> None:
        self._queue.append(chunk)

    def forget(self, attempt: tuple[int, int, int]) -> None:
        """An attempt (epoch, version, attempt) was abandoned."""
        self._queue = deque(c for c in self._queue if c.key[:3] != attempt)

    def deal(self, now: float, effects: list[Effect]) -> None:
        """Give out as many chunks as the heads' credit allows."""
        while self._queue:
            stripe = self._hungriest()
            if stripe is None:
                return
            chunk = self._queue.popleft()
            chunk.stripe = stripe
            self._dealt_bytes[stripe] = self._dealt_bytes.get(stripe, 0) + chunk.header_bytes + sum(chunk.sizes)
            self._exchange.push(chunk, HEADER, None, now, effects)
            for index in range(len(chunk.sizes)):
                self._exchange.push(chunk, index, None, now, effects)

    def _hungriest(self) -> int | None:
        """The stripe with most spare credit; among equals the one that was dealt least."""
        best: tuple[int, int, int] | None = None
        for stripe, edges in self._exchange.children.items():
            spare = max((edge.spare for edge in edges.values() if not edge.lagging), default=0)
            rank = (spare, -self._dealt_bytes.get(stripe, 0), -stripe)
            if spare > 0 and (best is None or rank > best):
                best = rank
        return None if best is None else -best[2]
