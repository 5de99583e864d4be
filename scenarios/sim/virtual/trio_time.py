"""Trio tasks in virtual time: what the product runs on trio (a node's worker, the ledger's service) runs beside the
simulated cores and sleeps by the same clock."""

import contextlib
import random
from collections.abc import Callable, Iterator
from unittest.mock import patch

import trio
import trio.testing
from trio._core import _run as scheduler

from scenarios.sim.virtual.clock import Clock

__all__ = ["VirtualTime", "one_order", "pass_time"]


@contextlib.contextmanager
def one_order(seed: int = 0) -> Iterator[None]:
    """Make the order of tasks that are due at the same instant follow from `seed`, so that a run can be repeated. Trio
    chooses at random otherwise. It has this switch for Hypothesis, without a public name."""
    with (
        patch.object(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        patch.object(scheduler, "_r", random.Random(seed)),
    ):
        yield


class VirtualTime(trio.abc.Clock):
    """A trio clock that shows the simulator's time. It advances only in `pass_time`, while every task waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return self._clock.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return 0 when the deadline has passed, else any large number: only `pass_time` advances the clock."""
        return 0.0 if deadline <= self._clock.now else 1e6


async def pass_time(clock: Clock, done: Callable[[], bool], limit_s: float) -> bool:
    """Advance virtual time until `done()` is true, for at most `limit_s`. Return whether it is.

    A callback of the simulator that wakes a trio task must call `clock.halt()`, so that the task runs before time
    advances further.
    """
    end = clock.now + limit_s
    while not done():
        await trio.testing.wait_all_tasks_blocked()
        if clock.now >= end:
            return done()
        due = clock.now + trio.lowlevel.current_statistics().seconds_to_next_deadline
        clock.run(min(end, due))
    return True
