"""Waits with a deadline that log what they wait for.

A wait is written as a loop that looks again every fraction of a second. `Wait` holds the deadline of such a loop. It
logs what the loop waits for after `SAY_AFTER_S`, and then at growing intervals.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["Wait", "log", "logged_wait"]

SAY_AFTER_S: Final = 5.0
"""The first line is logged after this. A shorter wait does not make the user of a training loop wonder."""
SAY_AT_LEAST_EVERY_S: Final = 60.0
"""Upper bound of the interval between two lines, which otherwise doubles."""
LOOK_S: Final = 0.2
"""How often a wait for another process checks whether it should go on."""

log = logging.getLogger("node.trainers")
"""The trainer side's logger. Unless logging is configured, Python prints its warnings on stderr."""


class Wait:
    """The deadline of one wait, and its log lines."""

    def __init__(self, timeout_s: float, what: Callable[[], str]) -> None:
        """The wait begins now. `what()`: a clause such as "step 3 waits for rank 1 of 2", asked for at each line."""
        self._began = time.monotonic()
        self._what = what
        self._say_after_s = SAY_AFTER_S
        self.timeout_s = timeout_s
        self.deadline = self._began + timeout_s

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    def slice_s(self) -> float:
        """Seconds to sleep until the next look; never beyond the deadline."""
        return min(LOOK_S, max(0.0, self.deadline - time.monotonic()))

    def log_if_due(self) -> None:
        """Log what is waited for, if a line is due."""
        waited_s = self.waited_s
        if waited_s >= self._say_after_s:
            log.warning("%s; waiting for %.0f s now, for %.0f s at most.", self._what(), waited_s, self.timeout_s)
            self._say_after_s = waited_s + min(waited_s, SAY_AT_LEAST_EVERY_S)


@contextlib.contextmanager
def logged_wait(timeout_s: float, what: Callable[[], str]) -> Iterator[None]:
    """Log `what()` as a `Wait` does while the block runs. For blocks that cannot call `log_if_due` themselves."""
    wait, ended = Wait(timeout_s, what), threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_S):
            wait.log_if_due()

    thread = threading.Thread(target=watch, name="swarm-wait-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
