"""Offers: spare uplink goes to the neighbour that has waited longest for a chunk that we hold.

Neighbours tell us their late-chunk wants (see `load_shedding`). When little is queued for our own children, we offer a
chunk that we hold completely. The neighbour whose oldest want is the oldest comes first, since the chunk that was
assigned first is the latest; and we take the first such chunk in the order of its list. The chunk is sent when the
neighbour asks for it. From the offer until it is sent, it counts towards the few chunks that are given at a time.

Both limits, the queue and the number of chunks, are measured in time on our uplink. If a slow uplink promised as much
as a fast one, the chunk would come late although another neighbour could have brought it, and our children would wait.
"""

from typing import Final

from codec import ChunkKey
from swarm.protocol.core.wire import LateChunkWants, Offer
from swarm.protocol.state import State
from swarm.protocol.transfer.chunks import Chunk
from swarm.protocol.transfer.repair.load_shedding import LATE_WANTS_HOLD_S

__all__ = ["Offers"]

AT_ONCE: Final = 2
"""Chunks given at a time: one that is being sent, and one that is being agreed on meanwhile."""
AT_ONCE_S: Final = 0.1
"""Two chunks only if both together take our uplink at most this long; otherwise one."""
ANSWER_S: Final = 0.5
"""An offer without an answer expires after this time."""
LOOK_AGAIN_S: Final = 0.02
"""Pause before the next look when we hold nothing that a neighbour wants."""


class Offers:
    """The offers that one member makes."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._wants: dict[bytes, tuple[float, list[ChunkKey]]] = {}
        """The wants of each neighbour: the local time at which they expire, and the chunks."""
        self._open_offers: dict[bytes, tuple[float, ChunkKey]] = {}
        """The offer to each neighbour that is not answered yet: the local time at which it expires, and the chunk."""
        self._again_at = float("-inf")
        """Local time of the next look."""

    def heard(self, peer: bytes, message: LateChunkWants, now: float) -> None:
        """`peer` tells its late-chunk wants, which replace those before."""
        wants = [ChunkKey(message.epoch, message.version, message.attempt, seq) for seq in message.seqs]
        offer = self._open_offers.get(peer)
        if offer is not None and offer[1] not in wants:
            del self._open_offers[peer]
        if wants:
            self._wants[peer] = now + LATE_WANTS_HOLD_S, wants
            self._again_at = now
        else:
            self._wants.pop(peer, None)
        self.look(now)

    def taken(self, peer: bytes, key: ChunkKey) -> bool:
        """`peer` asks for this chunk; whether we offered it."""
        offer = self._open_offers.get(peer)
        offered = offer is not None and offer[1] == key
        if offered:
            del self._open_offers[peer]
        if peer in self._wants:
            until, wants = self._wants[peer]
            self._wants[peer] = until, [want for want in wants if want != key]
        return offered

    def lost(self, peer: bytes) -> None:
        """The session with `peer` is gone."""
        self._wants.pop(peer, None)
        self._open_offers.pop(peer, None)

    def look(self, now: float) -> None:
        """Make as many offers as the uplink allows."""
        while self._wants and now >= self._again_at and self._idle(now):
            best = self._best(now)
            if best is None:
                self._again_at = now + LOOK_AGAIN_S
                return
            peer, chunk = best
            if not self._room(sum(chunk.sizes)):
                return
            self._open_offers[peer] = now + ANSWER_S, chunk.key
            self._state.outbox.send(peer, Offer(*chunk.key))

    def _best(self, now: float) -> tuple[bytes, Chunk] | None:
        """The neighbour whose oldest want is the oldest, and the first chunk on its list that we hold completely.

        Late joiners do not count while the version is incomplete here, since a whole chunk would occupy our uplink for
        longer than planned children should wait.
        """
        waiting = [(min(wants), peer) for peer, (until, wants) in self._wants.items()
                   if wants and until > now and peer not in self._open_offers]  # fmt: skip
        for _, peer in sorted(waiting):
            if self._state.late_joiners.early and self._state.late_joiners.has(peer):
                continue
            for key in self._wants[peer][1]:
                chunk = self._state.chunks.find(key)
                if chunk is not None and chunk.whole and not self._pushes(chunk, peer):
                    return peer, chunk
        return None

    def _pushes(self, chunk: Chunk, peer: bytes) -> bool:
        """Whether `peer` is our child in the chunk's stripe: it gets the chunk anyway, and would get it twice."""
        return chunk.stripe is not None and peer in self._state.exchange.children.get(chunk.stripe, {})

    def _idle(self, now: float) -> bool:
        """Whether our uplink has room for an offer. Also removes expired offers."""
        state = self._state
        for peer in [peer for peer, (until, _) in self._open_offers.items() if until <= now]:
            del self._open_offers[peer]
        return (
            state.exchange.gives
            and self._given < AT_ONCE
            and state.exchange.waiting_bytes < state.tuning.idle_s * state.uplink.bytes_s()
        )

    @property
    def _given(self) -> int:
        """The number of chunks that are offered or being sent."""
        return self._state.uploads.count + len(self._open_offers)

    def _room(self, size: int) -> bool:
        """Whether one more chunk of `size` bytes may be given now."""
        return not self._given or (self._given + 1) * size <= AT_ONCE_S * self._state.uplink.bytes_s()
