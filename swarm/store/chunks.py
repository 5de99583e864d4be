"""The chunk store: pieces in memory while they arrive, then in one pack file per version attempt.

Children and the decoder need a piece right after it is verified, so it stays in memory at first. A worker thread then
writes the chunks that have become complete (`spill`), and with `keep` their pieces stay in memory for children that are
behind: they would have to be read from the disk again. The caller bounds the memory: it calls `release_written` now and
then, and `spill_all` when `memory_bytes` exceeds its limit.
"""

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from pathlib import Path

from codec import ChunkHeader, ChunkKey, open_header, verify_piece
from codec.chunk import BlockEntry
from codec.errors import PeerError
from swarm.protocol.core.events import VersionId
from swarm.store.disk import Disk
from swarm.store.pack import Pack

__all__ = ["ChunkStore", "StoredChunk"]

_DROPPED_KEPT = 256
"""Dropped attempts to remember for `was_dropped`."""


@dataclass(slots=True)
class StoredChunk:
    """A chunk whose signed header is stored. `sizes`: bytes of each piece. `have`: bit i is set if piece i is."""

    key: ChunkKey
    header: ChunkHeader
    sealed_header: bytes
    sizes: tuple[int, ...]
    have: int = 0
    memory: dict[int, bytes | memoryview] = field(default_factory=dict)
    """Pieces not yet in the pack, or kept beside it."""
    body: int | None = None
    """Offset of the body in the pack; None before the first `spill`."""
    bodiless: bool = False
    """Only the header is kept: this member holds no block that the chunk changes."""

    @property
    def whole(self) -> bool:
        return self.have == (1 << len(self.sizes)) - 1

    @property
    def body_bytes(self) -> int:
        return self.header.body_bytes

    def held(self) -> Iterator[int]:
        """The indices of the stored pieces."""
        return (i for i in range(len(self.sizes)) if self.have >> i & 1)


class ChunkStore:
    """All chunks under one folder. Safe to use from the event loop and from worker threads.

    Every stored header and piece is verified: by the caller of `put_header` and `put_piece`, or by `open`.
    """

    def __init__(self, folder: Path, authority: bytes, disk: Disk) -> None:
        self._folder = folder
        self._authority = authority
        self._disk = disk
        self._lock = threading.RLock()
        self._spilling = threading.Lock()
        """Held while a chunk is written. `_lock` is not held then, since the disk may take long."""
        self._chunks: dict[ChunkKey, StoredChunk] = {}
        self._packs: dict[tuple[VersionId, int], Pack] = {}
        self._dropped: OrderedDict[tuple[VersionId, int], None] = OrderedDict()
        self._written: OrderedDict[ChunkKey, int] = OrderedDict()
        """Chunks in the pack whose pieces are in memory, too: their bytes; the longest written first."""
        self.memory_bytes = 0
        self.written_bytes = 0
        """Of `memory_bytes`, those that are in the pack, too."""

    # ------------------------------------------------------------ writing

    def put_header(self, header: ChunkHeader, sealed: bytes, *, bodiless: bool = False) -> tuple[StoredChunk, bool]:
        """Store a header that `open_header` accepted: (its chunk, whether it is new). `bodiless`: no pieces follow."""
        with self._lock:
            known = self._chunks.get(header.key)
            if known is not None:
                return known, False
            chunk = StoredChunk(header.key, header, sealed, _sizes(header), bodiless=bodiless)
            self._chunks[header.key] = chunk
            self._dropped.pop(_attempt(header.key), None)
            return chunk, True

    def expect_body(self, key: ChunkKey) -> None:
        """Of this chunk only the header was kept, but its pieces are needed: they may be stored from now on."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.bodiless:
                chunk.bodiless, chunk.body = False, None

    def put_piece(self, key: ChunkKey, index: int, data: bytes | memoryview) -> bool:
        """Store a piece that `verify_piece` accepted; whether it is new. It stays in memory until `spill`, and is not
        copied: what is behind a view must not change any more."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None or chunk.bodiless or chunk.have >> index & 1:
                return False
            chunk.memory[index] = data
            chunk.have |= 1 << index
            self.memory_bytes += len(data)
            return True

    def spill(self, *keys: ChunkKey, wanted: bool = False, keep: bool = False) -> None:
        """Write the pieces of these chunks from memory to their packs, not yet durably. Raises `DiskFull`.

        `wanted`: the chunks are about to be read, so write them through the system's page cache. `keep`: have the
        pieces of complete chunks in memory as well, until `release_written`.
        """
        for key in keys:
            with self._spilling:
                self._spill(key, wanted, keep)

    def _spill(self, key: ChunkKey, wanted: bool, keep: bool) -> None:
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None or not (chunk.memory or chunk.bodiless) or key in self._written:
                return
            pack = self._pack(key)
            if chunk.bodiless:
                chunk.body = pack.add(chunk.sealed_header, 0) if chunk.body is None else chunk.body
                return
            pieces = dict(chunk.memory)
        if chunk.body is None and len(pieces) == len(chunk.sizes) and not wanted:
            chunk.body = pack.put(chunk.sealed_header, [pieces[index] for index in range(len(pieces))])
        else:
            if chunk.body is None:
                chunk.body = pack.add(chunk.sealed_header, chunk.body_bytes)
            offsets = [chunk.body + at for at in accumulate(chunk.sizes, initial=0)]
            for first, run in _runs(pieces):
                pack.write(run, offsets[first])
        with self._lock:
            if self._chunks.get(key) is not chunk:  # `drop` has already subtracted its bytes
                return
            if keep and len(pieces) == len(chunk.sizes):
                self._written[key] = chunk.body_bytes
                self.written_bytes += chunk.body_bytes
                return
            for index, data in pieces.items():
                if chunk.memory.pop(index, None) is not None:
                    self.memory_bytes -= len(data)

    def release_written(self, most_bytes: int) -> None:
        """Forget the memory of written chunks, the longest written first, until they hold `most_bytes` at most."""
        with self._lock:
            while self.written_bytes > most_bytes:
                key, size = self._written.popitem(last=False)
                self._chunks[key].memory.clear()
                self.written_bytes -= size
                self.memory_bytes -= size

    def spill_all(self) -> None:
        """Write all pieces in memory to the packs, and keep none. Raises `DiskFull`."""
        self.release_written(0)
        with self._lock:
            keys = [key for key, chunk in self._chunks.items() if chunk.memory]
        self.spill(*keys)

    def sync(self, version: VersionId, attempt: int) -> None:
        """Make every chunk of this attempt durable. Raises `DiskFull`."""
        self.spill(*(chunk.key for chunk in self.of(version, attempt)))
        with self._lock:
            pack = self._packs.get((version, attempt))
        if pack is not None:
            pack.sync()
            self._disk.sync_folder(self._folder)

    # ------------------------------------------------------------ reading

    def chunk(self, key: ChunkKey) -> StoredChunk | None:
        return self._chunks.get(key)

    def of(self, version: VersionId, attempt: int | None = None) -> list[StoredChunk]:
        """The chunks of one version, or of one attempt at it, in order of their sequence numbers."""
        with self._lock:
            found = [
                chunk
                for key, chunk in self._chunks.items()
                if _attempt(key)[0] == version and attempt in (None, key.attempt)
            ]
        return sorted(found, key=lambda chunk: chunk.key)

    def all(self) -> list[StoredChunk]:
        with self._lock:
            return sorted(self._chunks.values(), key=lambda chunk: chunk.key)

    def piece(self, key: ChunkKey, index: int) -> bytes | memoryview | None:
        """The bytes of a piece; None if it is not stored."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None or not chunk.have >> index & 1:
                return None
            data = chunk.memory.get(index)
            if data is not None:
                return data
            pack = self._packs.get(_attempt(key))
        if pack is None or chunk.body is None:
            return None
        return pack.read(chunk.body + sum(chunk.sizes[:index]), chunk.sizes[index])

    def body(self, key: ChunkKey) -> bytes | None:
        """The body of a chunk; None if a piece is missing."""
        chunk = self._chunks.get(key)
        if chunk is None or not chunk.whole:
            return None
        with self._lock:
            pack = self._packs.get(_attempt(key))
            spilled = not chunk.memory
        if spilled and pack is not None and chunk.body is not None:
            return pack.read(chunk.body, chunk.body_bytes)
        pieces = [self.piece(key, i) for i in range(len(chunk.sizes))]
        return None if None in pieces else b"".join(piece for piece in pieces if piece is not None)

    def payload(self, key: ChunkKey, block: int) -> tuple[BlockEntry, bytes] | None:
        """The entry and payload of a block in a complete chunk; None if the chunk is not stored or lacks the block."""
        chunk = self._chunks.get(key)
        if chunk is None or not chunk.whole:
            return None
        blocks = chunk.header.blocks
        at = bisect_left(blocks, block, key=attrgetter("block"))
        if at == len(blocks) or blocks[at].block != block:
            return None
        start, length = chunk.header.payload_start(at), blocks[at].length
        with self._lock:
            pack, body = self._packs.get(_attempt(key)), chunk.body
            in_pack = not chunk.memory
        if in_pack and pack is not None and body is not None:
            data = pack.read(body + start, length)
        else:
            whole = self.body(key)
            data = None if whole is None else whole[start : start + length]
        return None if data is None else (blocks[at], data)

    def was_dropped(self, key: ChunkKey) -> bool:
        """Whether this attempt was dropped lately, so that an honest peer may still be sending its pieces."""
        return _attempt(key) in self._dropped

    # ------------------------------------------------------------ dropping

    def drop(self, version: VersionId, attempt: int | None = None) -> None:
        """Delete the chunks of a version, or of one attempt at it, from memory and disk."""
        with self._lock:
            attempts = {_attempt(key) for key in self._chunks} | set(self._packs)
            gone = [found for found in attempts if found[0] == version and attempt in (None, found[1])]
            for key in [key for key in self._chunks if _attempt(key) in gone]:
                self.memory_bytes -= sum(map(len, self._chunks.pop(key).memory.values()))
                self.written_bytes -= self._written.pop(key, 0)
            packs = [self._packs.pop(dropped) for dropped in gone if dropped in self._packs]
            if attempt is not None and (version, attempt) not in gone:
                gone.append((version, attempt))
            for dropped in gone:
                self._dropped[dropped] = None
            while len(self._dropped) > _DROPPED_KEPT:
                self._dropped.popitem(last=False)
            for pack in packs:  # with the lock held, so that a chunk that arrives again does not get the old file
                pack.close()
                self._disk.remove(pack.path)

    def close(self) -> None:
        with self._lock:
            for pack in self._packs.values():
                pack.close()

    # ------------------------------------------------------------ opening

    def open(self) -> None:
        """Load the chunks in the folder. What does not verify is ignored; other files are left alone."""
        for path in sorted(self._folder.iterdir()):
            name = path.name.split(".")
            if len(name) != 3 or not all(part.isdecimal() for part in name):
                continue
            epoch, version, attempt = map(int, name)
            try:
                pack = self._packs[VersionId(epoch, version), attempt] = Pack(path, self._disk, create=False)
            except FileNotFoundError:  # the process that uses the folder has dropped it
                continue
            for extent in pack.scan():
                self._load_chunk(pack, (VersionId(epoch, version), attempt), extent.header, extent.body, extent.size)

    def _load_chunk(self, pack: Pack, attempt: tuple[VersionId, int], sealed: bytes, body: int, size: int) -> None:
        try:
            header = open_header(sealed, self._authority)
        except PeerError:
            return
        known = self._chunks.get(header.key)
        if _attempt(header.key) != attempt or size not in (0, header.body_bytes):
            return
        if known is not None and not (known.bodiless and size):  # see `expect_body`
            return
        chunk = StoredChunk(header.key, header, sealed, _sizes(header), body=body, bodiless=size == 0)
        for index, at in enumerate(accumulate(chunk.sizes[:-1], initial=0) if size else ()):
            data = pack.read(body + at, chunk.sizes[index])
            if data is None:
                break
            try:
                verify_piece(header, index, data)
            except PeerError:
                continue
            chunk.have |= 1 << index
        self._chunks[header.key] = chunk

    def _pack(self, key: ChunkKey) -> Pack:
        attempt = _attempt(key)
        pack = self._packs.get(attempt)
        if pack is None:
            path = self._folder / f"{key.epoch}.{key.version}.{key.attempt}"
            pack = self._packs[attempt] = Pack(path, self._disk)
        return pack


def _attempt(key: ChunkKey) -> tuple[VersionId, int]:
    return VersionId(key.epoch, key.version), key.attempt


def _sizes(header: ChunkHeader) -> tuple[int, ...]:
    return tuple(len(header.piece_range(i)) for i in range(header.n_pieces))


def _runs(pieces: dict[int, bytes | memoryview]) -> Iterator[tuple[int, list[bytes | memoryview]]]:
    """Runs of consecutive pieces: (index of the first, the bytes of each)."""
    run: list[bytes | memoryview] = []
    first = previous = -2
    for index in sorted(pieces):
        if index != previous + 1 and run:
            yield first, run
            run = []
        if not run:
            first = index
        run.append(pieces[index])
        previous = index
    if run:
        yield first, run
