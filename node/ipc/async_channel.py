"""One end of a local socket on trio, and the server of a socket file: for the swarm's own processes (seed, node).

It exchanges the same frames (`node.ipc.framing`) as `node.ipc.channel`.
"""

import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from codec.errors import PeerError
from node.ipc.framing import ANCILLARY_BYTES, READ_BYTES, FrameReader, encode_frame, encode_rights
from node.ipc.sockets import (
    ChannelClosed,
    bind_socket,
    check_path,
    check_same_user,
    lock_socket,
    peer_pid,
    remove_socket,
    remove_stale_socket,
)
from swarm.guard import Source, guarded

__all__ = ["AsyncChannel", "serve_socket"]

MAX_CONNECTIONS: Final = 64
"""Connections to one socket at a time. Its clients are the commands, programs and engine processes of one user."""
_BACKLOG: Final = 16
_FAREWELL_S: Final = 1.0
"""A last message to a client is dropped when the client does not read it within this."""
_log = logging.getLogger(__name__)


class AsyncChannel:
    """One end of a local socket on trio. One task may receive while others send; the caller sets deadlines.

    A cancelled `recv` loses nothing. A `send` that is cancelled halfway closes the channel, because the other end could
    not tell where the next frame begins.
    """

    def __init__(self, sock: trio.socket.SocketType, receives: Any) -> None:
        """Takes ownership of `sock`. `receives`: the tagged union of Structs that may arrive."""
        self._sock = sock
        self._frames = FrameReader(receives)
        self._sending = trio.Lock()
        self._receiving = trio.Lock()
        self.pid = peer_pid(sock)
        """The process at the other end; 0 where the kernel cannot say."""

    @classmethod
    def adopt(cls, sock: socket.socket, receives: Any) -> "AsyncChannel":
        """A channel over a connected socket of the standard library (one end of a `socketpair`, for example)."""
        return cls(trio.socket.from_stdlib_socket(sock), receives)

    async def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send `message` and duplicates of `fds`; the caller keeps the originals. Raises `ChannelClosed`."""
        frame = memoryview(encode_frame(message, fds))
        async with self._sending:
            sent = 0
            rights = encode_rights(fds)
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
        """The next message and its descriptors, which the caller closes.

        Raises `ChannelClosed`, or `PeerError` for an invalid frame (the channel is closed then).
        """
        async with self._receiving:
            try:
                while (found := self._frames.next_message()) is None:
                    data, ancillary, flags, _ = await self._sock.recvmsg(
                        READ_BYTES, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
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
        """Close this end; tasks that wait in `send` or `recv` get `ChannelClosed`. Safe to call twice."""
        self._sock.close()
        self._frames.close()


Conversation = Callable[[AsyncChannel], Awaitable[None]]


def _no_farewell(why: str) -> msgspec.Struct | None:
    return None


async def serve_socket(
    path: Path,
    conversation: Conversation,
    *,
    receives: Any,
    source: Source,
    max_connections: int = MAX_CONNECTIONS,
    farewell: Callable[[str], msgspec.Struct | None] = _no_farewell,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `path` until cancelled: `conversation(channel)` runs in a task of its own for each client process.

    `started()` is called once processes can connect. A socket file that a dead process left is replaced. A client
    beyond `max_connections` is disconnected at once.

    Each conversation runs under the guard of `source`: an error ends that connection and no other. When the cause is a
    bug of this program, the client is sent `farewell(why)`, unless that is None.

    Raises `UsageError` when the path is too long, is not a socket, or is served by another living process; and the
    `UsageError` of a conversation.
    """
    server = _Server(conversation, receives, source, farewell)
    check_path(path)
    with lock_socket(path):
        remove_stale_socket(path)
        with trio.socket.from_stdlib_socket(bind_socket(path, _BACKLOG)) as listener:
            try:
                async with trio.open_nursery() as nursery:
                    task_status.started()
                    while True:
                        sock, _ = await listener.accept()
                        if len(nursery.child_tasks) >= max_connections:
                            _log.info("local connection closed: %d are open", max_connections)
                            sock.close()
                            continue
                        nursery.start_soon(server.serve_client, sock)
            finally:
                remove_socket(path)


@dataclass(frozen=True, slots=True)
class _Server:
    """The arguments of `serve_socket` that each connection needs."""

    conversation: Conversation
    receives: Any
    source: Source
    farewell: Callable[[str], msgspec.Struct | None]

    async def serve_client(self, sock: trio.socket.SocketType) -> None:
        """Hold one conversation. Its errors end here; other connections continue."""
        channel = AsyncChannel(sock, self.receives)
        try:
            with guarded(self.source, "a local process") as outcome:
                check_same_user(sock)
                await self.conversation(channel)
            if outcome.error is not None:
                _log.info("local connection ended: %s", outcome.why)
            if outcome.is_rule_broken and not isinstance(outcome.error, PeerError):
                await self._send_farewell(channel)
        finally:
            channel.close()

    async def _send_farewell(self, channel: AsyncChannel) -> None:
        last = self.farewell("This is a bug of swarm-node: the log of the process that you asked has more.")
        if last is not None:
            with trio.move_on_after(_FAREWELL_S), contextlib.suppress(ChannelClosed):
                await channel.send(last)
