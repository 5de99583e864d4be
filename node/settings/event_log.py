"""Events of modules that also run in a trainer's or a simulation's process, where nobody has set up the log.

There the sentence goes through the `logging` module; in a process with a log it becomes a line like any other.
"""

import logging
from typing import Any

from node.settings.events import say

__all__ = ["EventLog", "event_of"]


class EventLog:
    """`EventLog(__name__).warning("no_work", why=...)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def warning(self, event: str, **fields: Any) -> None:
        """Something that a person may want to look at."""
        self._logger.warning(say(event, fields), extra={"swarm_event": (event, fields)}, stacklevel=2)


def event_of(record: logging.LogRecord) -> tuple[str, dict[str, Any]] | None:
    """The event's name and fields that `EventLog` put into `record`; None: another module wrote it."""
    return getattr(record, "swarm_event", None)
