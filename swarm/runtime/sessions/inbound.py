"""What arrives on bulk streams: verified first, then stored, then posted to the core.

Hashing runs on the event loop: BLAKE3 takes 5 to 40 us for a piece, less than waking a thread.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from codec import ChunkHeader, chunk_id, open_header, verify_piece
from codec.errors import PeerError
from swarm.protocol.core.events import HeaderStored, PieceStored, Stray, VersionId
from swarm.protocol.core.wire import FRAME_HEAD, NO_STRIPE, Frame, FrameKind, unpack_frame_head
from swarm.protocol.transfer.arrivals import Arrival, header_arrival, piece_arrival
from swarm.runtime.applied import AppliedVersions
from swarm.runtime.core_loop import PostEvent
from swarm.runtime.counts import Counts
from swarm.runtime.failure import Failure
from swarm.runtime.framing import ByteReader, Patience
from swarm.runtime.limits import RuntimeLimits
from swarm.runtime.sessions.requests import PeerAnswer, Requests
from swarm.runtime.writers import ChunkWriter
from swarm.store import ChunkStore, StoredChunk
from swarm.transport.base import Stream

if TYPE_CHECKING:
    from swarm.runtime.sessions.blob_service import BlobService

__all__ = ["Inbound", "PartReceiver", "header_stored"]

RequestsOf = Callable[[bytes], Requests | None]
"""The open requests to a peer; None when it has no session now."""


def header_stored(chunk: StoredChunk, peer: bytes | None, stripe: int | None) -> HeaderStored:
    """The event that tells the core of a stored header. `peer`, `stripe`: where it came from, if from a peer."""
    return HeaderStored(
        peer, stripe, chunk.key, chunk_id(chunk.sealed_header), chunk.header.parent_root, chunk.sizes,
        len(chunk.sealed_header), wanted=not chunk.bodiless,
    )  # fmt: skip


class PartReceiver:
    """Adds PART frames to the requests that they answer, and posts each answer once it is verified."""

    def __init__(self, blobs: "BlobService | None", post: PostEvent, failure: Failure, counts: Counts) -> None:
        """`blobs`: None for a relay, which requests nothing."""
        self._blobs, self._post, self._failure, self._counts = blobs, post, failure, counts

    async def take_part(self, peer: bytes, requests: Requests, frame: Frame, body: bytes | memoryview) -> None:
        """Raises `PeerError` when the part was not requested, or completes an answer that does not verify."""
        answer = requests.add_part(frame, body)
        if answer is not None and self._blobs is not None:
            await self._failure.watch(self._accept, self._blobs, peer, answer)

    async def _accept(self, blobs: "BlobService", peer: bytes, answer: PeerAnswer) -> None:
        event = await blobs.accept_answer(peer, answer)
        if event is None:
            self._counts.stray += len(answer.data)
        else:
            self._counts.received += len(answer.data)
            await self._post(event)


class Inbound:
    """Reads the bulk streams of all peers."""

    def __init__(
        self,
        authority: bytes | None,
        chunks: ChunkStore,
        writer: ChunkWriter,
        parts: PartReceiver,
        applied: AppliedVersions,
        post: PostEvent,
        counts: Counts,
        limits: RuntimeLimits,
        needs: Callable[[ChunkHeader], bool] = lambda header: True,
    ) -> None:
        """`authority`: the key that must have signed headers; None when this member is the authority, which takes
        none. `needs(header)`: whether this member needs the pieces of a chunk."""
        self._needs = needs
        self._authority = authority
        self._chunks = chunks
        self._writer = writer
        self._parts = parts
        self._applied = applied
        self._post = post
        self._counts = counts
        self._limits = limits

    async def read_stream(self, stream: Stream, peer: bytes, requests_of: RequestsOf) -> None:
        """Read frames until the stream ends.

        Raises groups of `PeerError`, at the first frame that does not verify, and of `trio.TooSlowError`, when the rest
        of a frame does not arrive in time.
        """
        patience = Patience(self._limits.frame_deadline_s)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(patience.watch)
            await self._take_frames(ByteReader(stream), patience, peer, requests_of)
            nursery.cancel_scope.cancel()

    async def _take_frames(self, reader: ByteReader, patience: Patience, peer: bytes, requests_of: RequestsOf) -> None:
        while not await reader.at_end():
            frame, body = await self._read_frame(reader, patience)
            stripe = None if frame.stripe == NO_STRIPE else frame.stripe
            if frame.kind == FrameKind.HEADER:
                await self._take_header(peer, stripe, frame, bytes(body))
            elif frame.kind == FrameKind.PIECE:
                await self._take_piece(peer, stripe, frame, body)
            elif (requests := requests_of(peer)) is not None:
                await self._parts.take_part(peer, requests, frame, body)

    async def _read_frame(self, reader: ByteReader, patience: Patience) -> tuple[Frame, bytes | memoryview]:
        """The next frame, whose first byte has arrived. Raises `PeerError`."""
        patience.begin()
        frame = unpack_frame_head(bytes(await reader.exactly(FRAME_HEAD)))
        body = await reader.exactly(frame.length)
        patience.end()
        return frame, body

    async def _take_header(self, peer: bytes, stripe: int | None, frame: Frame, body: bytes) -> None:
        if self._authority is None:
            raise PeerError("header: the authority takes no chunks")
        known = self._chunks.chunk(frame.key)
        arrival = header_arrival(
            _version_of(frame), self._applied.newest,
            known=known is not None, same=known is not None and known.sealed_header == body,
        )  # fmt: skip
        if known is not None and arrival is Arrival.DUPLICATE:
            self._counts.duplicates += len(body)
            await self._post(header_stored(known, peer, stripe))
            return
        header = open_header(body, self._authority)
        if header.key != frame.key:
            raise PeerError(f"frame.key: {tuple(frame.key)} on the header of {tuple(header.key)}")
        if arrival is Arrival.STRAY:
            await self._throw_away(peer, stripe, len(body))
            return
        stored, _ = self._chunks.put_header(header, body, bodiless=not self._needs(header))
        self._counts.received += len(body)
        await self._post(header_stored(stored, peer, stripe))

    async def _take_piece(self, peer: bytes, stripe: int | None, frame: Frame, body: bytes | memoryview) -> None:
        chunk = None if self._authority is None else self._chunks.chunk(frame.key)
        arrival = piece_arrival(
            _version_of(frame), self._applied.newest, known=chunk is not None,
            bodiless=chunk is not None and chunk.bodiless,
            here=chunk is not None and frame.number < len(chunk.sizes) and bool(chunk.have >> frame.number & 1),
            dropped=self._chunks.was_dropped(frame.key),
        )  # fmt: skip
        if self._authority is None or arrival is Arrival.WRONG:
            raise PeerError(f"piece: of a chunk {tuple(frame.key)} whose header did not come first")
        if chunk is None or arrival is Arrival.STRAY:  # it is not even hashed
            await self._throw_away(peer, stripe, len(body))
            return
        if arrival is Arrival.DUPLICATE:
            if len(body) != chunk.sizes[frame.number]:  # empty duplicates would cost their sender nothing
                raise PeerError(f"piece.length: {len(body)} bytes, not {chunk.sizes[frame.number]}")
            self._counts.duplicates += len(body)
        else:
            verify_piece(chunk.header, frame.number, body)
            # Nobody else holds the buffer, so it is stored, and forwarded from there, without a copy.
            piece = body if isinstance(body, bytes) else body.toreadonly()
            if self._chunks.put_piece(frame.key, frame.number, piece):
                self._counts.received += len(body)
                if chunk.whole:
                    self._writer.queue_chunk(chunk)
                if self._chunks.memory_bytes > self._limits.store_memory_bytes:
                    await self._writer.free_memory(self._limits.store_memory_bytes)
        await self._post(PieceStored(peer, stripe, frame.key, frame.number, len(body)))

    async def _throw_away(self, peer: bytes, stripe: int | None, size: int) -> None:
        self._counts.stray += size
        await self._post(Stray(peer, stripe, size))


def _version_of(frame: Frame) -> VersionId:
    return VersionId(frame.key.epoch, frame.key.version)
