"""Uploads: the chunks that a peer sends to peers that asked for them, by a pull or by taking an offer."""

from codec import ChunkKey
from swarm.protocol.core.events import SendHeader, SendPiece
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import LacksChunk, WantChunk
from swarm.protocol.transfer.chunks import Chunk, Chunks, key_of, mask_of
from swarm.protocol.transfer.exchange import Exchange

__all__ = ["Uploads"]


class Uploads:
    """Answers requests for chunks, and bounds the number that is being sent to each peer."""

    def __init__(self, tuning: Tuning, outbox: Outbox, chunks: Chunks, exchange: Exchange) -> None:
        self._outbox = outbox
        self._chunks = chunks
        self._exchange = exchange
        self._most = 2 * tuning.pulls_in_flight
        self._left: dict[bytes, dict[ChunkKey, int]] = {}

    def serve(self, peer: bytes, want: WantChunk, now: float) -> None:
        """Answer with the header and the requested pieces that we hold, or with `LacksChunk`.

        There is no answer if the pieces are already being sent to the peer.
        """
        key, exchange = key_of(want), self._exchange
        chunk = self._chunks.find(key) if exchange.gives else None
        if chunk is not None and want.pieces and not any(want.pieces):
            self._serve_header(peer, chunk, now)
            return
        pieces = mask_of(want.pieces, chunk.full) & chunk.have if chunk is not None else 0
        if self.busy(peer, key) or (chunk is not None and exchange.take_back(peer, chunk, pieces, now)):
            return
        paid = []
        if chunk is not None and pieces and not self.full(peer):
            paid = exchange.paid(peer, chunk, [index for index in range(len(chunk.sizes)) if pieces >> index & 1])
        if chunk is None or not paid:
            self._outbox.send(peer, LacksChunk(*key))
            return
        self.begin(peer, key, 1 + len(paid))
        exchange.gave(peer, chunk, paid, now)
        self._outbox.emit(SendHeader(peer, chunk.stripe, key, pull=True))
        for index in paid:
            self._outbox.emit(SendPiece(peer, chunk.stripe, key, index, pull=True))

    def _serve_header(self, peer: bytes, chunk: Chunk, now: float) -> None:
        """Answer with the header alone: the peer will ask for the pieces if it needs them."""
        if self.busy(peer, chunk.key):
            return
        if self.full(peer) or not self._exchange.paid_header(peer, chunk):
            self._outbox.send(peer, LacksChunk(*chunk.key))
            return
        self.begin(peer, chunk.key, 1)
        self._exchange.gave(peer, chunk, (), now)
        self._outbox.emit(SendHeader(peer, chunk.stripe, chunk.key, pull=True))

    def busy(self, peer: bytes, key: ChunkKey) -> bool:
        """Whether this chunk is already being sent to `peer`."""
        return key in self._left.get(peer, {})

    @property
    def count(self) -> int:
        """The number of chunks being sent."""
        return sum(map(len, self._left.values()))

    def full(self, peer: bytes) -> bool:
        """Whether `peer` has as many uploads as it may have."""
        return len(self._left.get(peer, {})) >= self._most

    def begin(self, peer: bytes, key: ChunkKey, frames: int) -> None:
        self._left.setdefault(peer, {})[key] = frames

    def sent(self, peer: bytes, key: ChunkKey) -> None:
        """One frame of the chunk has been sent."""
        uploads = self._left.get(peer, {})
        if key in uploads:
            uploads[key] -= 1
            if not uploads[key]:
                del uploads[key]

    def lost(self, peer: bytes) -> None:
        """The session with `peer` is gone."""
        self._left.pop(peer, None)
