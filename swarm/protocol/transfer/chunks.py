"""The record of the chunks and pieces that a peer holds of each version: keys and bit sets, never payload.

Of one (epoch, version) only the newest attempt counts: when a header or manifest of a later attempt arrives, the chunks
of earlier attempts are dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from codec import ChunkKey, Manifest
from swarm.protocol.core.events import Drop, HeaderStored
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import Have, LacksChunk, Offer, Skip, WantChunk

__all__ = ["NO_PIECES", "Chunk", "Chunks", "Version", "bits_of", "key_of", "mask_of"]

NO_PIECES = b"\0"
"""The wire bit set of a `WantChunk` for a header alone."""


def key_of(message: Skip | LacksChunk | WantChunk | Offer) -> ChunkKey:
    """The key of the chunk that a message names."""
    return ChunkKey(message.epoch, message.version, message.attempt, message.seq)


def mask_of(bits: bytes, full: int) -> int:
    """The piece mask of a wire bit set, limited to `full`; an empty bit set means all pieces."""
    return int.from_bytes(bits, "little") & full if bits else full


def bits_of(mask: int, full: int) -> bytes:
    """A piece mask as a wire bit set; b"" for all pieces."""
    return b"" if mask == full else mask.to_bytes((full.bit_length() + 7) // 8, "little")


@dataclass(slots=True)
class Chunk:
    """A chunk whose signed header we hold. `sizes`: bytes of each piece. `stripe`: None if unknown."""

    key: ChunkKey
    chunk_id: bytes
    sizes: tuple[int, ...]
    header_bytes: int
    stripe: int | None
    wanted: bool = True
    """Whether we need the pieces: it changes a block that we hold."""
    have: int = 0
    """Bit i is set if piece i is in the store."""
    source: bytes | None = None
    """The peer from which the newest of its pieces came, for the status; None: from none yet, or we made the chunk."""
    full: int = field(init=False)
    """The value of `have` when every piece is stored."""

    def __post_init__(self) -> None:
        self.full = (1 << len(self.sizes)) - 1

    @property
    def whole(self) -> bool:
        return self.have == self.full

    @property
    def done(self) -> bool:
        """Whether we have all of it that we need."""
        return not self.wanted or self.whole

    def held(self) -> Iterator[int]:
        """The indices of the stored pieces."""
        return (i for i in range(len(self.sizes)) if self.have >> i & 1)

    def want(self) -> WantChunk:
        """A request for the missing pieces."""
        return WantChunk(*self.key, bits_of(self.full & ~self.have, self.full))


@dataclass(slots=True)
class Version:
    """A version that is arriving, or that is kept for others. `generation`: number of attempts that it replaced."""

    id: VersionId
    attempt: int
    parent_root: bytes = b""
    chunks: dict[int, Chunk] = field(default_factory=dict)
    manifest: Manifest | None = None
    sealed_manifest: bytes = b""
    generation: int = 0
    progress_at: float = 0.0
    """Local time at which one of its pieces or headers last arrived."""
    unstaged: dict[int, Chunk] = field(default_factory=dict)
    """Complete chunks that are not decoded yet, by sequence number."""
    done_chunks: int = 0
    told: bool = False
    """Whether the application was told that the version is complete."""

    @property
    def complete(self) -> bool:
        """Whether every chunk of the manifest is done. (After the seal no other chunk is accepted.)"""
        return self.manifest is not None and self.done_chunks == len(self.manifest.chunk_ids)

    def fill(self, chunk: Chunk) -> None:
        """Mark one of our chunks as completely stored."""
        self.done_chunks += not chunk.done
        chunk.have = chunk.full

    def staged(self, chunk: Chunk) -> None:
        """The chunk was decoded into scratch memory, and its hashes are right."""
        self.unstaged.pop(chunk.key.seq, None)

    def missing(self) -> Iterator[int]:
        """Sequence numbers of chunks that are not done: of the manifest, or before the seal up to the newest."""
        seqs = range(len(self.manifest.chunk_ids) if self.manifest is not None else max(self.chunks, default=-1) + 1)
        return (s for s in seqs if s not in self.chunks or not self.chunks[s].done)

    def want(self, seq: int, *, header_first: bool = False) -> WantChunk:
        """A request for the missing pieces of a chunk. If its header has not arrived: for that, and all pieces unless
        `header_first`."""
        chunk = self.chunks.get(seq)
        if chunk is not None:
            return chunk.want()
        return WantChunk(*self.id, self.attempt, seq, NO_PIECES if header_first else b"")

    @property
    def assigned(self) -> bool:
        """Whether the headers of all chunks in the manifest have arrived, so that only pieces are missing."""
        return self.manifest is not None and len(self.chunks) == len(self.manifest.chunk_ids)

    @property
    def payload_bytes(self) -> int:
        return sum(sum(c.sizes) + c.header_bytes for c in self.chunks.values())


class Chunks:
    """The chunks of all versions that a peer knows."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.versions: dict[VersionId, Version] = {}

    def version(self, id_: VersionId) -> Version | None:
        return self.versions.get(id_)

    def find(self, key: ChunkKey) -> Chunk | None:
        version = self.versions.get(VersionId(key.epoch, key.version))
        if version is None or version.attempt != key.attempt:
            return None
        return version.chunks.get(key.seq)

    def _at_attempt(self, id_: VersionId, attempt: int) -> Version | None:
        """The version at this attempt; None if a later attempt is known, or another one is sealed."""
        version = self.versions.get(id_)
        if version is None:
            version = self.versions[id_] = Version(id_, attempt)
        elif attempt > version.attempt and version.manifest is None:
            self._outbox.emit(Drop(id_, version.attempt))
            version = self.versions[id_] = Version(id_, attempt, generation=version.generation + 1)
        return version if version.attempt == attempt else None

    def assigned(self, key: ChunkKey) -> bool:
        """Whether all chunks of the version of this chunk are assigned, and their headers here."""
        version = self.at(key)
        return version is not None and version.assigned

    def at(self, key: ChunkKey) -> Version | None:
        """The version that a chunk with this key belongs to, if it is known at this attempt."""
        version = self.versions.get(VersionId(key.epoch, key.version))
        return version if version is not None and version.attempt == key.attempt else None

    def header(self, event: HeaderStored, now: float) -> tuple[Chunk, bool] | None:
        """Record a header: (its chunk, whether it is new).

        None if the header is of a replaced attempt, or is not the one that the version's manifest lists.
        """
        key = event.key
        version = self._at_attempt(VersionId(key.epoch, key.version), key.attempt)
        if version is None:
            self._outbox.emit(Drop(VersionId(key.epoch, key.version), key.attempt))
            return None
        known = version.chunks.get(key.seq)
        if known is not None:
            if known.stripe is None:
                known.stripe = event.stripe
            return known, False
        chunk = Chunk(key, event.chunk_id, event.piece_bytes, event.header_bytes, event.stripe, event.wanted)
        if version.manifest is not None and not _listed(chunk, version.manifest):
            return None
        version.parent_root = event.parent_root
        version.progress_at = now
        version.chunks[key.seq] = chunk
        version.done_chunks += chunk.done
        if chunk.whole and chunk.wanted:  # a chunk without pieces
            version.unstaged[key.seq] = chunk
        return chunk, True

    def piece(self, key: ChunkKey, index: int, now: float) -> tuple[Chunk, bool] | None:
        """Record a piece: (its chunk, whether it is new). None if the chunk is not known (any more), or not wanted."""
        chunk = self.find(key)
        if chunk is None or index >= len(chunk.sizes) or not chunk.wanted:
            return None
        if chunk.have >> index & 1:
            return chunk, False
        chunk.have |= 1 << index
        version = self.versions[VersionId(key.epoch, key.version)]
        version.progress_at = now
        if chunk.have == chunk.full:
            version.done_chunks += 1
            version.unstaged[key.seq] = chunk
        return chunk, True

    def manifest(self, manifest: Manifest, sealed: bytes, now: float) -> Version | None:
        """Record a verified manifest; its version, or None if the manifest is not new."""
        id_ = VersionId(manifest.epoch, manifest.version)
        version = self._at_attempt(id_, manifest.attempt)
        if version is None or version.manifest is not None:
            return None
        version.manifest, version.sealed_manifest = manifest, sealed
        version.parent_root = manifest.parent_root
        version.progress_at = now
        for seq in [s for s, c in version.chunks.items() if not _listed(c, manifest)]:
            version.done_chunks -= version.chunks.pop(seq).done
            version.unstaged.pop(seq, None)
        return version

    def drop(self, id_: VersionId) -> None:
        self.versions.pop(id_, None)

    def haves(self, after: VersionId) -> tuple[Have, ...]:
        """The chunks of the versions after this one that we hold, or do not need, for an `Attach` message."""
        return tuple(
            Have(*chunk.key, bits_of(chunk.have if chunk.wanted else chunk.full, chunk.full))
            for id_ in sorted(self.versions)
            if id_ > after
            for _, chunk in sorted(self.versions[id_].chunks.items())
            if chunk.have or not chunk.wanted
        )


def _listed(chunk: Chunk, manifest: Manifest) -> bool:
    return chunk.key.seq < len(manifest.chunk_ids) and chunk.chunk_id == manifest.chunk_ids[chunk.key.seq]
