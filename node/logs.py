"""Log lines: an event name and fields, on stderr. For people on a terminal, as JSON elsewhere."""

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any, Final, TextIO

import structlog

from codec.errors import UsageError

__all__ = ["configure"]

_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def _plain(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Keys and hashes by their first eight hex digits, and nothing that a peer wrote may move the cursor."""
    for name, value in event.items():
        if isinstance(value, bytes):
            event[name] = value[:4].hex()
        elif isinstance(value, str) and not value.isprintable() and name != "exception":
            event[name] = ascii(value)
        elif not isinstance(value, str | int | float | bool | None):
            event[name] = str(value)
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
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
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
