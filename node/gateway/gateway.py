"""The gateway as its seed runs it: address, name, key, and how much it takes."""

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from codec.errors import UsageError
from node.gateway.app import App
from node.gateway.counter import Counter
from node.gateway.http import Limits, serve
from node.gateway.text import Text
from node.ledger.service import LedgerService

__all__ = ["Gateway", "GatewayConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What a person may choose. Raises `UsageError` for a gateway that the world could use unasked."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    name: str = "policy"
    """What clients call the model."""
    key: str = ""
    """What clients must give as API key; empty: nothing."""
    max_lag: int = 1
    """A token may be this many versions older than the newest when it is answered with."""
    most: int = 1024
    """Sequences in flight; the next request gets 429."""
    answer_within_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError("--port: 0 to 65535")
        if not 1 <= self.most <= 65536:
            raise UsageError("--most: 1 to 65536 sequences in flight")
        if not 0 <= self.max_lag <= 1024:
            raise UsageError("--max-lag: 0 to 1024")
        if not self.name or len(self.name) > 256:
            raise UsageError("--name: 1 to 256 characters")
        if not self.key and not _loopback(self.host):
            raise UsageError(
                f"Whoever reaches {self.host} could use the swarm: give a key (SWARM_GATEWAY_KEY, or --api-key), "
                "or listen on 127.0.0.1 only."
            )


class Gateway:
    """`files()`: the base's small files, by name. `head()`: (epoch, version)."""

    def __init__(
        self,
        ledger: LedgerService,
        files: Callable[[], Mapping[str, bytes]],
        head: Callable[[], tuple[int, int]],
        config: GatewayConfig,
    ) -> None:
        self._ledger, self._files, self._head, self._config = ledger, files, head, config
        self.url = ""

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `started` with the URL that clients use. Raises `UsageError`."""
        config = self._config
        text = await trio.to_thread.run_sync(lambda: Text(self._files()))
        counter = Counter(self._ledger, max_lag=config.max_lag, most=config.most)
        app = App(config.name, text, counter, self._head, key=config.key, answer_within_s=config.answer_within_s)
        limits = Limits(connections=2 * config.most)
        async with trio.open_nursery() as nursery:
            await nursery.start(counter.run)
            try:
                port = await nursery.start(serve, app, config.host, config.port, limits)
            except OSError as error:
                raise UsageError(
                    f"The gateway cannot listen on {config.host}:{config.port} ({error.strerror or error}). "
                    "Choose another port."
                ) from error
            host = f"[{config.host}]" if ":" in config.host else config.host
            self.url = f"http://{host}:{port}/v1"
            task_status.started(self.url)


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
