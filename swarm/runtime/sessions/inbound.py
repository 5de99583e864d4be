"""What arrives on the bulk lane: verified before anything else, then stored, then told to the core.

Hashing is done here and now: BLAKE3 takes 5 to 40 us for a piece, less than a thread costs to wake.
"""

from collections.abc import Awaitable, Callable

import trio

from codec import chunk_id, open_header, verify_piece
from codec.errors import PeerError
from swarm.protocol.core.events import Event, HeaderStored, PieceStored, Stray, VersionId
from swarm.protocol.core.wire import FRAME_HEAD, NO_STRIPE, Frame, FrameKind, unpack_frame_head
from swarm.runtime.counts import Counts
from swarm.runtime.framing import ByteReader, Patience
from swarm.runtime.limits import Limits
from swarm.store import ChunkStore, StoredChunk
from swarm.transport.base import Stream

__all__ = ["Inbound", "header_stored"]

TakePart = Callable[[bytes, Frame, bytes], Awaitable[None]]


def header_stored(chunk: StoredChunk, peer: bytes | None, stripe: int | None) -> HeaderStored:
    """The event that tells the core of a stored header."""
    return HeaderStored(
        peer, stripe, chunk.key, chunk_id(chunk.sealed_header), chunk.header.parent_root, chunk.sizes,
        len(chunk.sealed_header),
    )  # fmt: skip


class Inbound:
    """Takes frames in, from any peer."""

    def __init__(
        self,
        authority: bytes | None,
        chunks: ChunkStore,
        counts: Counts,
        limits: Limits,
        *,
        post: Callable[[Event], Awaitable[None]],
        whole: Callable[[StoredChunk], None],
        relieve: Callable[[], Awaitable[None]],
        part: TakePart,
        settled: Callable[[], VersionId | None],
    ) -> None:
        """`authority`: whose headers count; None: nobody's, we are the authority ourselves. `whole` hears of chunks
        that became so; `relieve` empties the store's memory; `part` takes parts of blobs; `settled`: up to which
        version headers that we do not know are of no interest (None: all are)."""
        self._authority = authority
        self._chunks = chunks
        self._counts = counts
        self._limits = limits
        self._post = post
        self._whole = whole
        self._relieve = relieve
        self._part = part
        self._settled = settled

    async def run(self, stream: Stream, peer: bytes) -> None:
        """Read frames until the stream ends. Raises groups of `PeerError`, at the first that does not verify, and of
        `trio.TooSlowError`, when the rest of one does not come."""
        patience = Patience(self._limits.frame_deadline_s)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(patience.watch)
            await self._take_all(ByteReader(stream), patience, peer)
            nursery.cancel_scope.cancel()

    async def _take_all(self, reader: ByteReader, patience: Patience, peer: bytes) -> None:
        while not await reader.at_end():
            frame, body = await self._frame(reader, patience)
            stripe = None if frame.stripe == NO_STRIPE else frame.stripe
            if frame.kind == FrameKind.HEADER:
                await self._take_header(peer, stripe, frame, body)
            elif frame.kind == FrameKind.PIECE:
                await self._take_piece(peer, stripe, frame, body)
            else:
                await self._part(peer, frame, body)

    async def _frame(self, reader: ByteReader, patience: Patience) -> tuple[Frame, bytes]:
        """The next frame, of which something has come. Raises `PeerError`."""
        patience.begin()
        frame = unpack_frame_head(await reader.exactly(FRAME_HEAD))
        body = await reader.exactly(frame.length)
        patience.end()
        return frame, body

    async def _take_header(self, peer: bytes, stripe: int | None, frame: Frame, body: bytes) -> None:
        if self._authority is None:
            raise PeerError("header: the authority takes no chunks")
        known = self._chunks.chunk(frame.key)
        if known is None or known.sealed_header != body:
            header = open_header(body, self._authority)
            if header.key != frame.key:
                raise PeerError(f"frame.key: {tuple(frame.key)} on the header of {tuple(header.key)}")
            if known is not None or self._out_of_date(frame):  # two of one key: the authority's doing, not the peer's
                self._counts.stray += len(body)
                await self._post(Stray(peer, stripe, len(body)))
                return
            known, _ = self._chunks.put_header(header, body)
            self._counts.received += len(body)
        else:
            self._counts.duplicates += len(body)
        await self._post(header_stored(known, peer, stripe))

    async def _take_piece(self, peer: bytes, stripe: int | None, frame: Frame, body: bytes) -> None:
        chunk = None if self._authority is None else self._chunks.chunk(frame.key)
        if chunk is None:
            if self._authority is None or (not self._chunks.was_dropped(frame.key) and not self._out_of_date(frame)):
                raise PeerError(f"piece: of a chunk {tuple(frame.key)} whose header did not come first")
            self._counts.stray += len(body)
            await self._post(Stray(peer, stripe, len(body)))
            return
        if frame.number < len(chunk.sizes) and chunk.have >> frame.number & 1:
            if len(body) != chunk.sizes[frame.number]:  # else empty ones would cost their sender nothing
                raise PeerError(f"piece.length: {len(body)} bytes, not {chunk.sizes[frame.number]}")
            self._counts.duplicates += len(body)
        else:
            verify_piece(chunk.header, frame.number, body)
            if self._chunks.put_piece(frame.key, frame.number, body):
                self._counts.received += len(body)
                if chunk.whole:
                    self._whole(chunk)
                if self._chunks.memory_bytes > self._limits.store_memory_bytes:
                    await self._relieve()
        await self._post(PieceStored(peer, stripe, frame.key, frame.number, len(body)))

    def _out_of_date(self, frame: Frame) -> bool:
        """Of a version that we have settled: a late duplicate, or someone who replays what was once signed."""
        settled = self._settled()
        return settled is not None and (frame.key.epoch, frame.key.version) <= settled
