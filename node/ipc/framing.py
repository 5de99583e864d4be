"""The frame format of every local socket, without any input or output.

    u32 body length | u8 number of descriptors | body          (little-endian)

The body is MessagePack: a tagged union of `msgspec.Struct`s that both ends name. The descriptors travel beside the
frame's first byte (SCM_RIGHTS), so they are never later than the message that claims them. Either end may crash at any
byte: lengths are bounded before anything is allocated, and a partial frame is neither lost nor taken for a whole one.
"""

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from codec.errors import PeerError
from codec.unpack import unpack

__all__ = [
    "ANCILLARY_BYTES",
    "MAX_BODY_BYTES",
    "MAX_FDS",
    "READ_BYTES",
    "FrameReader",
    "close_fds",
    "encode_frame",
    "encode_rights",
]

MAX_BODY_BYTES: Final = 32 << 20
"""The largest valid message holds one dense block of 8-byte elements (8 MiB) and its neighbours; the rest is margin."""
MAX_FDS: Final = 4
"""Descriptors of one message: none passes more than a replica and a patch. The kernel's own limit is 253."""
READ_BYTES: Final = 1 << 18
"""What one `recvmsg` reads at most."""
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_FDS * struct.calcsize("i"))
"""Buffer of one `recvmsg` for descriptors."""
_HEAD: Final = struct.Struct("<IB")

Ancillary = tuple[int, int, bytes]
"""(level, type, content), as `sendmsg` takes it and `recvmsg` returns it."""


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors that nothing uses; those that are closed already are skipped."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def encode_frame(message: msgspec.Struct, fds: Sequence[int] = ()) -> bytes:
    """`message` as one frame that announces `fds`. Raises `ValueError` above `MAX_BODY_BYTES` or `MAX_FDS`."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"{type(message).__name__}: {len(body)} bytes is more than a local message may have")
    if len(fds) > MAX_FDS:
        raise ValueError(f"{type(message).__name__}: {len(fds)} descriptors is more than a message may carry")
    return _HEAD.pack(len(body), len(fds)) + body


def encode_rights(fds: Sequence[int]) -> list[Ancillary]:
    """The ancillary data that sends `fds`; it goes with the first `sendmsg` of their frame."""
    if not fds:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]


class FrameReader:
    """Turns received bytes and descriptors into messages; owns the descriptors that no message has claimed yet."""

    def __init__(self, receives: Any) -> None:
        """`receives`: the tagged union of Structs that this end understands."""
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._bytes = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, ancillary: Sequence[Ancillary], flags: int) -> None:
        """Add the result of one `recvmsg`. Raises `PeerError` when the kernel had to drop descriptors."""
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % 4
                self._fds.extend(struct.unpack(f"{whole // 4}i", content[:whole]))
        if len(self._fds) > 2 * MAX_FDS:  # those of the frame that is not complete yet, and of the next one
            raise PeerError(f"descriptors: {len(self._fds)} came that no message announced")
        if flags & socket.MSG_CTRUNC:
            raise PeerError("descriptors: more arrived than a message may carry, or our limit of open files is reached")
        self._bytes += data

    def next_message(self) -> tuple[Any, list[int]] | None:
        """The next complete message and its descriptors, which the caller closes; None when more bytes are needed.

        Raises `PeerError` for a frame above the bounds, without its descriptors, or of no known type.
        """
        if len(self._bytes) < _HEAD.size:
            return None
        length, n_fds = _HEAD.unpack_from(self._bytes)
        if length > MAX_BODY_BYTES or n_fds > MAX_FDS:
            raise PeerError(f"local frame: {length} bytes, {n_fds} descriptors")
        end = _HEAD.size + length
        if len(self._bytes) < end:
            return None
        if len(self._fds) < n_fds:
            raise PeerError(f"local frame: {n_fds} descriptors announced, {len(self._fds)} came")
        body = bytes(memoryview(self._bytes)[_HEAD.size : end])
        del self._bytes[:end]
        fds = [self._fds.popleft() for _ in range(n_fds)]
        try:
            return unpack(self._decoder, body, "local message"), fds
        except PeerError:
            close_fds(fds)
            raise

    def close(self) -> None:
        """Close the descriptors that no message has claimed."""
        close_fds(self._fds)
        self._fds.clear()
