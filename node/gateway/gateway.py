"""The gateway as its seed runs it: address, name, key, and how much it takes."""

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import trio

from codec.errors import UsageError
from node.gateway.app import App
from node.gateway.http import Limits, serve
from node.gateway.request_tracker import RequestTracker
from node.gateway.text import Text
from node.ledger.service import LedgerService
from node.settings.config import GatewayConfig

__all__ = ["Gateway"]


class Gateway:
    """`files()`: the base's small files, by name. `head()`: (epoch, version)."""

    def __init__(
        self,
        ledger: LedgerService,
        files: Callable[[], Mapping[str, bytes]],
        head: Callable[[], tuple[int, int]],
        config: GatewayConfig,
        listening: Sequence[socket.socket] = (),
    ) -> None:
        """`listening`: sockets of the process that asked for this gateway, which listen at its address."""
        self._listening = listening
        self._ledger, self._files, self._head, self._config = ledger, files, head, config
        self.url = ""

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `started` with the URL that clients use. Raises `UsageError`."""
        config = self._config
        text = await trio.to_thread.run_sync(lambda: Text(self._files()))
        counter = RequestTracker(self._ledger, max_lag=config.max_lag, most=config.in_flight)
        exact = not config.inexact_seeds
        app = App(config.model_name, text, counter, self._head, key=config.api_key, exact_seeds=exact)
        limits = Limits(connections=2 * config.in_flight)
        async with trio.open_nursery() as nursery:
            await nursery.start(counter.run)
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
