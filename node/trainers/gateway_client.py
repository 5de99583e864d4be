"""Asks `swarm-node gateway` for samples, for adapters of trainers, under asyncio or trio. Needs httpx.

What the gateway refuses for the moment is asked for again: 429 (it is full, or the key's quota is used up), 503 (its
seed restarts, or no node generates), and a connection that cannot be made or breaks. Each of these has a bound, and a
log line with the gateway's sentence.
"""

import time
from typing import Any, Final

import anyio
import httpx

from codec.errors import UsageError
from node.trainers.connection.patience import SAY_AT_LEAST_EVERY_S, log
from node.trainers.errors import SwarmDown, SwarmTimeout

__all__ = ["GatewayClient", "GatewayRefused"]

REPEATED_S: Final = {429: 3600.0, 503: 600.0}
"""The answers after which the gateway is asked again, and for how many seconds after the first such answer to a
request."""
UNREACHABLE_S: Final = 60.0
"""The gateway is tried again for so long after its connection could not be made, or broke."""
RETRY_S: Final = 1.0
"""Pause before the next try, if the gateway names none."""
LONGEST_RETRY_S: Final = 60.0
"""Upper bound of the pause that the gateway names."""


class GatewayRefused(UsageError):
    """The gateway does not answer a request. `status`: its HTTP status. `body`: its answer, JSON."""

    def __init__(self, status: int, body: bytes, why: str) -> None:
        super().__init__(f"The gateway answered {status}: {why}")
        self.status, self.body, self._why = status, body, why

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by Ray, on its way from an actor to verl."""
        return GatewayRefused, (self.status, self.body, self._why)


class GatewayClient:
    """A gateway. Use it from one event loop; it is an async context manager, whose end calls `close`."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 3600.0) -> None:
        """`url`: the gateway's, without /v1. `api_key`: one of its keys; empty: it has none. `timeout_s`: for one
        answer. Raises `UsageError` for what is no URL."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            is_http = httpx.URL(url).scheme in ("http", "https")
        except httpx.InvalidURL:
            is_http = False
        if not is_http:
            raise UsageError(f"{url!r} is no URL of a gateway: give one such as http://127.0.0.1:8000.")
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout_s)
        self._url, self._timeout_s = url, timeout_s
        self._repeated, self._said_at = 0, float("-inf")

    async def __aenter__(self) -> "GatewayClient":
        """Returns itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""
        await self.close()

    async def close(self) -> None:
        """Disconnect."""
        await self._client.aclose()

    async def draw(self, request: dict[str, Any], session: str = "") -> dict[str, Any]:
        """The first choice of the answer to a request at /v1/completions.

        `session`: what the turns of one conversation have in common, so that a node which has their prefix in its cache
        continues them; empty: the request has no such turns. Raises `GatewayRefused` with the gateway's sentence,
        `SwarmDown` when nothing answers at the gateway's URL for `UNREACHABLE_S`, and `SwarmTimeout` when an answer
        takes longer than `timeout_s`.
        """
        named = {"session_id": session} if session else {}
        return (await self._ask("POST", "/v1/completions", request | named))["choices"][0]

    async def newest_version(self) -> tuple[int, int]:
        """(epoch, version) of the newest sealed version. Raises as `draw`."""
        epoch, version = (await self._ask("GET", "/v1/models"))["data"][0]["version"]
        return epoch, version

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        refused_since: float | None = None
        unreachable_since: float | None = None
        while True:
            try:
                answer = await self._client.request(method, path, json=body)
            except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout):
                raise SwarmTimeout(
                    f"The gateway at {self._url} gave no answer within {self._timeout_s:.0f} s."
                ) from None
            except httpx.TransportError as error:
                now = time.monotonic()
                unreachable_since = now if unreachable_since is None else unreachable_since
                why = (
                    f"Nothing answers at the gateway's URL {self._url} ({str(error) or type(error).__name__}): start "
                    "swarm-node gateway on the seed's host, or correct the URL."
                )
                if now - unreachable_since >= UNREACHABLE_S:
                    raise SwarmDown(why) from None
                await self._pause(why, RETRY_S, UNREACHABLE_S)
                continue
            unreachable_since = None
            if not answer.is_error:
                return answer.json()
            why = _sentence(answer)
            now = time.monotonic()
            refused_since = now if refused_since is None else refused_since
            most_s = REPEATED_S.get(answer.status_code, 0.0)
            if now - refused_since >= most_s:
                raise GatewayRefused(answer.status_code, answer.content, why)
            await self._pause(f"The gateway answered {answer.status_code}: {why}", _retry_s(answer), most_s)

    async def _pause(self, why: str, pause_s: float, most_s: float) -> None:
        """Wait before the next try. The first refusal is logged at once, later ones once a minute."""
        self._repeated += 1
        now = time.monotonic()
        try:
            if now - self._said_at >= SAY_AT_LEAST_EVERY_S:
                self._said_at = now
                log.warning(
                    "%s Requests that are asked again: %d, each for at most %.0f s.", why, self._repeated, most_s
                )
            await anyio.sleep(pause_s)
        finally:
            self._repeated -= 1


def _sentence(answer: httpx.Response) -> str:
    """What a refusal says."""
    try:
        return str(answer.json()["error"]["message"])[:400]
    except (ValueError, KeyError, TypeError):
        return answer.text[:400]


def _retry_s(answer: httpx.Response) -> float:
    """The pause that a refusal asks for, in seconds."""
    try:
        asked_s = float(answer.headers.get("Retry-After", RETRY_S))
    except ValueError:  # a date
        return RETRY_S
    return min(max(asked_s, 0.0), LONGEST_RETRY_S) if asked_s == asked_s else RETRY_S
