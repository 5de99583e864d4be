"""The gateway as the seed runs it: builds its parts from a `GatewayConfig`, and listens."""

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import trio

from codec.errors import UsageError
from node.gateway.app import App
from node.gateway.clients import Clients
from node.gateway.request_tracker import RequestTracker
from node.gateway.text import Text
from node.http.messages import HttpLimits
from node.http.server import serve
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
    ) -> None:
        """`files()`: the base checkpoint's small files, by name. `head()`: the newest (epoch, version). `listening`:
        sockets of the process that asked for this gateway, which listen at its address already. `keys`: the file of
        the clients' keys with quotas; it may not exist."""
        self._listening, self._keys = listening, keys
        self._ledger, self._files, self._head, self._config = ledger, files, head, config
        self.url = ""

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `started` with the URL for clients. Raises `UsageError`."""
        config = self._config
        text = await trio.to_thread.run_sync(lambda: Text(self._files()))
        clients = Clients(self._keys, config.api_key)
        tracker = RequestTracker(self._ledger, max_lag=config.max_lag, most=config.in_flight)
        exact = not config.inexact_seeds
        app = App(
            config.model_name, text, tracker, self._head,
            adapters=lambda: self._ledger.adapters, clients=clients, exact_seeds=exact,
        )  # fmt: skip
        self._ledger.clients[self] = clients.status
        try:
            await self._serve(app, tracker, task_status)
        finally:
            del self._ledger.clients[self]

    async def _serve(self, app: App, tracker: RequestTracker, task_status: trio.TaskStatus[str]) -> None:
        config = self._config
        limits = HttpLimits(connections=2 * config.in_flight)
        async with trio.open_nursery() as nursery:
            await nursery.start(tracker.run)
            try:
                port = await nursery.start(
                    partial(serve, app, config.host, config.port, limits, app.check, listening=self._listening)
                )
            except OSError as error:
                raise UsageError(
                    f"The gateway cannot listen on {config.host}:{config.port} ({error.strerror or error}). "
                    "Choose another port."
                ) from error
            host = f"[{config.host}]" if ":" in config.host else config.host
            self.url = f"http://{host}:{port}/v1"
            task_status.started(self.url)
