"""A version's chunks before they are signed, and the bytes that they will take on the wire.

Headers are estimated: some of the chunks are sealed to learn how long headers are. The rest is arithmetic.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from codec.chunk import BlockDelta, ChunkKey, seal_chunk
from codec.manifest import Manifest
from codec.pack import ClassPacker, chunk_target, piece_target
from codec.sign import Key

__all__ = ["Packed", "pack"]

_SEALED: Final = 64
"""Chunks that are sealed to learn the mean length of a header."""
_KEY: Final = Key(bytes(32))
_NO_HASH: Final = bytes(32)


@dataclass(frozen=True, slots=True)
class Packed:
    """One version. `header_bytes`: the mean of a sealed header. `payload_bytes`: of all chunks, headers included."""

    chunks: list[list[BlockDelta]]
    header_bytes: float
    payload_bytes: int
    manifest_bytes: int

    @property
    def nbytes(self) -> int:
        """Everything on the wire."""
        return self.payload_bytes + self.manifest_bytes


def pack(deltas: Iterable[BlockDelta], body_bytes: int, changed: int, classes: Sequence[int] | None = None) -> Packed:
    """Pack a version. `body_bytes`: of all payloads together, from which the sizes of chunks and pieces follow.
    `classes`: for each block of the model its class; no chunk then has blocks of two classes."""
    packer = ClassPacker(chunk_target(body_bytes), classes)
    chunks = [full for delta in deltas for full in packer.add(delta)]
    chunks += packer.flush()
    header_bytes = _header_bytes(chunks, piece_target(body_bytes))
    payload = round(body_bytes + header_bytes * len(chunks))
    return Packed(chunks, header_bytes, payload, _manifest_bytes(len(chunks), payload, changed))


def _header_bytes(chunks: list[list[BlockDelta]], piece_bytes: int) -> float:
    """Mean bytes of a sealed header."""
    some = chunks[:: max(1, len(chunks) // _SEALED)]
    sealed = [
        len(seal_chunk(ChunkKey(0, 1, 0, seq), _NO_HASH, _NO_HASH, deltas, _KEY, piece_bytes).header)
        for seq, deltas in enumerate(some)
    ]
    return sum(sealed) / max(len(sealed), 1)


def _manifest_bytes(chunks: int, payload_bytes: int, changed: int) -> int:
    ids = tuple(seq.to_bytes(32, "big") for seq in range(chunks))
    roots = (_NO_HASH, _NO_HASH, _NO_HASH)
    return len(Manifest(_KEY.public, 0, 1, 0, *roots, ids, payload_bytes, changed).seal(_KEY))
