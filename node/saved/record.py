"""The signed description of a saved state: its number, its size, its code, and the digest of every segment.

    content (the trainer's bytes)
      -> rows: SHARE_BYTES x k - 16 bytes of content each, encrypted (`cipher`); the last one has what is left
      -> each row cut into k equal parts, and n - k more computed from them (`codec.erasure`)
      -> fragment i: part i of every row, in order
      -> segments: runs of `segment_rows` parts of one fragment; each has its BLAKE3 in the record

A fragment travels segment by segment, and a segment counts once it has the digest that the swarm's key has signed. So a
holder that sends anything else is found out after one segment, and a transfer that was interrupted goes on after the
last whole one.
"""

from typing import Annotated, Final

import msgspec

from codec.erasure import MAX_FRAGMENTS
from codec.errors import PeerError
from codec.sign import SIGNATURE_BYTES, Key, open_sealed
from codec.unpack import unpack

__all__ = ["MAX_RECORD_BYTES", "MAX_STATE_BYTES", "TAG_BYTES", "StateRecord", "open_record", "segment_rows_for"]

SHARE_BYTES: Final = 128 << 10
"""Of a row in each fragment. With twelve fragments, twelve of these and the row itself are in memory."""
TAG_BYTES: Final = 16
"""By which encryption lengthens a row."""
MAX_STATE_BYTES: Final = 1 << 42
"""4 TB: the Adam moments and master weights of 350 B parameters."""
MIN_SEGMENT_ROWS: Final = 64
"""8 MiB of a fragment: it takes a second at 64 Mbit/s."""
MAX_SEGMENTS: Final = 512
"""Of each fragment: those of larger states are longer, so that a record of 24 fragments stays below 400 kB."""
MAX_HOLDERS: Final = 24
"""Fragments of one state."""
MAX_RECORD_BYTES: Final = 32 * MAX_SEGMENTS * MAX_HOLDERS + 1024
_DIGEST_BYTES: Final = 32
_DOMAIN: Final = b"swarm-node saved state 1"
assert MAX_HOLDERS <= MAX_FRAGMENTS

Key32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class StateRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One saved state. A later one has a higher `serial`.

    `swarm`: the public key that signs it. `step`: the trainer's own count, for people. `size`: bytes of the content.
    `salt`: of its encryption. Any `needed` of its `total` fragments give it back. `digests`: BLAKE3 of all segments,
    those of fragment 0 first.
    """

    swarm: Key32
    serial: U63
    step: U63
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_STATE_BYTES)]
    salt: Key32
    needed: Annotated[int, msgspec.Meta(ge=1, le=MAX_HOLDERS)]
    total: Annotated[int, msgspec.Meta(ge=1, le=MAX_HOLDERS)]
    segment_rows: Annotated[int, msgspec.Meta(ge=MIN_SEGMENT_ROWS, lt=1 << 31)]
    digests: Annotated[bytes, msgspec.Meta(max_length=_DIGEST_BYTES * MAX_SEGMENTS * MAX_HOLDERS)]

    @property
    def row_bytes(self) -> int:
        """Content of every row but the last."""
        return self.needed * SHARE_BYTES - TAG_BYTES

    @property
    def rows(self) -> int:
        """At least one: an empty content has a row, too."""
        return max(1, -(-self.size // self.row_bytes))

    def content_of(self, row: int) -> int:
        """Bytes of content in a row."""
        return self.row_bytes if row < self.rows - 1 else self.size - (self.rows - 1) * self.row_bytes

    def share_of(self, row: int) -> int:
        """Bytes of a row in each fragment."""
        return -(-(self.content_of(row) + TAG_BYTES) // self.needed)

    @property
    def fragment_bytes(self) -> int:
        """Bytes of each fragment."""
        return (self.rows - 1) * SHARE_BYTES + self.share_of(self.rows - 1)

    @property
    def segments(self) -> int:
        """Segments of each fragment."""
        return -(-self.rows // self.segment_rows)

    @property
    def segment_bytes(self) -> int:
        """Bytes of every segment but the last."""
        return self.segment_rows * SHARE_BYTES

    def bytes_of_segment(self, segment: int) -> int:
        """Bytes of one segment."""
        return min(self.segment_bytes, self.fragment_bytes - segment * self.segment_bytes)

    def digest(self, fragment: int, segment: int) -> bytes:
        """BLAKE3 of a segment, 32 bytes."""
        at = (fragment * self.segments + segment) * _DIGEST_BYTES
        return self.digests[at : at + _DIGEST_BYTES]

    def sign(self, key: Key) -> bytes:
        """The signed encoding; `open_record` is the inverse."""
        assert key.public == self.swarm
        return key.seal(_DOMAIN, _encoder.encode(self))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StateRecord)


def segment_rows_for(size: int, needed: int) -> int:
    """How many rows a segment of a state of `size` bytes has."""
    rows = max(1, -(-size // (needed * SHARE_BYTES - TAG_BYTES)))
    return max(MIN_SEGMENT_ROWS, -(-rows // MAX_SEGMENTS))


def open_record(sealed: bytes, swarm: bytes) -> StateRecord:
    """Verify, then decode. Raises `PeerError` unless `swarm` signed it and its fields fit together."""
    if not SIGNATURE_BYTES < len(sealed) <= MAX_RECORD_BYTES:
        raise PeerError(f"saved state: a record of {len(sealed)} bytes, at most {MAX_RECORD_BYTES}")
    record = unpack(_decoder, open_sealed(swarm, _DOMAIN, sealed), "saved state")
    if record.swarm != swarm:
        raise PeerError("saved state: of another swarm than it is signed by")
    if record.needed > record.total or record.segments > MAX_SEGMENTS:
        raise PeerError("saved state: its fragments or segments are too many")
    if len(record.digests) != _DIGEST_BYTES * record.total * record.segments:
        raise PeerError("saved state: not one digest for each segment")
    return record
