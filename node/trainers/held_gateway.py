"""A gateway whose address outlives the seed that serves it.

This process listens and hands the listening sockets to the seed, which accepts connections on them. While no seed is
up, this process accepts instead, and answers every request with 503 and Retry-After. So clients never meet a closed
port, and retry by themselves until the seed is back. Requests that the seed was answering when it ended are lost.
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
"""Connections that the kernel queues for each listening socket."""
LOOK_S: Final = 0.2
"""How often a seed that is down is dialed."""
ACCEPT_AGAIN_S: Final = 0.05
"""Pause after a failed accept, so that a lack of descriptors does not take a whole core."""
SOON_S: Final = 0.01
"""How long each look waits for a seed's answer, between two rounds of refusing clients."""
QUIET_S: Final = 3600.0
"""Timeout of a read while the seed serves. The seed sends nothing then, so it only bounds one call."""
RETRY_AFTER_S: Final = 2
"""What clients are told to wait: a restart of the seed takes seconds."""
MOST_CLIENTS: Final = 64
"""Clients answered at a time while the seed is down; the connection of one more is closed. Each takes a thread."""
CLIENT_WITHIN_S: Final = 2.0
"""A client that has not sent the head of its request within this is answered without it."""
MOST_READ_BYTES: Final = 1 << 20
"""Bytes of a request that are read before its connection is closed."""


class HeldGateway:
    """A gateway at `url`, which stays the same while the seed is down. Call `run` or `run_in_thread`."""

    def __init__(self, home: Path, request: OpenGateway, log_line: Callable[[str], None] = lambda text: None) -> None:
        """Listen, and have the seed of `home` serve. `log_line(text)`: called when the seed goes and when it comes
        back.

        Raises `UsageError` when the address is taken or the seed refuses, `SwarmDown` without a seed, `SwarmTimeout`.
        """
        self._home, self._log = home, log_line
        self._clients = threading.BoundedSemaphore(MOST_CLIENTS)
        self._listeners = _listen(request.host, request.port)
        self._request = replace(request, port=self._listeners[0].getsockname()[1], listening=True)
        self._closed = False
        self._channel: Channel | None = None
        try:
            with speaking("it was asked for a gateway"):
                self._channel = self._request_gateway()
                self.url = expect(self._channel, GatewayOpened, ANSWER_WITHIN_S)[0].url
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Serve until `close`. Raises `UsageError` or `PublishFailed` when a seed that came back refuses to serve."""
        while not self._closed:
            self._wait_until_down()
            if not self._closed:
                self._log(
                    f"The seed of {self._home} has ended. Requests are answered with 503 until it is started again."
                )
                self._refuse_until_back()

    def run_in_thread(self) -> None:
        """As `run`, in a daemon thread."""
        threading.Thread(target=self._run_quietly, name="swarm-gateway", daemon=True).start()

    def _run_quietly(self) -> None:
        with contextlib.suppress(OSError):  # closed by another thread
            try:
                self.run()
            except Exception as error:
                self._log(f"The gateway at {self.url} has ended: {error}")
                self.close()

    def close(self) -> None:
        """Stop serving. Safe to call twice, and from another thread."""
        self._closed = True
        if self._channel is not None:
            self._channel.close()
        for listener in self._listeners:
            listener.close()  # the seed closes its duplicates when the connection ends

    # ------------------------------------------------------------ while the seed serves

    def _request_gateway(self) -> Channel:
        """A connection on which the seed was asked to serve, and has not answered yet."""
        channel = dial(self._home)
        channel.send(self._request, [listener.fileno() for listener in self._listeners])
        return channel

    def _wait_until_down(self) -> None:
        """Return when the seed's connection ends."""
        assert self._channel is not None
        while True:
            try:
                expect(self._channel, GatewayOpened, QUIET_S)  # raises a refusal; the seed sends nothing else
            except ChannelTimeout:
                continue
            except (ChannelClosed, PeerError):
                self._channel.close()
                return

    # ------------------------------------------------------------ while the seed is down

    def _refuse_until_back(self) -> None:
        """Answer clients with 503 until a seed serves again, or `close`."""
        began, asked_at, channel = time.monotonic(), 0.0, None
        while not self._closed:
            self._refuse_clients()
            try:
                if channel is None:
                    channel, asked_at = self._request_gateway(), time.monotonic()
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
                self._log(f"The seed is back, after {time.monotonic() - began:.0f} s; {self.url} is served again.")
                return
        if channel is not None:
            channel.close()

    def _refuse_clients(self) -> None:
        """Answer the clients that connect within `LOOK_S`."""
        deadline = time.monotonic() + LOOK_S
        while (left := deadline - time.monotonic()) > 0 and not self._closed:
            for listener in self._with_clients(left):
                try:
                    client, _ = listener.accept()
                except OSError:  # the client has gone, the seed accepted it, or this process has no descriptor left
                    time.sleep(ACCEPT_AGAIN_S)
                    continue
                if self._clients.acquire(blocking=False):
                    threading.Thread(target=self._refuse, args=(client,), daemon=True).start()
                else:
                    client.close()

    def _with_clients(self, within_s: float) -> list[socket.socket]:
        """The listeners that a client has connected to; waits for one at most so long. None when they are closed."""
        poll = select.poll()  # unlike `select.select` it takes descriptors beyond 1023, which large trainers have
        found = {listener.fileno(): listener for listener in self._listeners}
        try:
            for descriptor in found:
                poll.register(descriptor, select.POLLIN)
            return [found[descriptor] for descriptor, _ in poll.poll(within_s * 1000.0)]
        except (OSError, ValueError):  # closed by another thread
            return []

    def _refuse(self, client: socket.socket) -> None:
        try:
            with client, contextlib.suppress(OSError):
                client.settimeout(CLIENT_WITHIN_S)
                head = _read(client, 1 << 16, b"\r\n\r\n")
                client.sendall(_UNAVAILABLE)
                client.shutdown(socket.SHUT_WR)
                # Closing a socket with unread bytes makes the kernel send RST, which would discard the answer.
                _read(client, MOST_READ_BYTES - head)
        finally:
            self._clients.release()


def _read(client: socket.socket, most: int, until: bytes | None = None) -> int:
    """Read and drop bytes until `until`, the end, `most` bytes, or `CLIENT_WITHIN_S`. Returns how many were read."""
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


def _unavailable() -> bytes:
    """The response to every request while the seed is down."""
    why = "The seed of this swarm is away, so no completion can be generated now. Try again in a moment."
    body = msgspec.json.encode({"error": {"message": why, "type": "server_error", "param": None, "code": "seed_away"}})
    head = (
        "HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", f"Content-Length: {len(body)}",
        f"Retry-After: {RETRY_AFTER_S}", "Connection: close", "", "",
    )  # fmt: skip
    return "\r\n".join(head).encode() + body


_UNAVAILABLE: Final = _unavailable()


def _listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of `host`, all at one port. Raises `UsageError` when one cannot be bound."""
    listeners: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in list(dict.fromkeys(found))[:MAX_FDS]:
            listener = socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], listeners[0].getsockname()[1] or port, *address[2:]))
            listener.listen(BACKLOG)
            listener.setblocking(False)
        return listeners
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise UsageError(
            f"The gateway cannot listen on {host}:{port} ({error.strerror or error}). Choose another port."
        ) from error
