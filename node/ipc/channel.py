"""One end of a local socket for synchronous code: trainers, engines and commands.

It needs neither trio nor libp2p; `node.ipc.async_channel` exchanges the same frames (`node.ipc.framing`) on trio.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from codec.errors import PeerError, SwarmError
from node.ipc.framing import ANCILLARY_BYTES, READ_BYTES, FrameReader, close_fds, encode_frame, encode_rights
from node.ipc.sockets import ChannelClosed, check_path, check_same_user, peer_pid, process_named

__all__ = ["Channel", "ChannelClosed", "ChannelTimeout", "close_fds", "connect"]


class ChannelTimeout(SwarmError):
    """The process at the other end of a local socket did not answer, or did not read, before the deadline."""


class Channel:
    """One end of a local socket, for synchronous code.

    One thread may receive while others send. Every call has a deadline. After any error but a receive timeout the
    channel is closed, because the stream may stand in the middle of a frame.
    """

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        """Takes ownership of `sock`. `receives`: the tagged union of Structs that may arrive."""
        sock.setblocking(False)
        self._sock = sock
        self.pid = peer_pid(sock)
        """The process at the other end; 0 where the kernel cannot say."""
        self._frames = FrameReader(receives)
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._closed = False

    def send(self, message: msgspec.Struct, fds: Sequence[int] = (), *, timeout_s: float = 30.0) -> None:
        """Send `message` and duplicates of `fds`; the caller keeps the originals.

        Raises `ChannelClosed`, or `ChannelTimeout` when the other end does not read (the channel is closed then).
        """
        frame = memoryview(encode_frame(message, fds))
        deadline = time.monotonic() + timeout_s
        rights = encode_rights(fds)
        with self._closing_on_error(ChannelTimeout), self._sending:
            while frame:
                self._wait_for(select.POLLOUT, deadline)
                with contextlib.suppress(BlockingIOError):
                    frame = frame[self._sock.sendmsg([frame], rights) :]
                    rights = []

    def recv(self, timeout_s: float) -> tuple[Any, list[int]]:
        """The next message and its descriptors, which the caller closes.

        Raises `ChannelTimeout` (nothing is lost: call again), `ChannelClosed`, or `PeerError` for an invalid frame (the
        channel is closed then).
        """
        deadline = time.monotonic() + timeout_s
        with self._closing_on_error(PeerError), self._receiving:
            self._check_open()
            while (found := self._frames.next_message()) is None:
                self._wait_for(select.POLLIN, deadline)
                with contextlib.suppress(BlockingIOError):
                    data, ancillary, flags, _ = self._sock.recvmsg(READ_BYTES, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
                    self._frames.feed(data, ancillary, flags)
                    if not data:
                        raise ChannelClosed("the other process is gone")
            return found

    def _wait_for(self, poll_events: int, deadline: float) -> None:
        self._check_open()
        poll = select.poll()
        poll.register(self._sock.fileno(), poll_events)
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poll.poll(remaining * 1000):
            raise ChannelTimeout(f"nothing came from {process_named(self.pid)} in time")

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._closed

    def hung_up(self) -> bool:
        """Whether either end is closed. The kernel closes the other end at once when its process dies."""
        if self._closed:
            return True
        poll = select.poll()
        try:
            poll.register(self._sock.fileno(), 0)  # POLLHUP and POLLERR are reported without being asked for
            return bool(poll.poll(0))
        except (OSError, ValueError):  # another thread has closed it meanwhile
            return True

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed("this end of the channel is closed")

    @contextlib.contextmanager
    def _closing_on_error(self, also: type[Exception]) -> Iterator[None]:
        """Close the channel on `ChannelClosed`, `OSError` (which becomes `ChannelClosed`) and `also`."""
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
        """Close this end; threads that wait in `send` or `recv` get `ChannelClosed`. Safe to call twice."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._release()

    def _release(self) -> None:
        """Close the descriptor unless another thread is using it; then the last thread to leave closes it.

        A descriptor that is closed earlier could be reused by another file while a thread still polls it.
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


def connect(path: Path, receives: Any) -> Channel:
    """A channel to the process that serves `path`. `receives`: the tagged union of Structs that may arrive.

    Raises `ChannelClosed` when no process of this user serves it, `UsageError` when the path is too long.
    """
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
