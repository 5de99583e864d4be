"""Assignment of chunks to stripes: the authority gives each chunk to a stripe whose root child has credit to spare.

Of these stripes it takes the one that was assigned the fewest bytes. Credit comes back as a branch drains, so a stripe
with a slow interior node gets fewer chunks, and no bandwidth has to be known.
"""

from collections import deque
from collections.abc import Callable

from swarm.protocol.transfer.chunks import Chunk, Chunks
from swarm.protocol.transfer.exchange import HEADER, Exchange

__all__ = ["ChunkAssigner"]


class ChunkAssigner:
    """The chunks that are not assigned yet, in the order in which they were sealed."""

    def __init__(self, exchange: Exchange, chunks: Chunks, is_head: Callable[[int, bytes], bool]) -> None:
        """`is_head(stripe, peer)`: whether the plan attaches this peer to the authority in this stripe.

        Other children (orphans that lost their parent) are pushed to as well, but do not influence the assignment;
        otherwise the one that grants the most credit would attract all chunks.
        """
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
        """Remove the chunks of an abandoned attempt: (epoch, version, attempt)."""
        self._queue = deque(c for c in self._queue if c.key[:3] != attempt)

    def prune(self) -> None:
        """Remove the chunks that were dropped since: those of replaced attempts and of old versions."""
        self._queue = deque(c for c in self._queue if self._chunks.find(c.key) is c)

    def assign(self, now: float) -> None:
        """Assign and push as many chunks as the credit of the root children allows."""
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
        """Of the stripes whose root child has credit to spare, the one with the fewest bytes assigned, or None."""
        heads: dict[int, int] = {}
        others: dict[int, int] = {}
        for stripe, edges in self._exchange.children.items():
            for peer, edge in edges.items():
                spare_of = heads if self._is_head(stripe, peer) else others
                spare_of[stripe] = max(spare_of.get(stripe, 0), 0 if edge.lagging else edge.spare)
        spare_of = heads or others  # just after the start there is no root child: any child counts
        assigned = self._assigned_bytes
        hungry = [(assigned.get(k, 0), k) for k, spare in spare_of.items() if spare > 0]
        if not hungry:
            return None
        least, stripe = min(hungry)
        for k, spare in spare_of.items():
            if spare <= 0:  # a stripe does not make up later for what it could not take
                assigned[k] = max(assigned.get(k, 0), least)
        return stripe
