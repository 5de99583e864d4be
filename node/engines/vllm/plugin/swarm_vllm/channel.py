"""The plugin's end of the Unix socket to its driver.

The plugin is a package of its own, installed into vLLM's environment, and cannot import `node`: this file repeats the
frame format of `node.ipc.framing` (`u32 body length, u8 descriptors`, a MessagePack body), and both must change
together. `tests/node/engines/vllm` connects the two ends.

Both ends are processes of one user and refuse any other; each may die at any byte. An invalid frame raises `Closed`,
which the plugin handles as the loss of its driver.
"""

import contextlib
import os
import socket
import struct
import threading
from collections import deque
from typing import Any

import msgspec

__all__ = ["Channel", "Closed", "connect"]

_HEAD = struct.Struct("<IB")
_MAX_BODY_BYTES = 32 << 20
_MAX_FDS = 4
_READ_BYTES = 1 << 18
_SEND_WITHIN_S = 60.0
_CONNECT_WITHIN_S = 5.0


class Closed(Exception):
    """The process at the other end is gone."""


class Channel:
    """One connected socket. One thread receives; any thread may send."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        """Takes over `sock`. `receives`: the tagged union of Structs that may arrive."""
        self._sock = sock
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._bytes = bytearray()
        self._fds: deque[int] = deque()
        self._sending = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Raises `Closed`."""
        body = msgspec.msgpack.encode(message)
        if len(body) > _MAX_BODY_BYTES:
            raise ValueError(f"{type(message).__name__}: {len(body)} bytes is more than a message may have")
        with self._sending:
            try:
                self._sock.sendall(_HEAD.pack(len(body), 0) + body)
            except OSError as error:
                raise Closed("the driver is gone") from error

    def recv(self) -> tuple[Any, list[int]]:
        """The next message and its descriptors, which are the caller's to close. Raises `Closed`."""
        while (found := self._next()) is None:
            try:
                data, fds, flags, _ = socket.recv_fds(self._sock, _READ_BYTES, _MAX_FDS)
            except OSError as error:
                raise Closed("the driver is gone") from error
            self._fds.extend(fds)
            if len(self._fds) > 2 * _MAX_FDS or flags & socket.MSG_CTRUNC:  # those of one incomplete frame and the next
                raise Closed("more descriptors came than messages announced")
            self._bytes += data
            if not data:
                raise Closed("the driver is gone")
        return found

    def _next(self) -> tuple[Any, list[int]] | None:
        if len(self._bytes) < _HEAD.size:
            return None
        length, count = _HEAD.unpack_from(self._bytes)
        if length > _MAX_BODY_BYTES or count > _MAX_FDS:
            raise Closed(f"a frame of {length} bytes and {count} descriptors is invalid")
        if len(self._bytes) < _HEAD.size + length:
            return None
        body = bytes(self._bytes[_HEAD.size : _HEAD.size + length])
        del self._bytes[: _HEAD.size + length]
        if len(self._fds) < count:
            raise Closed(f"{count} descriptors were announced, {len(self._fds)} came")
        fds = [self._fds.popleft() for _ in range(count)]
        for fd in fds:
            os.set_inheritable(fd, False)
        try:
            return self._decoder.decode(body), fds
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            for fd in fds:
                os.close(fd)
            raise Closed(f"a message is invalid: {error}") from error

    def close(self) -> None:
        """Close the socket; a thread that waits in `recv` gets `Closed`. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())


def connect(path: str, receives: Any) -> Channel:
    """A channel to the driver. Raises `Closed` when no process of this user answers."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT_WITHIN_S)
        sock.connect(path)
        sock.settimeout(None)
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if uid != os.getuid():
            raise Closed(f"{path} is served by user {uid}, and this is user {os.getuid()}: run both as one user.")
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        sock.close()
        raise Closed(f"nobody answers at {path!r} ({error})") from error
    except Closed:
        sock.close()
        raise
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_SEND_WITHIN_S), 0))
    return Channel(sock, receives)
