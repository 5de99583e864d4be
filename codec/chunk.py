"""Chunks: the signed, self-contained units of a version's delta, divided into pieces that are verified one by one.

A chunk is a sealed header and a body. The header names the swarm, the version, the parent root and the sequence number,
lists the blocks with the hash that each must have afterwards, and holds the hash of every piece; the trainer signs it.
The body is the concatenated payloads of the blocks. No body is decoded before the signature of its header and the
hashes of its pieces are verified. `docs/codec.md` specifies the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from blake3 import blake3

from codec.errors import PeerError
from codec.layout import BLOCK_ELEMENTS
from codec.sign import SIGNATURE_BYTES, Key, open_sealed
from codec.varint import MAX_INT, Reader, Writer

__all__ = [
    "CODER_PCO",
    "CODER_RAW",
    "CODER_RICE",
    "MAX_BLOCKS",
    "MAX_BODY_BYTES",
    "MAX_CHUNK_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_PIECE_BYTES",
    "MIN_PIECE_BYTES",
    "BlockDelta",
    "BlockEntry",
    "Chunk",
    "ChunkHeader",
    "ChunkKey",
    "chunk_id",
    "open_header",
    "seal_chunk",
    "verify_piece",
]

# How a block's payload is coded; on the wire.
CODER_RICE: Final = 0
CODER_PCO: Final = 1
CODER_RAW: Final = 2
_CODERS: Final = 3
"""The number of coders; the header packs the coder into the payload's length with it."""

MAX_CHUNK_BYTES: Final = 1 << 20
"""Upper bound of a body that holds more than one block."""
MAX_BODY_BYTES: Final = 8 * BLOCK_ELEMENTS
"""Upper bound of any body: one raw block of the widest dtype."""
MIN_PIECE_BYTES: Final = 16 << 10
MAX_PIECE_BYTES: Final = 256 << 10
MAX_HEADER_BYTES: Final = 512 << 10
MAX_BLOCKS: Final = 8192
"""Upper bound of the blocks in a chunk, so that every header stays below `MAX_HEADER_BYTES`."""

_DOMAIN: Final = b"swarm-node chunk 1"
_MAGIC: Final = b"SWC1"


class ChunkKey(NamedTuple):
    """The place of a chunk: versions are ordered by (epoch, version); `seq` counts from 0 within an attempt."""

    epoch: int
    version: int
    attempt: int
    seq: int


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """One block's coded change. `new_hash`: BLAKE3 of the block's bytes afterwards. `payload`: bytes, or a view that
    nobody writes to."""

    block: int
    coder: int
    new_hash: bytes
    payload: bytes | memoryview


class BlockEntry(NamedTuple):
    """A block in a header. `new_hash`: BLAKE3 of the block afterwards. `length`: bytes of its payload."""

    block: int
    coder: int
    new_hash: bytes
    length: int


@dataclass(frozen=True)
class ChunkHeader:
    """A verified header. `swarm`: the authority's public key. `blocks`: in ascending order."""

    swarm: bytes
    key: ChunkKey
    parent_root: bytes
    layout_hash: bytes
    piece_bytes: int
    blocks: tuple[BlockEntry, ...]
    piece_hashes: tuple[bytes, ...]

    @cached_property
    def body_bytes(self) -> int:
        return sum(entry.length for entry in self.blocks)

    @property
    def n_pieces(self) -> int:
        return len(self.piece_hashes)

    def piece_range(self, index: int) -> range:
        """The byte range of piece `index` in the body. Raises `IndexError`."""
        if not 0 <= index < self.n_pieces:
            raise IndexError(f"piece {index} of {self.n_pieces}")
        return range(index * self.piece_bytes, min((index + 1) * self.piece_bytes, self.body_bytes))

    def payloads(self, body: bytes | bytearray | memoryview) -> list[memoryview]:
        """The payload of each block, in the order of `blocks`. `body`: complete and verified."""
        assert len(body) == self.body_bytes
        view = memoryview(body)
        return [view[a:b] for a, b in pairwise(self._bounds)]

    def payload_start(self, index: int) -> int:
        """The offset in the body of the payload of `blocks[index]`."""
        return self._bounds[index]

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return tuple(accumulate((entry.length for entry in self.blocks), initial=0))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk as it is sent. `header`: sealed (signature first). `opened`: the decoded header, if this process has
    signed the chunk."""

    header: bytes
    body: bytes
    opened: ChunkHeader | None = field(default=None, compare=False, repr=False)

    @property
    def id(self) -> bytes:
        return chunk_id(self.header)

    @property
    def nbytes(self) -> int:
        return len(self.header) + len(self.body)


def chunk_id(sealed: bytes) -> bytes:
    """The BLAKE3 hash (32 bytes) of a sealed header, which holds the hashes of all pieces: it identifies the chunk."""
    return blake3(sealed).digest()


def seal_chunk(
    key: ChunkKey,
    parent_root: bytes,
    layout_hash: bytes,
    deltas: Sequence[BlockDelta],
    signing_key: Key,
    piece_bytes: int = MIN_PIECE_BYTES,
) -> Chunk:
    """Sign `deltas`, given in any order, as one chunk. `piece_bytes`: a power of two from 16 to 256 KiB.

    Raises `PeerError` if the chunk would exceed a bound, since every receiver would refuse it.
    """
    deltas = sorted(deltas, key=lambda delta: delta.block)
    body = b"".join(delta.payload for delta in deltas)
    out = Writer(_MAGIC + signing_key.public)
    for number in key:
        out.uint(number)
    out.raw(parent_root)
    out.raw(layout_hash)
    out.uint(piece_bytes.bit_length() - 1)
    out.uint(len(deltas))
    expected = 0
    for delta in deltas:
        out.uint(delta.block - expected)
        out.uint(len(delta.payload) * _CODERS + delta.coder)
        out.raw(delta.new_hash)
        expected = delta.block + 1
    for start in range(0, len(body), piece_bytes):
        out.raw(blake3(body[start : start + piece_bytes]).digest())
    header = bytes(out.data)
    opened = _read_header(header)  # never sign a header that receivers would refuse
    return Chunk(signing_key.seal(_DOMAIN, header), body, opened)


def open_header(sealed: bytes, authority: bytes) -> ChunkHeader:
    """Verify and decode a sealed header. `authority`: the swarm's public key. Raises `PeerError` naming the field."""
    if not SIGNATURE_BYTES < len(sealed) <= MAX_HEADER_BYTES:
        raise PeerError(f"chunk.header: {len(sealed)} bytes, at most {MAX_HEADER_BYTES}")
    header = _read_header(open_sealed(authority, _DOMAIN, sealed))
    if header.swarm != authority:
        raise PeerError("chunk.swarm: belongs to another swarm")
    return header


def _read_header(data: bytes) -> ChunkHeader:
    reader = Reader(data, "chunk")
    if reader.raw("magic", len(_MAGIC)) != _MAGIC:
        raise PeerError("chunk.magic: not a chunk of this version")
    swarm = reader.raw("swarm", 32)
    key = ChunkKey(*(reader.uint(field) for field in ChunkKey._fields))
    parent_root = reader.raw("parent root", 32)
    layout_hash = reader.raw("layout hash", 32)
    piece_bytes = 1 << reader.uint("piece bytes", MAX_PIECE_BYTES.bit_length() - 1)
    if piece_bytes < MIN_PIECE_BYTES:
        raise PeerError(f"chunk.piece bytes: {piece_bytes}, at least {MIN_PIECE_BYTES}")
    blocks: list[BlockEntry] = []
    expected = body_bytes = 0
    for _ in range(reader.uint("blocks", MAX_BLOCKS)):
        block = expected + reader.uint("block", MAX_INT - expected)
        length, coder = divmod(reader.uint("length", MAX_BODY_BYTES * _CODERS + _CODERS - 1), _CODERS)
        if length == 0:
            raise PeerError("chunk.length: an empty payload")
        blocks.append(BlockEntry(block, coder, reader.raw("block hash", 32), length))
        body_bytes += length
        expected = block + 1
    if not blocks:
        raise PeerError("chunk.blocks: none")
    most = MAX_BODY_BYTES if len(blocks) == 1 else MAX_CHUNK_BYTES
    if body_bytes > most:
        raise PeerError(f"chunk.length: a body of {body_bytes} bytes, at most {most}")
    hashes = tuple(reader.raw("piece hash", 32) for _ in range(-(-body_bytes // piece_bytes)))
    reader.end()
    return ChunkHeader(swarm, key, parent_root, layout_hash, piece_bytes, tuple(blocks), hashes)


def verify_piece(header: ChunkHeader, index: int, piece: bytes | memoryview) -> None:
    """Raise `PeerError` unless `piece` is piece `index` of the chunk."""
    if not 0 <= index < header.n_pieces:
        raise PeerError(f"piece.index: {index} of {header.n_pieces}")
    expected = len(header.piece_range(index))
    if len(piece) != expected:
        raise PeerError(f"piece.length: {len(piece)} bytes, not {expected}")
    if blake3(piece).digest() != header.piece_hashes[index]:
        raise PeerError(f"piece.hash: piece {index} is not the signed one")
