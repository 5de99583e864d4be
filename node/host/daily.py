"""The bytes that this machine may send today (`--up-gb-day`), counted in its home across restarts and kills.

The file counts bytes before they are sent, so a kill cannot lose any: see `swarm.protocol.transfer.allowance`.
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
    """The daily allowance of one home. `sent()`: bytes sent by this process so far. `clock()`: Unix time in seconds."""

    def __init__(
        self, home: Path, gb_day: float, up_mbit: float, sent: Callable[[], int], clock: Callable[[], float] = time.time
    ) -> None:
        self._path = home / _NAME
        self._sent, self._clock = sent, clock
        self._allowance = Allowance.resume(round(gb_day * 1e9), up_mbit, self._read())
        self._last = LocalBudget(saving=False, spent=False)

    def look(self) -> LocalBudget | None:
        """Count what was sent. Returns the event for the core when the budget's state has changed. Raises `UsageError`
        when the count cannot be written to disk."""
        record = self._allowance.look(int(self._clock()) // _DAY_S, self._sent())
        if record is not None:
            self._write(record)
        now = LocalBudget(self._allowance.saving, self._allowance.spent)
        if now == self._last:
            return None
        self._last = now
        if now.saving:
            _log.warning("uplink_budget", left_bytes=self._allowance.left_bytes, passes_on=False)
        else:
            _log.info("uplink_budget", left_bytes=self._allowance.left_bytes, passes_on=True)
        return now

    def close(self) -> None:
        """Write the exact count at a clean end. If that fails, the file counts a little more than was sent."""
        self._allowance.look(int(self._clock()) // _DAY_S, self._sent())
        with contextlib.suppress(UsageError):
            self._write(self._allowance.close())

    @property
    def spent(self) -> bool:
        """Whether the allowance of this day is used up."""
        return self._last.spent

    @property
    def news(self) -> str:
        """A line for the status page; empty while this machine still passes chunks on."""
        if not self._last.saving:
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
                f"{self._path} cannot be read ({error}), so what this machine has sent today is unknown. "
                "Remove the file to start counting again."
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
