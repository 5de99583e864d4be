"""Messages and file descriptors between processes of one host, over a Unix socket.

A frame is `u32 body length, u8 number of descriptors` (little-endian) and a MessagePack body: a tagged union of
`msgspec.Struct`s that both ends name. Descriptors travel with the frame's first byte (SCM_RIGHTS). Only processes of
the same user may talk: the socket file is 0600 and each end asks the kernel who is at the other.

This file is for synchronous processes (trainer, engine) and needs neither trio nor libp2p; `node.ipc.async_channel`
speaks the same frames on trio. Neither end is a peer of the swarm, but both may crash at any byte, so lengths are
bounded and half a frame is never lost or taken for a whole one.
"""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from codec.errors import PeerError, SwarmError, UsageError
from codec.unpack import unpack

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_FDS",
    "Channel",
    "ChannelClosed",
    "ChannelTimeout",
    "Frames",
    "check_path",
    "check_same_user",
    "close_fds",
    "connect",
    "pack",
    "process_named",
]

MAX_BODY_BYTES: Final = 32 << 20
"""The largest honest message is one dense block of 8-byte elements (8 MiB) and its neighbours; the rest is slack."""
MAX_FDS: Final = 4
"""No message passes more than a replica and a patch; the kernel's own limit is 253."""
MAX_PATH_BYTES: Final = 107
"""`sun_path` has 108 bytes, one of them for the closing NUL."""
_HEAD: Final = struct.Struct("<IB")
_READ_BYTES: Final = 1 << 18
_ANCILLARY: Final = socket.CMSG_SPACE(MAX_FDS * struct.calcsize("i"))


class ChannelClosed(SwarmError):
    """The process at the other end of a local socket is gone, or this end was closed."""


class ChannelTimeout(SwarmError):
    """The process at the other end of a local socket did not answer, or take what was sent, before the deadline."""


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors that nobody will use; one that is closed already is no matter."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def pack(message: msgspec.Struct, fds: Sequence[int] = ()) -> bytes:
    """`message` as one frame, to be sent together with `fds`. `ValueError` when it is larger than a frame may be."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"{type(message).__name__}: {len(body)} bytes is more than a local message may have")
    if len(fds) > MAX_FDS:
        raise ValueError(f"{type(message).__name__}: {len(fds)} descriptors is more than a message may carry")
    return _HEAD.pack(len(body), len(fds)) + body


class Frames:
    """Received bytes and descriptors in, messages out; owns the descriptors that no message has claimed yet."""

    def __init__(self, receives: Any) -> None:
        """`receives`: the tagged union of Structs that this end understands."""
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._bytes = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        """What one `recvmsg` gave. `PeerError` when the kernel had to drop descriptors."""
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % 4
                self._fds.extend(struct.unpack(f"{whole // 4}i", content[:whole]))
        if len(self._fds) > 2 * MAX_FDS:  # of the frame that is not whole yet, and of the next
            raise PeerError(f"descriptors: {len(self._fds)} came that no message announced")
        if flags & socket.MSG_CTRUNC:
            raise PeerError("descriptors: more arrived than a message may carry, or our limit of open files is reached")
        self._bytes += data

    def next(self) -> tuple[Any, list[int]] | None:
        """The next whole message and its descriptors (the caller's to close), or None when more bytes are needed."""
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
        """Close what was received and never claimed."""
        close_fds(self._fds)
        self._fds.clear()


class Channel:
    """One end of a local socket, for synchronous code.

    One thread may receive while others send. Every call has a deadline. After any error but a receive timeout the
    channel is closed, because the stream may stand in the middle of a frame.
    """

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        """Takes `sock` over. `receives`: the tagged union of Structs that may arrive."""
        sock.setblocking(False)
        self._sock = sock
        self.pid = _peer_pid(sock)
        """The process at the other end; 0 where it cannot be known."""
        self._frames = Frames(receives)
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._closed = False

    def send(self, message: msgspec.Struct, fds: Sequence[int] = (), *, timeout_s: float = 30.0) -> None:
        """Send `message` and duplicates of `fds` (the originals stay the caller's).

        Raises `ChannelClosed`, or `ChannelTimeout` when the other end does not take it (the channel is closed then).
        """
        frame = memoryview(pack(message, fds))
        deadline = time.monotonic() + timeout_s
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        with self._closing_on_error(ChannelTimeout), self._sending:
            while frame:
                self._wait(select.POLLOUT, deadline)
                with contextlib.suppress(BlockingIOError):
                    frame = frame[self._sock.sendmsg([frame], rights) :]
                    rights = []

    def recv(self, timeout_s: float) -> tuple[Any, list[int]]:
        """The next message and its descriptors, which are the caller's to close.

        Raises `ChannelTimeout` (nothing is lost: call again), `ChannelClosed`, or `PeerError` when what came makes no
        sense (the channel is closed then).
        """
        deadline = time.monotonic() + timeout_s
        with self._closing_on_error(PeerError), self._receiving:
            self._check_open()
            while (found := self._frames.next()) is None:
                self._wait(select.POLLIN, deadline)
                with contextlib.suppress(BlockingIOError):
                    data, ancillary, flags, _ = self._sock.recvmsg(_READ_BYTES, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
                    self._frames.feed(data, ancillary, flags)
                    if not data:
                        raise ChannelClosed("the other process is gone")
            return found

    def _wait(self, what: int, deadline: float) -> None:
        self._check_open()
        poll = select.poll()
        poll.register(self._sock.fileno(), what)
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poll.poll(remaining * 1000):
            raise ChannelTimeout(f"nothing came from {process_named(self.pid)} in time")

    @property
    def closed(self) -> bool:
        """This end is closed."""
        return self._closed

    def hung_up(self) -> bool:
        """Whether the other end is closed, which the kernel does at once when its process dies, or this one is."""
        if self._closed:
            return True
        poll = select.poll()
        try:
            poll.register(self._sock.fileno(), 0)  # of a closed end the kernel tells unasked
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed by another thread meanwhile
            return True

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed("this end of the channel is closed")

    @contextlib.contextmanager
    def _closing_on_error(self, also: type[Exception]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            raise ChannelClosed(f"the other process is gone ({error.strerror or error})") from error
        except (ChannelClosed, also):
            self.close()
            raise
        finally:
            if self._closed:
                self._release()

    def close(self) -> None:
        """Close this end; a thread that waits in it is woken with `ChannelClosed`. Safe to call twice."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._release()

    def _release(self) -> None:
        """Close the descriptor unless a thread is using it; the last to leave does it then.

        Otherwise its number could be given to another file while a thread still polls it.
        """
        if not self._receiving.acquire(blocking=False):
            return
        try:
            if self._sending.acquire(blocking=False):
                self._sock.close()
                self._frames.close()
                self._sending.release()
        finally:
            self._receiving.release()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def process_named(pid: int) -> str:
    """A process from which nothing comes, as the system sees it: "process 12, which is stopped". 0: unknown."""
    if not pid:
        return "a process of another container"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        state = "X"
    seen = {
        "T": f", which is stopped (kill -CONT {pid} lets it go on)", "t": ", which a debugger holds",
        "D": ", which waits for a disk", "X": ", which has ended", "Z": ", which has ended",
    }  # fmt: skip
    return f"process {pid}{seen.get(state, '')}"


def _peer_pid(sock: Any) -> int:
    try:
        return struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
    except OSError:
        return 0


def check_path(path: Path) -> None:
    """`UsageError` when `path` is too long for a Unix socket."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise UsageError(
            f"The path of the socket {path} has {length} bytes, and the system allows {MAX_PATH_BYTES}. "
            "Choose a shorter folder with SWARM_HOME or --home."
        )


def check_same_user(sock: Any) -> None:
    """`ChannelClosed` unless the process at the other end runs as our own user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        raise ChannelClosed(f"the process at the other end runs as user {uid}, not as {os.getuid()}")


def connect(path: Path, receives: Any) -> Channel:
    """A channel to whoever serves `path`. Raises `ChannelClosed` when nobody does, `UsageError` for a long path."""
    check_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
        check_same_user(sock)
        return Channel(sock, receives)
    except OSError as error:
        sock.close()
        raise ChannelClosed(f"nobody answers at {path} ({error.strerror or error})") from error
    except ChannelClosed:
        sock.close()
        raise
