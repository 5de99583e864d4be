"""Logging: an event name and fields on stderr, formatted for people on a terminal and as JSON elsewhere.

No peer can fill a disk with log lines: above a rate, lines of one name are left out, and the next one that is written
says how many (`suppressed`). This is a safety net; code that logs must be seldom enough by itself.
"""

import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any, Final, TextIO

import structlog

from codec.errors import UsageError
from swarm.protocol.core.bucket import Bucket

__all__ = ["LineLimit", "configure"]

_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
MAX_VALUE: Final = 2000
"""Characters of one field: more than any legitimate value has."""
MAX_TRACE: Final = 20_000
"""Characters of a traceback."""
NAMES: Final = 1024
"""Names whose rate is remembered. The program has some hundreds; the bound holds even if a peer could choose one."""


class LineLimit:
    """Decides which lines are written: `rate` a second and `burst` at once of each name, ten times that of all names.

    Ten lines of 300 bytes a second are 250 MB a day; 500 at once are those of a large swarm that joins. Thread-safe.
    """

    def __init__(self, rate: float = 10.0, burst: float = 500.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._all = Bucket(10.0 * rate, 10.0 * burst)
        self._names: OrderedDict[str, tuple[Bucket, int]] = OrderedDict()
        """By name: its allowance, and how many of its lines were left out since the last one that was written."""
        self._lock = threading.Lock()

    def due(self, name: str) -> int | None:
        """How many lines of this name were left out since the last one written; None: leave this one out too."""
        with self._lock:
            now = self._clock()
            bucket, left_out = self._names.pop(name, None) or (Bucket(self._rate, self._burst), 0)
            written = bucket.take(1.0, now) and self._all.take(1.0, now)
            self._names[name] = bucket, 0 if written else left_out + 1
            while len(self._names) > NAMES:
                self._names.popitem(last=False)
            return left_out if written else None

    def processor(self, _: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A structlog processor: drops the line, or adds how many were dropped before it."""
        if (left_out := self.due(str(event.get("event", "")))) is None:
            raise structlog.DropEvent
        if left_out:
            event["suppressed"] = left_out
        return event

    def filter(self, record: logging.LogRecord) -> bool:
        """A filter for the `logging` module, where the name of a line is the place in the code that wrote it."""
        if (left_out := self.due(f"{record.pathname}:{record.lineno}")) is None:
            return False
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (suppressed={left_out})", None
        return True


def _plain(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Shorten keys and hashes to eight hex digits, and escape what a peer wrote, so that it cannot move the cursor."""
    for name, value in event.items():
        if isinstance(value, bytes):
            event[name] = value[:4].hex()
        elif name == "exception":
            event[name] = str(value)[-MAX_TRACE:]
        elif isinstance(value, str):
            event[name] = value[:MAX_VALUE] if value.isprintable() else ascii(value[:MAX_VALUE])
        elif not isinstance(value, int | float | bool | None):
            event[name] = str(value)[:MAX_VALUE]
    return event


def configure(level: str | None = None, stream: TextIO | None = None) -> None:
    """Set up logging for this process. `level`: debug, info, warning or error; default SWARM_LOG, else info.

    Raises `UsageError` for another level. Lines go to `stream` (default stderr); stdout is left to a command's report.
    """
    name = (level or os.environ.get("SWARM_LOG") or "info").lower()
    if name not in _LEVELS:
        raise UsageError(f"SWARM_LOG is {name!r}; it can be {', '.join(_LEVELS)}.")
    out = stream if stream is not None else sys.stderr
    live = out.isatty()
    limit = LineLimit()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            limit.processor,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if live else "iso", utc=not live),
            structlog.processors.format_exc_info,
            _plain,
            structlog.dev.ConsoleRenderer(colors=live) if live else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[name]),
        logger_factory=structlog.PrintLoggerFactory(out),
    )
    # Libraries use the standard module; their lines about each connection are of no use to a user.
    level_number = max(_LEVELS[name], logging.WARNING)
    logging.basicConfig(stream=out, level=level_number, format="%(name)s: %(message)s", force=True)
    for handler in logging.getLogger().handlers:
        handler.addFilter(limit.filter)
