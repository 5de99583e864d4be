"""What we hold of each version: a book of chunks and pieces. It holds names and bit sets, never payload.

Of one (epoch, version) only the newest attempt counts: when a header or manifest of a later attempt shows up, whatever
an earlier one left is dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from codec import ChunkKey, Manifest
from swarm.protocol.core.events import Drop, HeaderStored
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import Have

__all__ = ["Chunk", "Chunks", "Version", "bits_of", "mask_of"]


def mask_of(bits: bytes, full: int) -> int:
    """The pieces that a wire bit set names, of those that there are; empty means all."""
    return int.from_bytes(bits, "little") & full if bits else full


def bits_of(mask: int, full: int) -> bytes:
    """A piece mask as it travels; b"" when it is full."""
    return b"" if mask == full else mask.to_bytes((full.bit_length() + 7) // 8, "little")


@dataclass(slots=True)
class Chunk:
    """One chunk whose signed header we hold."""

    key: ChunkKey
    chunk_id: bytes
    sizes: tuple[int, ...]
    header_bytes: int
    stripe: int | None
    have: int = 0
    """Bit i: piece i is in the store."""
    full: int = field(init=False)
    """`have` when every piece is here."""

    def __post_init__(self) -> None:
        self.full = (1 << len(self.sizes)) - 1

    @property
    def whole(self) -> bool:
        return self.have == self.full

    def held(self) -> Iterator[int]:
        return (i for i in range(len(self.sizes)) if self.have >> i & 1)


@dataclass(slots=True)
class Version:
    """One version on its way in (or sealed and kept for others)."""

    id: VersionId
    attempt: int
    parent_root: bytes = b""
    chunks: dict[int, Chunk] = field(default_factory=dict)
    manifest: Manifest | None = None
    sealed_manifest: bytes = b""
    generation: int = 0
    progress_at: float = 0.0
    """Local time at which a piece or header of it last arrived."""
    unstaged: dict[int, Chunk] = field(default_factory=dict)
    """Chunks that are whole and not yet decoded, by sequence number."""
    whole_chunks: int = 0
    told: bool = False
    """Whoever watches has been told that it is complete."""

    @property
    def complete(self) -> bool:
        """Every chunk that the manifest lists is here and whole. (After the seal no other chunk is taken in.)"""
        return self.manifest is not None and self.whole_chunks == len(self.manifest.chunk_ids)

    def fill(self, chunk: Chunk) -> None:
        """All of this chunk, which is one of ours, is in the store."""
        self.whole_chunks += not chunk.whole
        chunk.have = chunk.full

    def staged(self, chunk: Chunk) -> None:
        """This chunk is decoded into scratch, and the hashes that it predicts are right."""
        self.unstaged.pop(chunk.key.seq, None)

    def missing(self) -> Iterator[int]:
        """Sequence numbers of chunks that are not whole: those listed, or before the seal those up to the newest."""
        seqs = range(len(self.manifest.chunk_ids) if self.manifest is not None else max(self.chunks, default=-1) + 1)
        return (s for s in seqs if s not in self.chunks or not self.chunks[s].whole)

    @property
    def assigned(self) -> bool:
        """The headers of all chunks that the seal lists are here: nothing more is to come of it but pieces."""
        return self.manifest is not None and len(self.chunks) == len(self.manifest.chunk_ids)

    @property
    def payload_bytes(self) -> int:
        return sum(sum(c.sizes) + c.header_bytes for c in self.chunks.values())


class Chunks:
    """The book. Versions at or below `floor` are settled (or of no interest): news of them is not taken in."""

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
        """The version at this attempt; None when a later one is known or a sealed one stands."""
        version = self.versions.get(id_)
        if version is None:
            version = self.versions[id_] = Version(id_, attempt)
        elif attempt > version.attempt and version.manifest is None:
            self._outbox.emit(Drop(id_, version.attempt))
            version = self.versions[id_] = Version(id_, attempt, generation=version.generation + 1)
        return version if version.attempt == attempt else None

    def assigned(self, key: ChunkKey) -> bool:
        """Whether all of the version that this chunk belongs to has been dealt."""
        version = self.at(key)
        return version is not None and version.assigned

    def at(self, key: ChunkKey) -> Version | None:
        """The version that a chunk of this name would belong to, if it is known at this attempt."""
        version = self.versions.get(VersionId(key.epoch, key.version))
        return version if version is not None and version.attempt == key.attempt else None

    def header(self, event: HeaderStored, now: float) -> tuple[Chunk, bool] | None:
        """Take a header in: (its chunk, was it news). None when it belongs to a dead attempt, or is not the chunk that
        the version's seal lists."""
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
        chunk = Chunk(key, event.chunk_id, event.piece_bytes, event.header_bytes, event.stripe)
        if version.manifest is not None and not _listed(chunk, version.manifest):
            return None
        version.parent_root = event.parent_root
        version.progress_at = now
        version.chunks[key.seq] = chunk
        if chunk.whole:  # it has no pieces
            version.whole_chunks += 1
            version.unstaged[key.seq] = chunk
        return chunk, True

    def piece(self, key: ChunkKey, index: int, now: float) -> tuple[Chunk, bool] | None:
        """Take a piece in: (its chunk, was it news). None when we do not know the chunk (any more)."""
        chunk = self.find(key)
        if chunk is None or index >= len(chunk.sizes):
            return None
        if chunk.have >> index & 1:
            return chunk, False
        chunk.have |= 1 << index
        version = self.versions[VersionId(key.epoch, key.version)]
        version.progress_at = now
        if chunk.have == chunk.full:
            version.whole_chunks += 1
            version.unstaged[key.seq] = chunk
        return chunk, True

    def manifest(self, manifest: Manifest, sealed: bytes, now: float) -> Version | None:
        """Take a verified manifest in; its version, or None when it is no news."""
        id_ = VersionId(manifest.epoch, manifest.version)
        version = self._at_attempt(id_, manifest.attempt)
        if version is None or version.manifest is not None:
            return None
        version.manifest, version.sealed_manifest = manifest, sealed
        version.parent_root = manifest.parent_root
        version.progress_at = now
        for seq in [s for s, c in version.chunks.items() if not _listed(c, manifest)]:
            version.whole_chunks -= version.chunks.pop(seq).whole
            version.unstaged.pop(seq, None)
        return version

    def drop(self, id_: VersionId) -> None:
        self.versions.pop(id_, None)

    def haves(self, after: VersionId) -> tuple[Have, ...]:
        """What we hold of the versions after this one, as an `Attach` says it."""
        return tuple(
            Have(chunk.key.epoch, chunk.key.version, chunk.key.attempt, chunk.key.seq, bits_of(chunk.have, chunk.full))
            for id_ in sorted(self.versions)
            if id_ > after
            for _, chunk in sorted(self.versions[id_].chunks.items())
            if chunk.have
        )


def _listed(chunk: Chunk, manifest: Manifest) -> bool:
    return chunk.key.seq < len(manifest.chunk_ids) and chunk.chunk_id == manifest.chunk_ids[chunk.key.seq]
