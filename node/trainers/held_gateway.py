"""A gateway whose address outlives the seed that serves it.

This process listens and hands the listening sockets to the seed, which accepts connections on them. While no seed is
there, this process accepts instead and answers every request with 503 and Retry-After; so clients never meet a closed
port, and go on by themselves when the seed is back. What the seed was answering when it ended is lost with it.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from codec.errors import PeerError, UsageError
from node.ipc.channel import Channel, ChannelClosed, ChannelTimeout
from node.ipc.framing import MAX_FDS
from node.trainers.connection.seedlink import ANSWER_WITHIN_S, dial, expect, speaking
from node.trainers.errors import SwarmDown, SwarmTimeout
from node.trainers.messages import GatewayOpened, OpenGateway

__all__ = ["HeldGateway"]

BACKLOG: Final = 512
LOOK_S: Final = 0.2
"""How often a seed that is away is looked for."""
ACCEPT_AGAIN_S: Final = 0.05
SOON_S: Final = 0.01
QUIET_S: Final = 3600.0
"""The seed says nothing while it serves."""
RETRY_AFTER_S: Final = 2
MOST_CLIENTS: Final = 64
"""Answered at a time while the seed is away; one more is closed."""
CLIENT_WITHIN_S: Final = 2.0
"""A client that has not sent the head of its request by then is answered without it."""
MOST_READ_BYTES: Final = 1 << 20


class HeldGateway:
    """`url`: where clients ask, also while the seed is away. Call `run`, or `run_in_thread`."""

    def __init__(self, home: Path, asked: OpenGateway, say: Callable[[str], None] = lambda text: None) -> None:
        """Listens, and has the seed of `home` serve. `say(text)`: told when the seed goes and comes back.

        Raises `UsageError`, also when the address is taken; `SwarmDown` without a seed; `SwarmTimeout`.
        """
        self._home, self._say = home, say
        self._clients = threading.BoundedSemaphore(MOST_CLIENTS)
        self._listeners = _listen(asked.host, asked.port)
        self._asked = replace(asked, port=self._listeners[0].getsockname()[1], listening=True)
        self._over = False
        self._channel: Channel | None = None
        try:
            with speaking("it was asked for a gateway"):
                self._channel = self._ask()
                self.url = expect(self._channel, GatewayOpened, ANSWER_WITHIN_S)[0].url
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Until `close`. Raises `UsageError` or `PublishFailed` when a seed that came back refuses to serve."""
        while not self._over:
            self._until_away()
            if not self._over:
                self._say(
                    f"The seed of {self._home} has ended. Requests are answered with 503 until it is started again."
                )
                self._until_back()

    def run_in_thread(self) -> None:
        """As `run`, in a thread of its own."""
        threading.Thread(target=self._run_quietly, name="swarm-gateway", daemon=True).start()

    def _run_quietly(self) -> None:
        with contextlib.suppress(OSError):  # closed in the middle
            try:
                self.run()
            except Exception as error:
                self._say(f"The gateway at {self.url} has ended: {error}")
                self.close()

    def close(self) -> None:
        """Serve no more. Safe to call twice, and from another thread."""
        self._over = True
        if self._channel is not None:
            self._channel.close()
        for listener in self._listeners:
            listener.close()  # the seed closes its duplicate when the connection ends

    # ------------------------------------------------------------ while the seed serves

    def _ask(self) -> Channel:
        """A connection over which the seed was asked, and has not answered yet."""
        channel = dial(self._home)
        channel.send(self._asked, [listener.fileno() for listener in self._listeners])
        return channel

    def _until_away(self) -> None:
        assert self._channel is not None
        while True:
            try:
                expect(self._channel, GatewayOpened, QUIET_S)  # a refusal is raised; nothing else is said
            except ChannelTimeout:
                continue
            except (ChannelClosed, PeerError):
                self._channel.close()
                return

    # ------------------------------------------------------------ while it is away

    def _until_back(self) -> None:
        began, asked_at, channel = time.monotonic(), 0.0, None
        while not self._over:
            self._refuse_clients()
            try:
                if channel is None:
                    channel, asked_at = self._ask(), time.monotonic()
                expect(channel, GatewayOpened, SOON_S)
            except ChannelTimeout:
                if channel is None or time.monotonic() - asked_at < ANSWER_WITHIN_S:
                    continue
                channel.close()
                channel = None
            except (ChannelClosed, PeerError, SwarmDown, SwarmTimeout):
                if channel is not None:
                    channel.close()
                channel = None
            else:
                self._channel = channel
                self._say(f"The seed is back, after {time.monotonic() - began:.0f} s; {self.url} is served again.")
                return
        if channel is not None:
            channel.close()

    def _refuse_clients(self) -> None:
        """Whoever connects within `LOOK_S`."""
        deadline = time.monotonic() + LOOK_S
        while (left := deadline - time.monotonic()) > 0 and not self._over:
            try:
                ready, _, _ = select.select(self._listeners, (), (), left)
            except (OSError, ValueError):  # closed by another thread
                return
            for listener in ready:
                try:
                    client, _ = listener.accept()
                except OSError:  # gone already, the seed was sooner, or this process has no descriptor left
                    time.sleep(ACCEPT_AGAIN_S)
                    continue
                if self._clients.acquire(blocking=False):
                    threading.Thread(target=self._refuse, args=(client,), daemon=True).start()
                else:
                    client.close()

    def _refuse(self, client: socket.socket) -> None:
        try:
            with client, contextlib.suppress(OSError):
                client.settimeout(CLIENT_WITHIN_S)
                head = _read(client, 1 << 16, b"\r\n\r\n")
                client.sendall(_AWAY)
                client.shutdown(socket.SHUT_WR)
                # What is not read when a socket is closed makes the kernel take the answer back (RST).
                _read(client, MOST_READ_BYTES - head)
        finally:
            self._clients.release()


def _read(client: socket.socket, most: int, until: bytes | None = None) -> int:
    """Read and forget until `until`, the end, `most` bytes, or `CLIENT_WITHIN_S`; how many bytes it was."""
    deadline, count, end = time.monotonic() + CLIENT_WITHIN_S, 0, b""
    while count < most and (left := deadline - time.monotonic()) > 0:
        client.settimeout(left)
        try:
            more = client.recv(1 << 16)
        except TimeoutError:
            break
        count += len(more)
        end = end[-8:] + more
        if not more or (until is not None and until in end):
            break
    client.settimeout(CLIENT_WITHIN_S)
    return count


def _away() -> bytes:
    why = "The seed of this swarm is away, so nothing can be drawn now. Try again in a moment."
    body = msgspec.json.encode({"error": {"message": why, "type": "server_error", "param": None, "code": "seed_away"}})
    head = (
        "HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", f"Content-Length: {len(body)}",
        f"Retry-After: {RETRY_AFTER_S}", "Connection: close", "", "",
    )  # fmt: skip
    return "\r\n".join(head).encode() + body


_AWAY: Final = _away()


def _listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of `host`, all at one port. Raises `UsageError`."""
    made: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in list(dict.fromkeys(found))[:MAX_FDS]:
            listener = socket.socket(family, kind, protocol)
            made.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], made[0].getsockname()[1] or port, *address[2:]))
            listener.listen(BACKLOG)
            listener.setblocking(False)
        return made
    except OSError as error:
        for listener in made:
            listener.close()
        raise UsageError(
            f"The gateway cannot listen on {host}:{port} ({error.strerror or error}). Choose another port."
        ) from error
