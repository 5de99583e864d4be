"""Knows whether the seed is up, and how long a publish waits for one that is not."""

import threading
import time
from pathlib import Path
from typing import Final

from node.ipc.channel import Channel
from node.trainers.connection.patience import Wait, log
from node.trainers.connection.seedlink import SeedProcess, dial
from node.trainers.errors import SwarmDown

__all__ = ["SeedWatch"]

RECONNECT_S: Final = 60.0
"""A seed that is restarted within this time after its end costs a publish nothing but the time."""


class SeedWatch:
    """Whether the seed is up, as the trainer's thread and the publish line's thread found it.

    The kernel closes a socket when its process dies, so the end of the seed is seen at once. Its end and its return are
    each logged once.
    """

    def __init__(self, home: Path, process: SeedProcess | None) -> None:
        """`process`: the seed, if this process started it. Nothing restarts such a seed, so no publish waits for it."""
        self._home, self._process = home, process
        self._lost_at: float | None = None
        self._lock = threading.Lock()

    @property
    def away_s(self) -> float | None:
        """Seconds since the seed was found to be down; None while it is up."""
        return None if (lost_at := self._lost_at) is None else time.monotonic() - lost_at

    @property
    def given_up(self) -> bool:
        """Whether the seed has been down for so long that nothing waits for it any more."""
        away_s = self.away_s
        return away_s is not None and away_s >= self._grace_s

    @property
    def _grace_s(self) -> float:
        return RECONNECT_S if self._process is None or self._process.ended() is None else 0.0

    def note_lost(self) -> None:
        """The seed does not answer at its socket."""
        with self._lock:
            if self._lost_at is not None:
                return
            self._lost_at = time.monotonic()
        log.warning(
            "The seed of %s has ended. What is published waits for it to be started again, for %.0f s at most.",
            self._home, self._grace_s,
        )  # fmt: skip

    def note_back(self) -> None:
        """The seed answers at its socket."""
        with self._lock:
            away_s, self._lost_at = self.away_s, None
        if away_s is not None:
            log.warning("The seed of %s is back, after %.0f s.", self._home, away_s)

    def check_hung_up(self, channel: Channel) -> None:
        """Notice that the seed at the other end of `channel` has ended. Never blocks."""
        if not channel.closed and channel.hung_up():
            self.note_lost()

    def is_up(self, channel: Channel | None) -> bool:
        """Whether a seed can be published to, over `channel` or over a new connection of the line's thread."""
        if channel is not None and not channel.hung_up():
            return True
        try:
            dial(self._home).close()
        except SwarmDown:
            self.note_lost()
            return False
        self.note_back()
        return True

    def wait_until_up(self, channel: Channel | None, step: int, wait: Wait) -> None:
        """`channel`: a connection of this process, if it has one.

        Raises `SwarmDown` when the seed is not restarted within `RECONNECT_S` of its end, or before `wait` is over.
        Logs at once that it waits, because the wait may stop a training loop for a minute.
        """
        logged = False
        while not self.is_up(channel):
            if wait.over or self.given_up:
                raise SwarmDown(f"Step {step} was not published. {self.explain()}")
            if not logged:
                logged = True
                left_s = min(wait.deadline - time.monotonic(), self._grace_s - (self.away_s or 0.0))
                log.warning(
                    "publish of step %s waits for the seed of %s to be started again, for %.0f s at most.",
                    step, self._home, max(0.0, left_s),
                )  # fmt: skip
            wait.log_if_due()
            time.sleep(wait.slice_s())

    def explain(self) -> str:
        """Why the seed is down and what to do, for an error's text."""
        if self._process is not None and (last_words := self._process.ended()) is not None:
            return f"The seed that this trainer started has ended: {last_words}"
        return (
            f"The seed of {self._home} has ended, {self.away_s or 0.0:.0f} s ago, and was not started again. Start it: "
            "swarm-node seed --base FOLDER"
        )
