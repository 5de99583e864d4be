"""The queue of trainers that want to publish. One version is open at a time; trainers are served in order of asking.

Each trainer publishes one part of the model (`codec.parts`): one the base, others an adapter each. A trainer that ends
leaves the queue, wherever it was in its version.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from codec.errors import SwarmError
from codec.parts import Part

__all__ = ["TURN_WITHIN_S", "Busy", "Turn", "Turns"]

TURN_WITHIN_S: Final = 120.0
"""How long a trainer waits for its turn. A version takes seconds; a trainer that was stopped in the middle of one would
keep the others waiting for ever."""


class Busy(SwarmError):
    """Another trainer is publishing to this seed at the moment: the same part, or for too long."""


class Turn:
    """A trainer's turn, or its place in the queue. `part`: that it publishes. `who`: the trainer, in words."""

    def __init__(self, part: Part, who: str, end: Callable[["Turn"], None]) -> None:
        self.part, self.who = part, who
        self.came = trio.Event()
        self.since = time.monotonic()
        self._end = end

    def end(self) -> None:
        """The version is sealed or abandoned: let the next one begin. Safe to call twice."""
        self._end(self)


class Turns:
    """The queue of one seed."""

    def __init__(self) -> None:
        self._queue: deque[Turn] = deque()
        """The first one has its turn."""

    @property
    def waiting(self) -> int:
        """How many trainers wait for their turn."""
        return max(0, len(self._queue) - 1)

    async def take(self, part: Part, who: str) -> Turn:
        """Wait for a turn; the caller must end it.

        Raises `Busy` at once when another trainer of the same part has its turn or waits for it, and after
        `TURN_WITHIN_S`.
        """
        for other in self._queue:
            if other.part == part:
                raise Busy(
                    f"Another trainer is publishing to this seed: {other.who}, the same part of the model ({part}). "
                    "Publish each part from one process at a time."
                )
        turn = Turn(part, who, self._remove)
        self._queue.append(turn)
        self._call_first()
        with trio.move_on_after(TURN_WITHIN_S):
            try:
                await turn.came.wait()
            except BaseException:
                turn.end()
                raise
        if not turn.came.is_set():
            turn.end()
            holder = self._queue[0]
            raise Busy(
                f"No turn to publish {part} came within {TURN_WITHIN_S:.0f} s: {holder.who} has had a version of "
                f"{holder.part} open for {time.monotonic() - holder.since:.0f} s. End that process if it is stuck."
            )
        return turn

    def _remove(self, turn: Turn) -> None:
        if turn in self._queue:
            self._queue.remove(turn)
            self._call_first()

    def _call_first(self) -> None:
        if self._queue and not self._queue[0].came.is_set():
            self._queue[0].since = time.monotonic()
            self._queue[0].came.set()
