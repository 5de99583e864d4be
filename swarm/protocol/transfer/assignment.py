"""Dealing: the authority gives each chunk to one stripe, the one whose head would take most at once.

That is demand: credit comes back as a branch drains, so a stripe with a slow interior node is dealt fewer chunks, and
no bandwidth has to be known.
"""

from collections import deque
from collections.abc import Callable

from swarm.protocol.transfer.chunks import Chunk, Chunks
from swarm.protocol.transfer.exchange import HEADER, Exchange

__all__ = ["Assigner"]


class Assigner:
    """Chunks that no stripe has been given yet, in the order in which they were sealed."""

    def __init__(self, exchange: Exchange, chunks: Chunks, is_head: Callable[[int, bytes], bool]) -> None:
        """`is_head(stripe, peer)`: the plan hangs this peer on us in this stripe. Others that do (their parent is lost)
        are pushed to, but have no say in where chunks go; else whoever grants most would draw all of them."""
        self._exchange = exchange
        self._chunks = chunks
        self._is_head = is_head
        self._queue: deque[Chunk] = deque()
        self._assigned_bytes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, chunk: Chunk) -> None:
        self._queue.append(chunk)

    def forget(self, attempt: tuple[int, int, int]) -> None:
        """An attempt (epoch, version, attempt) was abandoned."""
        self._queue = deque(c for c in self._queue if c.key[:3] != attempt)

    def prune(self) -> None:
        """Let go of chunks that the book no longer has: of dead attempts, and of versions too old for anyone."""
        self._queue = deque(c for c in self._queue if self._chunks.find(c.key) is c)

    def assign(self, now: float) -> None:
        """Give out as many chunks as the heads' credit allows."""
        while self._queue:
            stripe = self._next()
            if stripe is None:
                return
            chunk = self._queue.popleft()
            if self._chunks.find(chunk.key) is not chunk:
                continue
            chunk.stripe = stripe
            self._assigned_bytes[stripe] = self._assigned_bytes.get(stripe, 0) + chunk.header_bytes + sum(chunk.sizes)
            self._exchange.push(chunk, HEADER, None, now)
            for index in range(len(chunk.sizes)):
                self._exchange.push(chunk, index, None, now)

    def _next(self) -> int | None:
        """Of the stripes whose head would take something at once, the one that was dealt least."""
        heads: dict[int, int] = {}
        others: dict[int, int] = {}
        for stripe, edges in self._exchange.children.items():
            for peer, edge in edges.items():
                spare_of = heads if self._is_head(stripe, peer) else others
                spare_of[stripe] = max(spare_of.get(stripe, 0), 0 if edge.lagging else edge.spare)
        spare_of = heads or others  # without any head (we have just started) anybody will do
        assigned = self._assigned_bytes
        hungry = [(assigned.get(k, 0), k) for k, spare in spare_of.items() if spare > 0]
        if not hungry:
            return None
        least, stripe = min(hungry)
        for k, spare in spare_of.items():
            if spare <= 0:  # what it could not take is not owed to it
                assigned[k] = max(assigned.get(k, 0), least)
        return stripe
