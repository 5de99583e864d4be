"""The driver's connections to a vLLM: its API server (the front) and its worker processes (the ranks).

Synchronous, on threads: one accepts connections, one for each connection receives, and a caller waits for the answer
that has its request's number.
"""

import contextlib
import itertools
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, Final, TypeVar

from codec.errors import PeerError
from node.engines.base import EngineError
from node.engines.vllm.plugin.swarm_vllm.messages import (
    Failed,
    FromDriver,
    FromPlugin,
    Front,
    Loader,
    Rank,
    Told,
)
from node.ipc.channel import Channel, ChannelClosed, ChannelTimeout, close_fds
from node.ipc.sockets import bind_socket, check_path, check_same_user, remove_socket

__all__ = ["Listener", "PluginFailed", "PluginLink", "wait"]

WAKE_S: Final = 3600.0
"""Seconds that one receive waits. `Channel.recv` needs a deadline; the receiving thread simply tries again."""
SEND_WITHIN_S: Final = 60.0
"""Seconds for a process of vLLM's to take a message, or to send its first one."""
BACKLOG: Final = 64
"""Connections that wait to be accepted: every rank of a vLLM connects when it starts."""

AnswerT = TypeVar("AnswerT")
OnProgress = Callable[[Told], None]


class PluginFailed(EngineError):
    """vLLM could not carry out a request. `touched`: its live weights may be a mix of versions, and it has stopped."""

    def __init__(self, why: str, touched: bool) -> None:
        super().__init__(why)
        self.touched = touched


class PluginLink:
    """One connected process of vLLM's. `hello`: its first message."""

    def __init__(
        self, channel: Channel, hello: Front | Rank | Loader, on_lost: Callable[[str], None], program: str = "vLLM"
    ) -> None:
        """`on_lost(why)` is called from the receiving thread when the process is gone or sends an invalid message.

        `program`: what the user knows the engine as.
        """
        self._program = program
        self.hello = hello
        self._channel = channel
        self._on_lost = on_lost
        self._retired = False
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Any]] = {}
        self._on_progress: dict[int, OnProgress] = {}
        threading.Thread(target=self._receive, name=type(hello).__name__.lower(), daemon=True).start()

    def ask(
        self, make: Callable[[int], FromDriver], fds: Sequence[int] = (), on_progress: OnProgress | None = None
    ) -> Future[Any]:
        """Send `make(number)` and return a future of its answer, or of `PluginFailed`.

        `on_progress` is called from the receiving thread. Raises `EngineError` when vLLM is gone.
        """
        number = next(self._numbers)
        future: Future[Any] = Future()
        self._asked[number] = future
        if on_progress is not None:
            self._on_progress[number] = on_progress
        try:
            self._channel.send(make(number), fds, timeout_s=SEND_WITHIN_S)
        except (ChannelClosed, ChannelTimeout) as error:
            self._asked.pop(number, None)
            raise EngineError(f"{self._program} is gone: {error}") from error
        return future

    def get(
        self, make: Callable[[int], FromDriver], answer_type: type[AnswerT], within_s: float, fds: Sequence[int] = ()
    ) -> AnswerT:
        """The answer to `make(number)`. Raises `PluginFailed`; `EngineError` after `within_s` or when vLLM is gone."""
        return wait(self.ask(make, fds), answer_type, within_s)

    def _receive(self) -> None:
        why = "it closed the connection"
        try:
            while True:
                with contextlib.suppress(ChannelTimeout):
                    message, fds = self._channel.recv(WAKE_S)
                    close_fds(fds)
                    self._deliver(message)
        except (ChannelClosed, PeerError) as error:
            why = str(error)
        for future in list(self._asked.values()):
            future.set_exception(EngineError(f"{self._program} is gone: {why}"))
        self._asked.clear()
        if self._retired:
            return
        process = f"rank {self.hello.rank}" if isinstance(self.hello, Rank) else "API server"
        self._on_lost(f"{self._program}'s {process} is gone: {why}")

    def _deliver(self, message: FromPlugin) -> None:
        if isinstance(message, Front | Rank | Loader):
            return  # a first message sent twice: it answers nothing
        if isinstance(message, Told):
            if (on_progress := self._on_progress.get(message.number)) is not None:
                on_progress(message)
            return
        future = self._asked.pop(message.number, None)
        self._on_progress.pop(message.number, None)
        if future is None:
            return
        if isinstance(message, Failed):
            future.set_exception(PluginFailed(message.why, message.touched))
        else:
            future.set_result(message)

    def retire(self) -> None:
        """Close this end. The process may close its end from now on without being reported as lost."""
        self._retired = True
        self._channel.close()


def wait(future: Future[Any], answer_type: type[AnswerT], within_s: float) -> AnswerT:
    """A future's answer. Raises `PluginFailed`; `EngineError` when it is late or of another type."""
    try:
        answer = future.result(within_s)
    except FutureTimeout:
        raise EngineError(f"the engine did not answer within {within_s:.0f} s") from None
    if not isinstance(answer, answer_type):
        raise EngineError(f"the engine answered with {type(answer).__name__}")
    return answer


def _ignore_loss(why: str) -> None:
    """For loaders, which close the connection when they are done."""


class Listener:
    """The Unix socket that vLLM's processes connect to."""

    def __init__(self, path: Path, on_lost: Callable[[str], None], program: str = "vLLM") -> None:
        """`on_lost(why)`, `program`: see `PluginLink`. Raises `UsageError` for a path that is too long."""
        self._program = program
        check_path(path)
        remove_socket(path)
        self.path = path
        self._on_lost = on_lost
        self.on_loader: Callable[[PluginLink], None] | None = None
        """Called, in a thread of its own, with each worker process that loads its model, to give it its weights."""
        self._arrived: queue.Queue[PluginLink] = queue.Queue()
        self._links: weakref.WeakSet[PluginLink] = weakref.WeakSet()
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
            link = PluginLink(channel, hello, _ignore_loss)
            if (give_weights := self.on_loader) is not None:
                give_weights(link)
            else:
                link.retire()
        elif isinstance(hello, Front | Rank):
            link = PluginLink(channel, hello, self._on_lost, self._program)
            self._links.add(link)
            self._arrived.put(link)
        else:
            channel.close()

    def next(self, within_s: float) -> PluginLink:
        """The process that connects next. Raises `EngineError` when none does within `within_s`."""
        try:
            return self._arrived.get(timeout=within_s)
        except queue.Empty:
            raise EngineError(f"{self._program} did not connect within {within_s:.0f} s") from None

    def close(self) -> None:
        """Accept no more connections, remove the socket, and close the connections of the front and the ranks."""
        self._socket.close()
        remove_socket(self.path)
        for link in tuple(self._links):
            link.retire()
