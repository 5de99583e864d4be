"""Offers: uplink that has nothing better to do goes to whoever waits longest for what we hold.

Neighbours say what they wish for (see `load_shedding`). When little waits for our own children, we offer one of them a
chunk that we hold whole: to whoever has the oldest wish, for what was dealt first is latest, and in the order of its
list. It is sent when the other end says so; until then, and while it is on its way, it counts as one of the few that
are given at a time.

How much is little, and how many are few, goes by the time that they take our uplink: a slow one that promises as much
as a fast one brings it late, when it could have come from another, and its own children wait for it.
"""

from typing import Final

from codec import ChunkKey
from swarm.protocol.core.wire import LateChunkWants, Offer
from swarm.protocol.state import State
from swarm.protocol.transfer.chunks import Chunk
from swarm.protocol.transfer.load_shedding import LATE_WANTS_HOLD_S

__all__ = ["Offers"]

AT_ONCE: Final = 2
"""One on its way, and one that is agreed upon meanwhile."""
AT_ONCE_S: Final = 0.1
"""If they take our uplink no longer than this; else one."""
ANSWER_S: Final = 0.5
"""An offer that nobody answered for so long is void."""
LOOK_AGAIN_S: Final = 0.02
"""When we hold nothing that is wished for, we look again so much later."""


class Offers:
    """Of one member."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._wants: dict[bytes, tuple[float, list[ChunkKey]]] = {}
        """By neighbour: until when its list is good, and what is on it."""
        self._made: dict[bytes, tuple[float, ChunkKey]] = {}
        """Offers that are not answered yet, and until when they stand: one a neighbour."""
        self._again_at = float("-inf")

    def heard(self, peer: bytes, message: LateChunkWants, now: float) -> None:
        """What `peer` wishes for now; nothing that it said before counts."""
        wants = [ChunkKey(message.epoch, message.version, message.attempt, seq) for seq in message.seqs]
        made = self._made.get(peer)
        if made is not None and made[1] not in wants:
            del self._made[peer]
        if wants:
            self._wants[peer] = now + LATE_WANTS_HOLD_S, wants
            self._again_at = now
        else:
            self._wants.pop(peer, None)
        self.look(now)

    def taken(self, peer: bytes, key: ChunkKey) -> bool:
        """It asks for this chunk; whether we offered it."""
        made = self._made.get(peer)
        offered = made is not None and made[1] == key
        if offered:
            del self._made[peer]
        if peer in self._wants:
            until, wants = self._wants[peer]
            self._wants[peer] = until, [want for want in wants if want != key]
        return offered

    def lost(self, peer: bytes) -> None:
        """The session with `peer` is gone."""
        self._wants.pop(peer, None)
        self._made.pop(peer, None)

    def look(self, now: float) -> None:
        """Make as many offers as there is uplink for."""
        while self._wants and now >= self._again_at and self._idle(now):
            best = self._best(now)
            if best is None:
                self._again_at = now + LOOK_AGAIN_S
                return
            peer, chunk = best
            if not self._room(sum(chunk.sizes)):
                return
            self._made[peer] = now + ANSWER_S, chunk.key
            self._state.outbox.send(peer, Offer(*chunk.key))

    def _best(self, now: float) -> tuple[bytes, Chunk] | None:
        """Of those whose oldest wish is oldest, the first on its list that we hold whole. Guests count once the version
        is ours: what is offered takes our uplink longer than others should wait."""
        waiting = [(min(wants), peer) for peer, (until, wants) in self._wants.items()
                   if wants and until > now and peer not in self._made]  # fmt: skip
        for _, peer in sorted(waiting):
            if self._state.late_joiners.early and self._state.late_joiners.has(peer):
                continue
            for key in self._wants[peer][1]:
                chunk = self._state.chunks.find(key)
                if chunk is not None and chunk.whole and not self._pushes(chunk, peer):
                    return peer, chunk
        return None

    def _pushes(self, chunk: Chunk, peer: bytes) -> bool:
        """It is our own child, to which this goes in its turn: it would leave twice."""
        return chunk.stripe is not None and peer in self._state.exchange.children.get(chunk.stripe, {})

    def _idle(self, now: float) -> bool:
        """Our uplink has little to do."""
        state = self._state
        for peer in [peer for peer, (until, _) in self._made.items() if until <= now]:
            del self._made[peer]
        return (
            state.exchange.gives
            and self._given < AT_ONCE
            and state.exchange.waiting_bytes < state.tuning.idle_s * state.uplink.bytes_s()
        )

    @property
    def _given(self) -> int:
        """Chunks that are offered or on their way."""
        return self._state.uploads.count + len(self._made)

    def _room(self, size: int) -> bool:
        """Whether one more chunk of so many bytes may be given now."""
        return not self._given or (self._given + 1) * size <= AT_ONCE_S * self._state.uplink.bytes_s()
