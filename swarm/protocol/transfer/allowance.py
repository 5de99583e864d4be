"""The daily upload limit of a machine (`--up-gb-day`), exact to the byte and counted across restarts.

Nothing here reads a clock or writes a file. A `Record` must be on disk before the bytes that it covers are sent. It is
ahead of the bytes sent, so after a kill the count is slightly too high and never too low.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec

__all__ = ["Allowance", "AllowanceStatus", "Record"]

SAVING_S = 10.0
"""The machine should leave all trees when it can send at full speed for only this long: a heartbeat and a plan take so
long to move its children."""
SAVING_SHARE = 0.1
"""Upper bound of the bytes that `SAVING_S` stands for, as a share of the day's bytes: with a small limit and a fast
uplink, ten seconds could be most of the day's bytes."""
STOP_S = 1.0
"""The machine sends no more data when it can send at full speed for only this long: enough for the data that is already
queued, and for its own control messages (some MB a day)."""
STOP_SHARE = 0.02
"""The same bound for `STOP_S`."""
AHEAD = 0.01
"""Share of the day's bytes by which a record is ahead, besides the bytes that may be sent until the next look."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The count on disk."""

    day: int
    """Days since 1970, UTC."""
    spent_bytes: Annotated[int, msgspec.Meta(ge=0)]


class AllowanceStatus(msgspec.Struct, kw_only=True):
    """What a machine has sent today (UTC) and may still send, as `node.status.schema` shows it."""

    limit_bytes: int = 0
    """A day (`--up-gb-day`)."""
    spent_bytes: int = 0
    left_bytes: int = 0
    saving: bool = False
    """So little is left that it should be interior in no tree."""
    spent: bool = False
    """So little is left that it sends nothing."""


@dataclass(slots=True)
class Allowance:
    """Counts the bytes of a day against `limit_bytes`. `up_mbit`: the uplink in Mbit/s."""

    limit_bytes: int
    up_mbit: float
    day: int = 0
    spent_bytes: int = 0
    """Bytes sent on this day, by earlier runs too."""
    _seen: int = 0
    """Bytes sent by this run at the last look."""
    _written: int = 0

    @classmethod
    def resume(cls, limit_bytes: int, up_mbit: float, record: Record | None) -> "Allowance":
        """Continue from the record that an earlier run left on disk."""
        allowance = cls(limit_bytes, up_mbit)
        if record is not None:
            allowance.day, allowance.spent_bytes = record.day, record.spent_bytes
            allowance._written = record.spent_bytes
        return allowance

    def look(self, day: int, sent_bytes: int) -> Record | None:
        """Update the count; returns the record to write to disk now, or None.

        `day`: days since 1970. `sent_bytes`: bytes that this run has sent in total. A clock that is set back by one day
        changes nothing; one that is set back further was wrong before, so its new day starts at zero.
        """
        if day > self.day or self.day - day > 1:
            self.day, self.spent_bytes, self._written = day, 0, 0
        self.spent_bytes += sent_bytes - self._seen
        self._seen = sent_bytes
        soon = int(self._reserve(STOP_S, STOP_SHARE))
        if self.spent_bytes + soon <= self._written:
            return None
        self._written = self.spent_bytes + soon + max(1, int(AHEAD * self.limit_bytes))
        return Record(self.day, self._written)

    def close(self) -> Record:
        """The exact count, to write at a clean exit."""
        self._written = self.spent_bytes
        return Record(self.day, self.spent_bytes)

    @property
    def left_bytes(self) -> int:
        return max(0, self.limit_bytes - self.spent_bytes)

    @property
    def saving(self) -> bool:
        """Whether so little is left that the machine should leave the trees."""
        return self.left_bytes <= self._reserve(SAVING_S, SAVING_SHARE)

    @property
    def spent(self) -> bool:
        """Whether so little is left that the machine must send no more data."""
        return self.left_bytes <= self._reserve(STOP_S, STOP_SHARE)

    def _reserve(self, seconds: float, share: float) -> float:
        return min(seconds * self.up_mbit * 125_000, share * self.limit_bytes)

    def status(self) -> AllowanceStatus:
        """For people and programs."""
        return AllowanceStatus(
            limit_bytes=self.limit_bytes,
            spent_bytes=self.spent_bytes,
            left_bytes=self.left_bytes,
            saving=self.saving,
            spent=self.spent,
        )
