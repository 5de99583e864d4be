"""The frames of `node.ipc.channel` on trio: for the swarm's own processes (seed, node)."""

import contextlib
import fcntl
import logging
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from codec.errors import PeerError, UsageError
from node.ipc.channel import MAX_FDS, ChannelClosed, Frames, check_path, check_same_user, pack
from swarm.guard import Source, guarded

__all__ = ["AsyncChannel", "serve"]

_READ_BYTES: Final = 1 << 18
_ANCILLARY: Final = socket.CMSG_SPACE(MAX_FDS * struct.calcsize("i"))
MOST: Final = 64
"""Connections to one socket at a time: people, programs and an engine's processes of one user."""
_log = logging.getLogger(__name__)


class AsyncChannel:
    """One end of a local socket on trio. One task may receive while others send; deadlines are the caller's.

    A cancelled `recv` loses nothing. A `send` cancelled halfway closes the channel, because nobody could make sense of
    what would follow.
    """

    def __init__(self, sock: trio.socket.SocketType, receives: Any) -> None:
        """Takes `sock` over. `receives`: the tagged union of Structs that may arrive."""
        self._sock = sock
        self._frames = Frames(receives)
        self._sending = trio.Lock()
        self._receiving = trio.Lock()

    @classmethod
    def adopt(cls, sock: socket.socket, receives: Any) -> "AsyncChannel":
        """A channel over a plain connected socket (one end of a `socketpair`, say)."""
        return cls(trio.socket.from_stdlib_socket(sock), receives)

    async def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send `message` and duplicates of `fds` (the originals stay the caller's). Raises `ChannelClosed`."""
        frame = memoryview(pack(message, fds))
        async with self._sending:
            sent = 0
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
            try:
                while sent < len(frame):
                    sent += await self._sock.sendmsg([frame[sent:]], rights)
                    rights = []
            except (OSError, trio.ClosedResourceError) as error:
                self.close()
                raise ChannelClosed(f"the other process is gone ({error})") from error
            except trio.Cancelled:
                if sent:
                    self.close()
                raise

    async def recv(self) -> tuple[Any, list[int]]:
        """The next message and its descriptors, which are the caller's to close.

        Raises `ChannelClosed`, or `PeerError` when what came makes no sense (the channel is closed then).
        """
        async with self._receiving:
            try:
                while (found := self._frames.next()) is None:
                    data, ancillary, flags, _ = await self._sock.recvmsg(
                        _READ_BYTES, _ANCILLARY, socket.MSG_CMSG_CLOEXEC
                    )
                    self._frames.feed(data, ancillary, flags)
                    if not data:
                        raise ChannelClosed("the other process is gone")
                return found
            except (OSError, trio.ClosedResourceError) as error:
                self.close()
                raise ChannelClosed(f"the other process is gone ({error})") from error
            except (ChannelClosed, PeerError):
                self.close()
                raise

    def close(self) -> None:
        """Close this end; tasks waiting in it get `ChannelClosed`. Safe to call twice."""
        self._sock.close()
        self._frames.close()


Conversation = Callable[[AsyncChannel], Awaitable[None]]


def _no_farewell(why: str) -> msgspec.Struct | None:
    return None


async def serve(
    path: Path,
    conversation: Conversation,
    *,
    receives: Any,
    source: Source,
    most: int = MOST,
    farewell: Callable[[str], msgspec.Struct | None] = _no_farewell,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `path` until cancelled: `conversation(channel)` runs in a task of its own for each process that connects.

    `started()` once processes can connect. A socket file that a dead process left is replaced. At most `most` processes
    are connected at a time; one more is closed. A conversation runs under the guard of `source`, so whatever ends it
    ends it alone; one that a bug of ours ends hears `farewell(why)`, if that is a message. Raises `UsageError` when the
    path is too long, is not a socket, or is served by another living process; and one that a conversation raises.
    """
    served = _Served(conversation, receives, source, farewell)
    check_path(path)
    with _lock_of(path), trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        _remove_stale(path)
        await listener.bind(str(path))
        try:
            os.chmod(path, 0o600)  # nobody can connect before listen()
            listener.listen(16)
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    sock, _ = await listener.accept()
                    if len(nursery.child_tasks) >= most:
                        _log.info("local connection closed: %d are open", most)
                        sock.close()
                        continue
                    nursery.start_soon(served.converse, sock)
        finally:
            _remove(path)


@dataclass(frozen=True, slots=True)
class _Served:
    """See `serve`."""

    conversation: Conversation
    receives: Any
    source: Source
    farewell: Callable[[str], msgspec.Struct | None]

    async def converse(self, sock: trio.socket.SocketType) -> None:
        """Where the errors of one connection end: it is dropped, the others go on."""
        channel = AsyncChannel(sock, self.receives)
        try:
            with guarded(self.source, "a local process") as outcome:
                check_same_user(sock)
                await self.conversation(channel)
            if outcome.error is not None:
                _log.info("local connection ended: %s", outcome.why)
            if outcome.is_rule_broken and not isinstance(outcome.error, PeerError):
                await self._say_farewell(channel)
        finally:
            channel.close()

    async def _say_farewell(self, channel: AsyncChannel) -> None:
        last = self.farewell("This is a bug of swarm-node: the log of the process that you asked has more.")
        if last is not None:
            with trio.move_on_after(1.0), contextlib.suppress(ChannelClosed):
                await channel.send(last)


@contextlib.contextmanager
def _lock_of(path: Path):
    """Hold `path.lock` while serving. Whoever holds it owns the socket file; the kernel lets go when we die."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"Another process already serves {path}. Stop it first, or choose another folder with SWARM_HOME."
            ) from error
        yield
    finally:
        os.close(fd)


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} exists and is not a socket. Move it away, or choose another folder with SWARM_HOME.")
    _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
