"""Yamux on the wire: frames to bytes and back. Pure, so that it can be fuzzed.

A frame is a header of twelve bytes (version 0, kind, flags, stream id, length; big-endian) and, for data, `length`
bytes of payload. In other kinds the length field is a number: a window increment, a ping's value, a reason to go away.
Specification: https://github.com/hashicorp/yamux/blob/master/spec.md (libp2p's protocol id is /yamux/1.0.0).
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from codec.errors import PeerError

__all__ = [
    "ACK",
    "FIN",
    "GO_AWAY_NORMAL",
    "HEADER_BYTES",
    "INITIAL_WINDOW_BYTES",
    "RST",
    "SYN",
    "FrameParser",
    "Head",
    "Kind",
    "encode_head",
]

_HEADER: Final = struct.Struct("!BBHII")
HEADER_BYTES: Final = _HEADER.size
INITIAL_WINDOW_BYTES: Final = 262_144
"""Bytes that either end may send on a new stream before the first window update; the specification's number."""

SYN: Final = 1
ACK: Final = 2
FIN: Final = 4
RST: Final = 8
_ALL_FLAGS: Final = SYN | ACK | FIN | RST

GO_AWAY_NORMAL: Final = 0


class Kind(IntEnum):
    DATA = 0
    WINDOW = 1
    PING = 2
    GO_AWAY = 3


_KINDS: Final = tuple(Kind)


class Head(NamedTuple):
    """One frame header. `length`: payload bytes (data), increment (window), value (ping) or reason (go away)."""

    kind: Kind
    flags: int
    stream_id: int
    length: int


def encode_head(kind: Kind, flags: int, stream_id: int, length: int) -> bytes:
    return _HEADER.pack(0, kind, flags, stream_id, length)


class FrameParser:
    """Turns bytes into headers and pieces of payload. It buffers at most an incomplete header, never payload."""

    def __init__(self, max_frame_bytes: int) -> None:
        """`max_frame_bytes`: the longest data frame that a peer may send."""
        self._max_frame_bytes = max_frame_bytes
        self._partial = b""
        self._payload_left = 0
        self._paused = False
        self.rest: memoryview | bytes = b""
        """The part of the last input that `feed` did not read because of `pause`; feed it next. It stays valid."""

    @property
    def payload_left(self) -> int:
        """Payload bytes of the last data frame that have not arrived yet."""
        return self._payload_left

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Head | memoryview]:
        """Yield the headers in `data`, and after each data header its payload, in pieces as they arrive: views of
        `data`, to be copied if `data` may change.

        Consume the iterator before the next call. Raises `PeerError` at the first frame that breaks a rule.
        """
        view = memoryview(data)
        position, end = 0, len(view)
        self.rest, self._paused = b"", False
        while position < end:
            if self._paused:
                left = view[position:]
                self.rest = left if isinstance(view.obj, bytes) else bytes(left)
                return
            if self._payload_left:
                piece = view[position : position + self._payload_left]
                position += len(piece)
                self._payload_left -= len(piece)
                yield piece
                continue
            if self._partial or end - position < HEADER_BYTES:
                taken = bytes(view[position : position + HEADER_BYTES - len(self._partial)])
                self._partial += taken
                position += len(taken)
                if len(self._partial) < HEADER_BYTES:
                    return
                head = self._check(_HEADER.unpack(self._partial))
                self._partial = b""
            else:
                head = self._check(_HEADER.unpack_from(view, position))
                position += HEADER_BYTES
            if head.kind is Kind.DATA:
                self._payload_left = head.length
            yield head

    def pause(self) -> None:
        """End the running `feed` after this event, and leave the bytes after it in `rest`."""
        self._paused = True

    def _check(self, fields: tuple[int, int, int, int, int]) -> Head:
        version, kind, flags, stream_id, length = fields
        if version != 0:
            raise PeerError(f"yamux version {version}")
        if kind >= len(_KINDS):
            raise PeerError(f"yamux kind {kind}")
        if flags & ~_ALL_FLAGS:
            raise PeerError(f"yamux flags {flags:#x}")
        if (kind <= Kind.WINDOW) != (stream_id != 0):
            raise PeerError(f"yamux stream id {stream_id} on kind {kind}")
        if kind == Kind.DATA and length > self._max_frame_bytes:
            raise PeerError(f"yamux length {length} (at most {self._max_frame_bytes})")
        return Head(_KINDS[kind], flags, stream_id, length)
