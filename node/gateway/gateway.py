"""The gateway as the seed runs it: builds its parts, and answers the requests of a front, or listens itself."""

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import trio

from codec.errors import UsageError
from node.gateway.admission import Admission
from node.gateway.app import App
from node.gateway.clients import Clients
from node.gateway.front.backend import Backend
from node.gateway.request_tracker import RequestTracker
from node.gateway.text import Text
from node.http.messages import HttpLimits
from node.http.server import serve
from node.ipc.async_channel import AsyncChannel
from node.ledger.service import LedgerService
from node.settings.config import GatewayConfig

__all__ = ["Gateway"]


class Gateway:
    """An OpenAI-compatible endpoint over `ledger`."""

    def __init__(
        self,
        ledger: LedgerService,
        files: Callable[[], Mapping[str, bytes]],
        head: Callable[[], tuple[int, int]],
        config: GatewayConfig,
        listening: Sequence[socket.socket] = (),
        keys: Path | None = None,
        front: AsyncChannel | None = None,
    ) -> None:
        """`files()`: the base checkpoint's small files, by name. `head()`: the newest (epoch, version). `keys`: the
        file of the clients' keys with quotas; it may not exist. `front`: to the process that listens, and sends the
        requests as `ToSeed`; None: this process listens. `listening`: sockets that listen at the address already, from
        a front of an older release."""
        self._listening, self._keys, self._front = listening, keys, front
        self._ledger, self._files, self._head, self._config = ledger, files, head, config
        self.url = ""

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, or the front ends; `started` with the URL for clients. Raises `UsageError`."""
        config = self._config
        text = await trio.to_thread.run_sync(lambda: Text(self._files()))
        clients = Clients(self._keys, config.api_key)
        admission = Admission(clients)
        tracker = RequestTracker(self._ledger, max_lag=config.max_lag, most=config.in_flight)
        exact = not config.inexact_seeds
        app = App(
            config.model_name, text, tracker, self._head,
            adapters=lambda: self._ledger.adapters, admission=admission, exact_seeds=exact, images=config.images,
        )  # fmt: skip
        self._ledger.clients[self] = clients.status
        try:
            await self._serve(app, admission, tracker, task_status)
        finally:
            del self._ledger.clients[self]

    async def _serve(
        self, app: App, admission: Admission, tracker: RequestTracker, task_status: trio.TaskStatus[str]
    ) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(tracker.run)
            if self._front is None:
                self.url = self._config.url_at(await nursery.start(self._listen, app, admission))
                task_status.started(self.url)
            else:
                self.url = self._config.url_at(self._config.port)
                task_status.started(self.url)
                await Backend(self._front, app, admission.check).run()
                nursery.cancel_scope.cancel()

    async def _listen(
        self, app: App, admission: Admission, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve clients until cancelled; `started` with the port."""
        config, limits = self._config, HttpLimits(connections=2 * self._config.in_flight)
        try:
            await serve(
                app, config.host, config.port, limits, admission.check,
                listening=self._listening, task_status=task_status,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(
                f"The gateway cannot listen on {config.host}:{config.port} ({error.strerror or error}). "
                "Choose another port."
            ) from error
