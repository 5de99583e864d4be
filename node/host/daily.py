"""What this machine may send today (`--up-gb-day`), counted in its home: over restarts, kills and days.

The file says what may have been sent, ahead of what was: see `swarm.protocol.transfer.allowance`.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from codec.errors import UsageError
from swarm.protocol.core.events import LocalBudget
from swarm.protocol.transfer.allowance import Allowance, AllowanceStatus, Record

__all__ = ["Daily"]

_NAME: Final = "uplink-today.json"
_DAY_S: Final = 86_400
_log = structlog.get_logger(__name__)


class Daily:
    """The allowance of one home. `sent`: bytes that this process sent so far. `clock`: Unix time."""

    def __init__(
        self, home: Path, gb_day: float, up_mbit: float, sent: Callable[[], int], clock: Callable[[], float] = time.time
    ) -> None:
        self._path = home / _NAME
        self._sent, self._clock = sent, clock
        self._allowance = Allowance.resume(round(gb_day * 1e9), up_mbit, self._read())
        self._told = LocalBudget(saving=False, spent=False)

    def look(self) -> LocalBudget | None:
        """Count what was sent; what the core is to be told, if anything. Raises `UsageError` when it cannot be written
        down."""
        record = self._allowance.look(int(self._clock()) // _DAY_S, self._sent())
        if record is not None:
            self._write(record)
        now = LocalBudget(self._allowance.saving, self._allowance.spent)
        if now == self._told:
            return None
        self._told = now
        if now.saving:
            _log.warning("uplink_budget", left_bytes=self._allowance.left_bytes, passes_on=False)
        else:
            _log.info("uplink_budget", left_bytes=self._allowance.left_bytes, passes_on=True)
        return now

    def close(self) -> None:
        """At a clean end what was really sent is what counts; where that cannot be written, a little more counts."""
        self._allowance.look(int(self._clock()) // _DAY_S, self._sent())
        with contextlib.suppress(UsageError):
            self._write(self._allowance.close())

    @property
    def spent(self) -> bool:
        return self._told.spent

    @property
    def news(self) -> str:
        """A line for people; empty while there is enough."""
        if not self._told.saving:
            return ""
        at = time.strftime("%H:%M", time.localtime((int(self._clock()) // _DAY_S + 1) * _DAY_S))
        gb = self._allowance.limit_bytes / 1e9
        return f"The {gb:g} GB that this machine may send a day are used up: it passes nothing on until {at}."

    def status(self) -> AllowanceStatus:
        return self._allowance.status()

    def _read(self) -> Record | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Record)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(
                f"{self._path} cannot be read ({error}), so nobody knows what this machine has sent today. "
                "Remove it to begin counting anew."
            ) from error

    def _write(self, record: Record) -> None:
        fresh = self._path.with_suffix(".new")
        try:
            with fresh.open("wb") as file:
                file.write(msgspec.json.encode(record) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, self._path)
        except OSError as error:
            raise UsageError(f"Cannot count what this machine sends, in {self._path}: {error.strerror}.") from error
