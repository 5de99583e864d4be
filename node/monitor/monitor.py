"""The HTTP endpoints of a swarm process: its page, its metrics and its health.

    GET /               the page: one file, no other host is asked for anything
    GET /api/status     the status now: what `swarm-node status --json` prints, a headline and findings
    GET /api/history    when the kept statuses were true (an hour at most), and tokens/s then
    GET /api/frame?at=  one of those
    GET /metrics        OpenMetrics text, or the older format for clients that do not accept that
    GET /healthz        200 while the process answers, also during a pause or a catch-up
    GET /readyz         200 when it holds the head, its engine is proven and its lease is fresh; else 503 and why

A monitor on a loopback address answers clients of this machine only, and no web page of another site: it refuses a
request whose Host is not a loopback name. On any other address every request but the last two needs the token, as
`Authorization: Bearer TOKEN` or `?token=TOKEN`. Nothing here changes anything in the swarm.
"""

import hmac
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version as installed_version
from importlib.resources import files
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

import msgspec
import structlog
import trio
from msgspec import UNSET

from codec.errors import UsageError
from node.http import HttpLimits, Request, RequestHead, Response, failure, json_response, serve
from node.monitor.findings import Finding, findings, headline
from node.monitor.health import Readiness
from node.monitor.history import History, Point
from node.monitor.observations import Observations
from node.settings.addresses import is_loopback
from node.status import query
from node.status.schema import SeedStatus, Status
from swarm.guard import Source as GuardSource
from swarm.guard import guarded
from swarm.transport.base import Unreachable

__all__ = ["Answer", "Monitor", "Source", "own_status", "serve_monitor", "status_of", "token_of"]

TOKEN_FILE: Final = "monitor.token"
"""In SWARM_HOME: the token of a monitor that is reached from other machines."""
SAMPLE_S: Final = 5.0
"""How often a status is kept for the history."""
MOST_SHARE: Final = 0.005
"""Of a core, for the history: in a swarm so large that a status takes long, statuses are kept less often."""
ASK_WITHIN_S: Final = 2.0
"""A page that waits longer for another process says that it does not answer."""
FRESH_S: Final = 0.5
"""A status is used again for requests within this time, so that many open pages cost as much as one."""
_LIMITS: Final = HttpLimits(body_bytes=1 << 10, connections=64)
"""Browsers open six connections each. No request has a body."""
_OPEN: Final = ("/healthz", "/readyz")
"""Paths that need no token: probes have none."""
_JSON: Final = msgspec.json.Encoder()

_log = structlog.get_logger(__name__)


class Seen(msgspec.Struct):
    """A status as the page shows it."""

    at: float
    """Unix time, s."""
    headline: str
    findings: list[Finding]
    status: Status | None
    """None: the process has not answered yet."""
    away: str = ""
    """Why the process does not answer now; empty: it does."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a source says. `away`: why the process does not answer now, and then `status` is the last one known."""

    status: Status | None
    away: str = ""


Source = Callable[[], Awaitable[Answer]]
"""The status of the process that is shown."""


def own_status(status: Callable[[], Status]) -> Source:
    """The source of a process that shows itself."""

    async def ask() -> Answer:
        await trio.lowlevel.checkpoint()
        return Answer(status())

    return ask


def status_of(home: Path) -> Source:
    """The source of a process that shows another one: that of `home`, which may be restarted meanwhile."""
    last: Status | None = None

    async def ask() -> Answer:
        nonlocal last
        try:
            last = await trio.to_thread.run_sync(partial(query.ask, home, within_s=ASK_WITHIN_S))
        except Unreachable as error:
            return Answer(last, str(error))
        return Answer(last)

    return ask


@cache
def _page() -> bytes:
    return (files("node.monitor") / "page.html").read_bytes()


def token_of(home: Path) -> str:
    """The token kept in `home`, made at the first use; its file can be read by its owner only."""
    path = home / TOKEN_FILE
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(24)
        path.touch(mode=0o600)
        path.write_text(token + "\n")
        return token


class Monitor:
    """Handles the requests of a monitor, and keeps its history."""

    def __init__(self, source: Source, *, token: str = "") -> None:
        """`token`: what clients must send; empty: only clients that name a loopback host are answered."""
        self._source = source
        self._token = token
        self._readiness = Readiness()
        self._observations = Observations()
        self._history = History()
        self._seen: Seen | None = None
        self._asking = trio.Lock()
        self._release = installed_version("swarm-node")

    def check(self, head: RequestHead) -> Response | None:
        """Judge a request by its head: None, or the refusal."""
        if head.method not in ("GET", "HEAD"):
            return failure(405, "A monitor only shows things: GET, please.")
        if head.path in _OPEN:
            return None
        if self._token:
            given = head.headers.get("authorization", "").removeprefix("Bearer ").strip()
            given = given or parse_qs(head.query).get("token", [""])[-1]
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                return failure(401, "Wrong or missing token. The process logs the address that contains it.")
        elif not _names_loopback(head.headers.get("host", "")):
            return failure(403, "This monitor answers only at a loopback address, 127.0.0.1 for example.")
        return None

    async def __call__(self, request: Request) -> Response:
        """Answer a request. A bug becomes a 500: the process is the swarm's and must go on."""
        with guarded(GuardSource.HTTP):
            return await self._answer(request)
        return failure(500, "This is a bug in the monitor; the log has more.")

    async def _answer(self, request: Request) -> Response:
        match request.path:
            case "/":
                return Response(200, _page(), "text/html; charset=utf-8", _PAGE_HEADERS)
            case "/healthz":
                return json_response({"alive": True})
            case "/readyz":
                return await self._ready()
            case "/metrics":
                return await self._metrics(request.headers.get("accept", ""))
            case "/api/status":
                return Response(200, _JSON.encode(await self.look()))
            case "/api/history":
                return json_response({"frames": self._history.points()})
            case "/api/frame":
                return self._frame(parse_qs(request.query).get("at", ["0"])[-1])
            case path:
                return failure(404, f"There is no {path[:64]} here; /, /metrics, /healthz, /readyz, /api/status.")

    async def _ready(self) -> Response:
        seen = await self.look()
        why = seen.away or ("Not started yet." if seen.status is None else "")
        if not why and seen.status is not None:
            why = self._readiness.why_not(seen.status, trio.current_time())
        return json_response({"ready": not why, "why": why}, 503 if why else 200)

    async def _metrics(self, accept: str) -> Response:
        from node.monitor.metrics import exposition  # only a scraped process needs the library

        seen = await self.look()
        if seen.status is None or seen.away:
            return failure(503, seen.away or "Not started yet.")
        return Response(200, *exposition(seen.status, self._observations, self._release, accept))

    def _frame(self, at: str) -> Response:
        try:
            when = float(at)
        except ValueError:
            when = math.nan
        if not math.isfinite(when):
            return failure(400, "at: Unix time in seconds.")
        frame = self._history.at(when)
        return failure(404, "Nothing was kept yet.") if frame is None else Response(200, frame)

    async def look(self) -> Seen:
        """The status now, at most `FRESH_S` old."""
        async with self._asking:
            if self._seen is None or time.time() - self._seen.at > FRESH_S:
                answer = await self._source()
                said, found = "", list[Finding]()
                if answer.status is not None:
                    self._observations.look(answer.status)
                    said, found = headline(answer.status), findings(answer.status)
                self._seen = Seen(time.time(), said, found, answer.status, answer.away)
            return self._seen

    async def keep_history(self) -> None:
        """Keep a status every `SAMPLE_S` seconds, or less often where that would cost too much. Runs until
        cancelled."""
        while True:
            began = time.perf_counter()
            seen = await self.look()
            if seen.status is not None and not seen.away:
                self._history.add(Point(seen.at, _tokens_s(seen.status)), _JSON.encode(seen))
            spent_s = time.perf_counter() - began
            await trio.sleep(max(SAMPLE_S, spent_s / MOST_SHARE))


def _tokens_s(status: Status) -> float | None:
    if isinstance(status, SeedStatus):
        return status.work.tokens_per_s
    own = status.nodes[0].tokens_s if status.nodes else UNSET
    return None if own is UNSET else own


_PAGE_HEADERS: Final = (
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
     "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
)  # fmt: skip
"""The page asks no other host for anything, and no other site may show it in a frame."""


def _names_loopback(host: str) -> bool:
    """Whether a Host header names this machine's loopback."""
    return is_loopback(urlsplit("//" + host).hostname or "")


async def serve_monitor(
    address: tuple[str, int],
    home: Path,
    source: Source,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a monitor at (host, port) until cancelled; `started` with the page's URL. Raises `UsageError` when the
    address is not available."""
    host, port = address
    token = "" if is_loopback(host) else token_of(home)
    monitor = Monitor(source, token=token)
    async with trio.open_nursery() as nursery:
        try:
            bound = await nursery.start(partial(serve, monitor, host, port, _LIMITS, monitor.check))
        except OSError as error:
            raise UsageError(
                f"Cannot serve metrics at {host}:{port} ({error.strerror or error}). Choose another port."
            ) from error
        named = f"[{host}]" if ":" in host else host
        url = f"http://{named}:{bound}/" + (f"?token={token}" if token else "")
        _log.info("monitor", page=url, hint="the page; /metrics, /healthz and /readyz are there too")
        nursery.start_soon(monitor.keep_history)
        task_status.started(url)
