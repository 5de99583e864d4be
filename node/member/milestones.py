"""What a node tells the person who started it: what it waits for until it is ready, and then a line a minute.

Joining and the steps of a catch-up are notices of the core; this adds what takes long, with figures.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import structlog
import trio

from node.settings.units import version_text
from node.status.schema import Version
from swarm.protocol.core.version import VersionId

__all__ = ["Look", "Milestones"]

LOOK_EVERY_S: Final = 1.0
"""Until the node is ready."""
WORKING_LOOK_S: Final = 5.0
"""Afterwards: no line is due more often than each five seconds."""
FETCHING_EVERY_S: Final = 5.0
"""A first catch-up takes minutes where the model is large."""
STARTING_EVERY_S: Final = 10.0
WORKING_EVERY_S: Final = 60.0

_log = structlog.get_logger(__name__)
Line = tuple[str, dict[str, Any]]
"""An event's name and fields."""


class Look(NamedTuple):
    """What the node is at the moment."""

    held: Version | None
    """Of its replica, or of a relay's chunks; None: the model is not here."""
    head: Version | None
    fetched: float | None
    """Share of the differing blocks that are here, 0..1; None: no catch-up runs."""
    of_bytes: int | None
    """Size of the differing blocks; None: not known yet."""
    received_bytes: int
    """At the sockets, since the start."""
    pushed_bytes: int
    """Payload that was passed on, since the start."""
    waits_for: str | None = None
    """What the engine waits for; empty: it is ready; None: there is no engine."""
    log_says: str = ""
    """The last line of the engine's log."""
    engine: Version | None = None
    doing: str = ""
    """What a ready node does, for people; {} stands for the version."""
    tokens_s: float = 0.0
    accepted: int = 0
    refused: int = 0
    """Samples, by all reasons."""


class Milestones:
    """`lines(look, now)` gives the lines that are due; `tell` calls it for ever and logs them."""

    def __init__(self, now: float) -> None:
        self._began_at = now
        self._fetching: tuple[float, float, int] | None = None
        """When the catch-up began, and when the last line came with how many bytes had been received."""
        self._said_at = float("-inf")
        """When the last line about a catch-up or a starting engine was due."""
        self._starting_since: float | None = None
        self._working_at: float | None = None
        """When the last line about the work was due; None: the node is not ready."""
        self._pushed = 0
        self._was_ready = False

    def lines(self, look: Look, now: float) -> list[Line]:
        """The lines that are due at `now`."""
        lines = self._fetching_lines(look, now)
        if look.held is None:
            return lines
        if look.waits_for:
            return lines + self._starting_lines(look, now)
        self._starting_since = None
        if self._working_at is None:
            self._working_at, self._pushed = now, look.pushed_bytes
            since = {} if self._was_ready else {"seconds": round(now - self._began_at, 1)}
            self._was_ready = True
            version = look.held if look.waits_for is None else look.engine
            lines.append(("ready", {"doing": look.doing.format(_number(version)), "version": _name(version), **since}))
        elif now >= self._working_at + WORKING_EVERY_S:
            lines.append(("working", self._working_fields(look)))
            self._working_at, self._pushed = now, look.pushed_bytes
        return lines

    def _fetching_lines(self, look: Look, now: float) -> list[Line]:
        if look.fetched is None:
            self._fetching = None
            return []
        if self._fetching is None:
            self._fetching = (now, now, look.received_bytes)
            return []
        began_at, said_at, received = self._fetching
        if now < said_at + FETCHING_EVERY_S:
            return []
        self._fetching = (began_at, now, look.received_bytes)
        fields: dict[str, Any] = {"percent": round(100 * look.fetched)}
        if look.of_bytes:
            fields |= {"bytes": round(look.fetched * look.of_bytes), "of_bytes": look.of_bytes}
        fields["bytes_s"] = round((look.received_bytes - received) / (now - said_at))
        if 0 < look.fetched < 1:
            fields["left_s"] = round((now - began_at) * (1 - look.fetched) / look.fetched, 1)
        return [("fetching", fields)]

    def _starting_lines(self, look: Look, now: float) -> list[Line]:
        self._working_at = None
        if self._starting_since is None:
            self._starting_since = now
        elif now < self._said_at + STARTING_EVERY_S:
            return []
        self._said_at = now
        seconds = round(now - self._starting_since, 1)
        fields: dict[str, Any] = {"waits_for": look.waits_for, "seconds": seconds}
        return [("engine_starting", fields | ({"log_says": look.log_says} if look.log_says else {}))]

    def _working_fields(self, look: Look) -> dict[str, Any]:
        has_engine = look.waits_for is not None
        fields: dict[str, Any] = {"version": _name(look.engine if has_engine else look.held)}
        if look.head is not None and look.head != (look.engine if has_engine else look.held):
            fields["head"] = _name(look.head)
        if has_engine:
            fields |= {"tokens_s": round(look.tokens_s), "accepted": look.accepted, "refused": look.refused}
        if pushed := look.pushed_bytes - self._pushed:
            fields["passed_on_bytes"] = pushed
        return fields

    async def tell(self, look: Callable[[], Look]) -> None:
        """Log what is due, until cancelled."""
        while True:
            for name, fields in self.lines(look(), trio.current_time()):
                _log.info(name, **fields)
            await trio.sleep(LOOK_EVERY_S if self._working_at is None else WORKING_LOOK_S)


def _number(version: Version | None) -> str:
    return "no version" if version is None else f"version {version_text(version)}"


def _name(version: Version | None) -> str:
    """As fields of the log have it."""
    return "-" if version is None else str(VersionId(*version))
