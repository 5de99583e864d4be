"""The newest entries of a machine's log, in memory: what a leader sends to a follower that is a little behind.

A follower that needs an older entry gets a snapshot instead. The log itself is not kept: its entries are applied to the
machine's state in the transaction that stores them.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

from codec.errors import PeerError
from swarm.protocol.council.messages import MAX_ENTRIES, Entry, Position

__all__ = ["LogWindow"]

KEPT_BYTES: Final = 32 << 20
KEPT_ENTRIES: Final = 4096
APPEND_BYTES: Final = 4 << 20
"""Bodies in one `Append`, if there are several."""


class LogWindow:
    """A contiguous end of the log."""

    def __init__(self, last: Position) -> None:
        """`last`: position of the newest entry on disk, of which nothing is in memory yet."""
        self._before = last
        """Position of the entry before the first one kept."""
        self._entries: deque[Entry] = deque()
        self._bytes = 0

    @property
    def last(self) -> Position:
        """Position of the newest entry."""
        return self._entries[-1].position if self._entries else self._before

    def add(self, entries: Iterable[Entry]) -> None:
        """Add entries that follow `last`, and forget the oldest beyond the limits. Raises `PeerError` for others."""
        for entry in entries:
            if entry.index != self.last.index + 1:
                raise PeerError(f"entry {entry.index} does not follow {self.last.index}")
            self._entries.append(entry)
            self._bytes += len(entry.body)
        while len(self._entries) > KEPT_ENTRIES or (self._bytes > KEPT_BYTES and len(self._entries) > 1):
            gone = self._entries.popleft()
            self._before = gone.position
            self._bytes -= len(gone.body)

    def has(self, position: Position) -> bool:
        """Whether the log has an entry at exactly this position, as far as is known in memory."""
        return self._position(position.index) == position

    def is_of_term(self, index: int, term: int) -> bool:
        """Whether the entry of this index is in memory and of this term."""
        position = self._position(index)
        return position is not None and position.term == term

    def after(self, position: Position) -> tuple[Entry, ...]:
        """The entries that follow `position`, which `has` knows, as many as one message takes."""
        if not self.has(position):
            raise ValueError(f"{position} is not in the window")
        found: list[Entry] = []
        size = 0
        start = position.index - self._before.index
        for at in range(start, min(len(self._entries), start + MAX_ENTRIES)):
            entry = self._entries[at]
            size += len(entry.body)
            if found and size > APPEND_BYTES:
                break
            found.append(entry)
        return tuple(found)

    def _position(self, index: int) -> Position | None:
        at = index - self._before.index
        if at == 0:
            return self._before
        return self._entries[at - 1].position if 0 < at <= len(self._entries) else None
