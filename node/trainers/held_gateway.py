"""A gateway whose address, and whose requests, outlive the seed that answers them.

This process listens, and sends each request to the seed (`node.gateway.front`). While no seed is up, new requests are
answered with 503 and Retry-After, and requests that a seed had before it ended wait for the next one. So clients never
meet a closed port, and each request is answered once.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import trio
from msgspec.structs import replace

from codec.errors import PeerError, UsageError
from node.ipc.channel import Channel, ChannelClosed, ChannelTimeout
from node.settings.client_keys import KEYS_FILE
from node.settings.extras import how_to_get, lacking
from node.trainers.connection.seedlink import ANSWER_WITHIN_S, dial, expect, speaking
from node.trainers.errors import SwarmDown, SwarmTimeout
from node.trainers.messages import GatewayOpened, OpenGateway

if TYPE_CHECKING:
    from node.gateway.front.front import Front

__all__ = ["HeldGateway"]

BACKLOG: Final = 512
"""Connections that the kernel queues for each listening socket."""
MOST_ADDRESSES: Final = 4
"""Addresses of one host that are listened on."""
REFUSAL_WITHIN_S: Final = 2.0
"""A seed that stops serving, but has not ended, says why within this."""
LOOK_S: Final = 0.2
"""How often a seed that is down is dialed."""


class _Seed(NamedTuple):
    """A seed that serves. `channel`: it serves until this ends. `requests`: where it receives them. `url`: for
    clients."""

    channel: Channel
    requests: socket.socket
    url: str

    def close(self) -> None:
        self.channel.close()
        self.requests.close()


class HeldGateway:
    """A gateway at `url`, which stays the same while the seed is down. Call `run` or `run_in_thread`."""

    def __init__(self, home: Path, request: OpenGateway, log_line: Callable[[str], None] = lambda text: None) -> None:
        """Listen, and have the seed of `home` serve. `log_line(text)`: called when the seed goes and when it comes
        back.

        Raises `UsageError` when the address is taken, the seed refuses or packages are missing, `SwarmDown` without a
        seed, `SwarmTimeout`.
        """
        if missing := lacking(("h11",)):
            raise UsageError(f"A gateway needs {' and '.join(missing)} where it listens: {how_to_get('gateway')}")
        self._home, self._log = home, log_line
        self._listeners = _listen(request.host, request.port)
        self._request = replace(request, port=self._listeners[0].getsockname()[1], requests=True)
        self._closed = False
        self._running: tuple[trio.lowlevel.TrioToken, trio.CancelScope] | None = None
        self._starting = threading.Lock()
        """Held while `run` begins, and by `close`."""
        self._first: _Seed | None = None
        try:
            with speaking("it was asked for a gateway"):
                self._first = self._ask_seed()
                self.url = self._first.url
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Serve until `close`. Raises `UsageError` or `PublishFailed` when a seed that came back refuses to serve."""
        try:
            trio.run(self._run)
        except BaseExceptionGroup as errors:
            raise _single(errors) from errors

    def run_in_thread(self) -> None:
        """As `run`, in a daemon thread."""
        threading.Thread(target=self._run_and_log, name="swarm-gateway", daemon=True).start()

    def _run_and_log(self) -> None:
        try:
            self.run()
        except Exception as error:
            self._log(f"The gateway at {self.url} has ended: {error}")
            self.close()

    def close(self) -> None:
        """Stop serving. Safe to call twice, and from another thread."""
        with self._starting:
            self._closed = True
            if self._running is not None:
                token, scope = self._running
                with contextlib.suppress(trio.RunFinishedError):
                    token.run_sync_soon(scope.cancel)
                return
        for listener in self._listeners:
            listener.close()
        if self._first is not None:
            self._first.close()

    # ------------------------------------------------------------ in trio

    async def _run(self) -> None:
        from node.gateway.admission import Admission
        from node.gateway.clients import Clients
        from node.gateway.front.front import BODIES_BYTES, Front
        from node.http.messages import HttpLimits
        from node.http.server import serve
        from swarm.transport.connection.ports import descriptors

        descriptors()  # one for each client
        with trio.CancelScope() as scope:
            with self._starting:
                if self._closed:
                    return
                self._running = trio.lowlevel.current_trio_token(), scope
            front, asked = Front(), self._request
            admission = Admission(Clients(self._home / KEYS_FILE, asked.api_key))
            limits = HttpLimits(connections=2 * asked.in_flight, bodies_bytes=BODIES_BYTES)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow_seeds, front)
                await serve(front, asked.host, asked.port, limits, admission.check, listening=self._listeners)

    async def _follow_seeds(self, front: "Front") -> None:
        """Have one seed after the other answer the clients of `front`."""
        seed, self._first = self._first, None
        while seed is not None:
            try:
                await front.serve_seed(seed.requests)
                await trio.to_thread.run_sync(self._raise_refusal, seed, abandon_on_cancel=True)
            finally:
                seed.close()
            self._log(f"The seed of {self._home} has ended. New requests get 503 until it is started again.")
            began = trio.current_time()
            seed = await self._next_seed()
            self._log(f"The seed is back, after {trio.current_time() - began:.0f} s; {self.url} is served again.")

    def _raise_refusal(self, seed: _Seed) -> None:
        """Raises `UsageError` or `PublishFailed` if the seed has said why it stopped serving."""
        with contextlib.suppress(ChannelClosed, ChannelTimeout, PeerError):
            expect(seed.channel, GatewayOpened, REFUSAL_WITHIN_S)

    async def _next_seed(self) -> _Seed:
        while True:
            try:
                return await trio.to_thread.run_sync(self._ask_seed, abandon_on_cancel=True)
            except (ChannelClosed, ChannelTimeout, PeerError, SwarmDown, SwarmTimeout):
                await trio.sleep(LOOK_S)

    def _ask_seed(self) -> _Seed:
        """Have the seed serve. Raises as `dial` and `expect` do."""
        channel = dial(self._home)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                channel.send(self._request, [theirs.fileno()])
            url = expect(channel, GatewayOpened, ANSWER_WITHIN_S)[0].url
        except BaseException:
            channel.close()
            ours.close()
            raise
        return _Seed(channel, ours, url)


def _single(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """One of the errors of a nursery: an interrupt, if there is one."""
    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.append(_single(error) if isinstance(error, BaseExceptionGroup) else error)
    return min(flat, key=lambda error: isinstance(error, Exception))


def _listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of `host`, all at one port. Raises `UsageError` when one cannot be bound."""
    listeners: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in list(dict.fromkeys(found))[:MOST_ADDRESSES]:
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
