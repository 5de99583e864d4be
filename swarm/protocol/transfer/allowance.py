"""What a machine may send in a day (`--up-gb-day`): counted over restarts, kept to the byte.

Nothing here reads a clock or writes a file. `record` is what must be on disk before the bytes that it allows are sent:
it is ahead of what was sent, so a machine that is killed counts a little too much and never too little.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec

__all__ = ["Allowance", "AllowanceStatus", "Record"]

SAVING_S = 10.0
"""From here on it should stand in no tree: so long at full speed until its children have moved, as a heartbeat and a
plan take. At most a tenth of the day's bytes."""
STOP_S = 1.0
"""From here on it gives nothing: what is queued leaves yet. At most a fiftieth of the day's bytes. What it says of
itself (some MB a day) comes out of this too."""
AHEAD = 0.01
"""The record goes ahead by so much of the day's bytes, and by what may leave until the next look."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept on disk."""

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
    """`limit_bytes` a day; `up_mbit`: how fast they can go."""

    limit_bytes: int
    up_mbit: float
    day: int = 0
    spent_bytes: int = 0
    """Of this day, those of earlier runs included."""
    _seen: int = 0
    """Total of this run at the last look."""
    _written: int = 0

    @classmethod
    def resume(cls, limit_bytes: int, up_mbit: float, record: Record | None) -> "Allowance":
        """Go on from what an earlier run left on disk."""
        made = cls(limit_bytes, up_mbit)
        if record is not None:
            made.day, made.spent_bytes, made._written = record.day, record.spent_bytes, record.spent_bytes
        return made

    def look(self, day: int, sent_bytes: int) -> Record | None:
        """It is this day, and this run has sent so much in all: what is to be written down now, if anything.

        A clock that is set back by a day changes nothing; by more, it was wrong before.
        """
        if day > self.day or self.day - day > 1:
            self.day, self.spent_bytes, self._written = day, 0, 0
        self.spent_bytes += sent_bytes - self._seen
        self._seen = sent_bytes
        soon = int(self._reserve(STOP_S, 0.02))
        if self.spent_bytes + soon <= self._written:
            return None
        self._written = self.spent_bytes + soon + max(1, int(AHEAD * self.limit_bytes))
        return Record(self.day, self._written)

    def close(self) -> Record:
        """What was really sent, at a clean end."""
        self._written = self.spent_bytes
        return Record(self.day, self.spent_bytes)

    @property
    def left_bytes(self) -> int:
        return max(0, self.limit_bytes - self.spent_bytes)

    @property
    def saving(self) -> bool:
        return self.left_bytes <= self._reserve(SAVING_S, 0.1)

    @property
    def spent(self) -> bool:
        return self.left_bytes <= self._reserve(STOP_S, 0.02)

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
