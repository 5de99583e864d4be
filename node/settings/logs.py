"""Logging: an event name and fields on stderr; as sentences on a terminal, as JSON elsewhere, never mixed.

`events` has the sentences. A log file (`--log-file`) gets JSON in both cases. Lines of the `logging` module, which
libraries use, become events named `message`.

No peer can fill a disk with log lines: above a rate, lines of one name are left out, and the next one that is written
says how many (`suppressed`). This is a safety net; code that logs must be seldom enough by itself.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Final, TextIO

import structlog

from codec.errors import UsageError
from codec.sign import PUBLIC_KEY_BYTES
from node.settings.event_log import event_of
from node.settings.events import EVENTS, say
from node.settings.log_file import LogFile
from swarm.protocol.core.bucket import Bucket
from swarm.transport.identity import peer_id

__all__ = ["LineLimit", "configure", "name_peers", "note_end", "note_stopping"]

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
            record.__dict__["suppressed"] = left_out
        return True


_NameOf = Callable[[bytes], str]
"""The name of a peer, by its public key; empty where it has none."""


class _Log:
    """Where this process's lines go. `name_of`: how it calls its peers."""

    def __init__(self, out: TextIO, level: int, file: LogFile | None) -> None:
        self.out, self.level, self.file = out, level, file
        self.live = out.isatty()
        self.coloured = self.live and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.limit = LineLimit()

    def line(self, event: MutableMapping[str, Any]) -> str | None:
        """The line for `out`, and write the one for the file. None: a terminal does not show this event."""
        text = json.dumps(event, default=str, ensure_ascii=False)
        if self.file is not None:
            self.file.write(text)
        if not self.live:
            return text
        name = str(event.get("event", ""))
        routine = name in EVENTS and EVENTS[name].routine and event.get("level") in ("info", "debug")
        return None if routine and self.level > logging.DEBUG else self._sentence(name, event)

    def _sentence(self, name: str, event: MutableMapping[str, Any]) -> str:
        fields = {key: value for key, value in event.items() if key not in ("event", "level", "timestamp")}
        who = fields.get("name") or str(fields.get("peer", ""))[-8:]
        text = say(name, {"who": who, **{key: value for key, value in fields.items() if key != "exception"}})
        if "suppressed" in fields:
            text += f" ({fields['suppressed']} more lines of this kind were left out)"
        if "exception" in fields:
            text += "\n" + str(fields["exception"])
        colour = {"warning": "33", "error": "31"}.get(str(event.get("level")), "")
        at = time.strftime("%H:%M:%S")
        if self.coloured:
            return f"\x1b[2m{at}\x1b[0m  " + (f"\x1b[{colour}m{text}\x1b[0m" if colour else text)
        return f"{at}  {text}"


def _nameless(_: bytes) -> str:
    return ""


_name_of: _NameOf = _nameless
_log: _Log | None = None
"""None: `configure` was not called, and nothing of this process is logged."""


def name_peers(name_of: _NameOf) -> None:
    """From now on lines about a peer have the name that `name_of` gives to its public key."""
    global _name_of
    _name_of = name_of


def _plain(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Write keys as PeerIds with the peer's name, shorten hashes, and escape what a peer wrote, so that it cannot move
    the cursor."""
    for name, value in list(event.items()):
        if isinstance(value, bytes):
            event[name] = _identified(value, event) if name == "peer" else value[:8].hex()
        elif name == "exception":
            event[name] = _escaped_lines(str(value)[-MAX_TRACE:])
        elif not isinstance(value, int | float | bool | None):
            event[name] = _escaped(str(value))
    return event


def _escaped(value: str) -> str:
    """At most `MAX_VALUE` characters of a field; as a Python literal if one of them is not printable."""
    return value[:MAX_VALUE] if value.isprintable() else ascii(value[:MAX_VALUE])


def _escaped_lines(text: str) -> str:
    """Lines, a traceback's for example. They stay lines, and do not become a literal."""
    return "".join(letter if letter == "\n" or letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _identified(key: bytes, event: MutableMapping[str, Any]) -> str:
    """The PeerId of `key`; the event gets the peer's name too."""
    if len(key) != PUBLIC_KEY_BYTES:
        return key.hex()
    if not event.get("name") and (name := _name_of(key)):
        event["name"] = _escaped(name)
    return peer_id(key)


def _render(log: _Log) -> Callable[[Any, str, MutableMapping[str, Any]], str]:
    def render(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
        line = log.line(event)
        if line is None:
            raise structlog.DropEvent
        return line

    return render


class _Bridge(logging.Handler):
    """Brings the lines of the `logging` module into the log."""

    def __init__(self, log: _Log) -> None:
        super().__init__()
        self._log = log
        self.addFilter(log.limit.filter)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if (line := self._log.line(_plain(None, "", self._event(record)))) is not None:
                print(line, file=self._log.out, flush=True)
        except Exception:  # as every handler of that module does
            self.handleError(record)

    def _event(self, record: logging.LogRecord) -> dict[str, Any]:
        name, fields = event_of(record) or ("message", {"source": record.name, "text": record.getMessage()})
        event = {**fields, "event": name, "level": record.levelname.lower(), "timestamp": _timestamp()}
        for extra in ("peer", "suppressed"):
            if (value := record.__dict__.get(extra)) is not None:
                event[extra] = value
        if record.exc_info:
            event["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return event


def _timestamp() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06}Z"


def configure(level: str | None = None, stream: TextIO | None = None, file: Path | None = None) -> None:
    """Set up logging for this process. `level`: debug, info, warning or error; default SWARM_LOG, else info.

    Raises `UsageError` for another level, and when `file` cannot be written. Lines go to `stream` (default stderr);
    stdout is left to a command's report.
    """
    global _log
    name = (level or os.environ.get("SWARM_LOG") or "info").lower()
    if name not in _LEVELS:
        raise UsageError(f"SWARM_LOG is {name!r}; it can be {', '.join(_LEVELS)}.")
    if _log is not None and _log.file is not None:
        _log.file.close()
    log = _Log(stream if stream is not None else sys.stderr, _LEVELS[name], None if file is None else LogFile(file))
    _log = log
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            log.limit.processor,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _plain,
            _render(log),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[name]),
        logger_factory=structlog.PrintLoggerFactory(log.out),
    )
    # Libraries use the standard module; their lines about each connection are of no use to a user.
    logging.basicConfig(level=max(_LEVELS[name], logging.WARNING), handlers=[_Bridge(log)], force=True)


def forget() -> None:
    """Close the log file, and log nothing from now on but through structlog's and logging's own settings."""
    global _log, _name_of
    if _log is not None and _log.file is not None:
        _log.file.close()
    _log, _name_of = None, _nameless


def note_stopping() -> None:
    """Say that this process ends because it was asked to: in its log, or as a sentence where it has none."""
    if _log is not None:
        structlog.get_logger(__name__).info("stopping")
    else:
        print(EVENTS["stopping"].says, file=sys.stderr, flush=True)


def note_end(why: str) -> None:
    """Write why this process ends to its log file; stderr gets the sentence from the command line."""
    if _log is not None and _log.file is not None:
        event = {"why": _escaped_lines(why), "event": "ended", "level": "error", "timestamp": _timestamp()}
        _log.file.write(json.dumps(event, ensure_ascii=False))
