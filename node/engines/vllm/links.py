"""The driver's connections to a vLLM: its API server (the front) and its worker processes (the ranks).

Synchronous, on threads: one accepts, one a connection receives, and whoever asks waits for the answer of its number.
"""

import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, Final, TypeVar

from codec.errors import PeerError
from node.engines.base import EngineError
from node.engines.vllm.plugin.swarm_vllm.messages import Failed, FromPlugin, Front, Loader, Rank, Told
from node.ipc.channel import Channel, ChannelClosed, ChannelTimeout, close_fds
from node.ipc.sockets import bind_socket, check_path, check_same_user, remove_socket

__all__ = ["Link", "Listener", "PluginFailed"]

WAKE_S: Final = 3600.0
SEND_WITHIN_S: Final = 60.0
BACKLOG: Final = 64
"""Connections that wait to be accepted: every rank of a vLLM connects when it starts."""

Answer = TypeVar("Answer")


class PluginFailed(EngineError):
    """vLLM could not do it, and says why. `touched`: live weights may be a mix, and it has stopped."""

    def __init__(self, why: str, touched: bool) -> None:
        super().__init__(why)
        self.touched = touched


class Link:
    """One connected process of vLLM's. `hello`: what it said first."""

    def __init__(self, channel: Channel, hello: Front | Rank | Loader, on_lost: Callable[[str], None]) -> None:
        """`on_lost(why)` is called, from the receiving thread, when the process is gone or makes no sense."""
        self.hello = hello
        self._channel = channel
        self._on_lost = on_lost
        self._retired = False
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Any]] = {}
        self._told: dict[int, Callable[[Told], None]] = {}
        threading.Thread(target=self._receive, name=type(hello).__name__.lower(), daemon=True).start()

    def ask(self, make: Callable[[int], Any], fds: Sequence[int] = (), told: Callable[[Told], None] | None = None):
        """Send `make(number)`; a future of its answer, or of `PluginFailed`. `told` hears of progress."""
        number = next(self._numbers)
        future: Future[Any] = Future()
        self._asked[number] = future
        if told is not None:
            self._told[number] = told
        try:
            self._channel.send(make(number), fds, timeout_s=SEND_WITHIN_S)
        except (ChannelClosed, ChannelTimeout) as error:
            self._asked.pop(number, None)
            raise EngineError(f"vLLM is gone: {error}") from error
        return future

    def get(self, make: Callable[[int], Any], kind: type[Answer], within_s: float, fds: Sequence[int] = ()) -> Answer:
        """The answer to `make(number)`. Raises `PluginFailed`, or `EngineError` after `within_s` or without vLLM."""
        return wait(self.ask(make, fds), kind, within_s)

    def _receive(self) -> None:
        why = "it hung up"
        try:
            while True:
                with contextlib.suppress(ChannelTimeout):
                    message, fds = self._channel.recv(WAKE_S)
                    close_fds(fds)
                    self._take(message)
        except (ChannelClosed, PeerError) as error:
            why = str(error)
        for future in list(self._asked.values()):
            future.set_exception(EngineError(f"vLLM is gone: {why}"))
        self._asked.clear()
        if self._retired:
            return
        who = f"rank {self.hello.rank}" if isinstance(self.hello, Rank) else "API server"
        self._on_lost(f"vLLM's {who} is gone: {why}")

    def _take(self, message: Any) -> None:
        if isinstance(message, Told):
            if (told := self._told.get(message.number)) is not None:
                told(message)
            return
        future = self._asked.pop(message.number, None)
        self._told.pop(message.number, None)
        if future is None:
            return
        if isinstance(message, Failed):
            future.set_exception(PluginFailed(message.why, message.touched))
        else:
            future.set_result(message)

    def retire(self) -> None:
        """This end is done with; the other may hang up."""
        self._retired = True
        self._channel.close()


def wait(future: "Future[Any]", kind: type[Answer], within_s: float) -> Answer:
    """A future's answer. Raises `PluginFailed`, or `EngineError` when it is late or of another kind."""
    try:
        answer = future.result(within_s)
    except FutureTimeout:
        raise EngineError(f"vLLM did not answer within {within_s:.0f} s") from None
    if not isinstance(answer, kind):
        raise EngineError(f"vLLM answered with {type(answer).__name__}")
    return answer


def _ignore(why: str) -> None:
    """A loader hangs up when it is done."""


class Listener:
    """The Unix socket that vLLM's processes connect to."""

    def __init__(self, path: Path, on_lost: Callable[[str], None]) -> None:
        """Raises `UsageError` for a path that is too long."""
        check_path(path)
        remove_socket(path)
        self.path = path
        self._on_lost = on_lost
        self.on_loader: Callable[[Link], None] | None = None
        """Gives its weights to a worker process that loads its model; called from a thread of its own."""
        self._arrived: queue.Queue[Link] = queue.Queue()
        self._socket = bind_socket(path, BACKLOG)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            check_same_user(sock)
            channel = Channel(sock, FromPlugin)
            hello, fds = channel.recv(SEND_WITHIN_S)
            close_fds(fds)
        except (ChannelClosed, ChannelTimeout, PeerError):
            sock.close()
            return
        if isinstance(hello, Loader):
            link = Link(channel, hello, _ignore)
            if (serve := self.on_loader) is not None:
                serve(link)
            else:
                link.retire()
        elif isinstance(hello, Front | Rank):
            self._arrived.put(Link(channel, hello, self._on_lost))
        else:
            channel.close()

    def next(self, within_s: float) -> Link:
        """Whoever connects next. Raises `EngineError` when nobody does."""
        try:
            return self._arrived.get(timeout=within_s)
        except queue.Empty:
            raise EngineError(f"vLLM did not connect within {within_s:.0f} s") from None

    def close(self) -> None:
        self._socket.close()
        remove_socket(self.path)
