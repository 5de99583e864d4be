"""A trainer's waits: each says what it waits for when it takes long, and ends by its own deadline.

Waits are written as loops that look again every fraction of a second. `Wait` holds the deadline of such a loop and
logs, after five seconds and then ever more rarely, what the loop still waits for.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["Wait", "log", "saying"]

SAY_AFTER_S: Final = 5.0
"""A person who watches a training loop does not wonder about a shorter wait."""
SAY_AT_LEAST_EVERY_S: Final = 60.0
LOOK_S: Final = 0.2
"""How often a wait for another process looks whether it should go on."""

log = logging.getLogger("node.trainers")
"""Without any configuration Python prints its warnings on stderr."""


class Wait:
    """`what()`: a clause such as "step 3 waits for rank 1 of 2", made anew each time it is needed."""

    def __init__(self, timeout_s: float, what: Callable[[], str]) -> None:
        self._began = time.monotonic()
        self._what = what
        self._say_after_s = SAY_AFTER_S
        self.timeout_s = timeout_s
        self.deadline = self._began + timeout_s

    @property
    def waited_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    @property
    def over(self) -> bool:
        """The deadline has passed."""
        return time.monotonic() >= self.deadline

    def slice_s(self) -> float:
        """For how long to wait until the next look: never beyond the deadline."""
        return min(LOOK_S, max(0.0, self.deadline - time.monotonic()))

    def say(self) -> None:
        """Log what is waited for, if that is due."""
        waited_s = self.waited_s
        if waited_s >= self._say_after_s:
            log.warning("%s; waiting for %.0f s now, for %.0f s at most.", self._what(), waited_s, self.timeout_s)
            self._say_after_s = waited_s + min(waited_s, SAY_AT_LEAST_EVERY_S)


@contextlib.contextmanager
def saying(timeout_s: float, what: Callable[[], str]) -> Iterator[None]:
    """Log `what()` as a `Wait` does while the block, which cannot look up itself, takes long."""
    wait, over = Wait(timeout_s, what), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            wait.say()

    thread = threading.Thread(target=look, name="swarm-saying", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
