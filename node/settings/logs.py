"""Log lines: an event name and fields, on stderr. For people on a terminal, as JSON elsewhere.

No peer can fill a disk with them: beyond a rate, lines of one name are left out, and the next that is written says how
many were (`suppressed`). That is a net below the code that logs, which is to be seldom enough by itself.
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
"""Characters of one field: more than any honest one has."""
MAX_TRACE: Final = 20_000
"""Characters of a traceback."""
NAMES: Final = 1024
"""Names whose rate is remembered; the program has some hundreds, and one that a peer chose must not make it grow."""


class LineLimit:
    """Says which lines are written: of each name `rate` a second and `burst` at once, of all together ten times that.

    Ten a second of 300 bytes are 250 MB a day; 500 at once are a large swarm that joins. Safe to use from any thread.
    """

    def __init__(self, rate: float = 10.0, burst: float = 500.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._all = Bucket(10.0 * rate, 10.0 * burst)
        self._names: OrderedDict[str, tuple[Bucket, int]] = OrderedDict()
        """By name: what it may still write, and how many lines of it were left out since the last."""
        self._lock = threading.Lock()

    def due(self, name: str) -> int | None:
        """How many lines of this name were left out since the last that was written; None: leave this one out too."""
        with self._lock:
            now = self._clock()
            bucket, left_out = self._names.pop(name, None) or (Bucket(self._rate, self._burst), 0)
            written = bucket.take(1.0, now) and self._all.take(1.0, now)
            self._names[name] = bucket, 0 if written else left_out + 1
            while len(self._names) > NAMES:
                self._names.popitem(last=False)
            return left_out if written else None

    def processor(self, _: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """For structlog: drops the line, or notes how many were."""
        if (left_out := self.due(str(event.get("event", "")))) is None:
            raise structlog.DropEvent
        if left_out:
            event["suppressed"] = left_out
        return event

    def filter(self, record: logging.LogRecord) -> bool:
        """For the standard module, where a line's name is the place in the code that wrote it."""
        if (left_out := self.due(f"{record.pathname}:{record.lineno}")) is None:
            return False
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (suppressed={left_out})", None
        return True


def _plain(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Keys and hashes by their first eight hex digits, and nothing that a peer wrote may move the cursor."""
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
    """Set up logging for this process; `level` (SWARM_LOG, else info) is debug, info, warning or error.

    Raises `UsageError` for another level. stdout stays free for what a command reports.
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
    # Libraries log through the standard module; what they say of every connection is of use to nobody but us.
    level_number = max(_LEVELS[name], logging.WARNING)
    logging.basicConfig(stream=out, level=level_number, format="%(name)s: %(message)s", force=True)
    for handler in logging.getLogger().handlers:
        handler.addFilter(limit.filter)
