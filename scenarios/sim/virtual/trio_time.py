"""Trio tasks in the simulator's time: what the product runs on trio (a node's worker, the ledger's service) lives
beside simulated cores, and sleeps by the same virtual clock."""

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
    """Which of the tasks that are due in one instant goes first follows from `seed`, where trio would toss a coin: so a
    run can be had again. Trio has this for Hypothesis, and no public name for it."""
    with (
        patch.object(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        patch.object(scheduler, "_r", random.Random(seed)),
    ):
        yield


class VirtualTime(trio.abc.Clock):
    """Trio's clock is the simulator's. It moves only while `pass_time` runs, when every task waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return self._clock.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Seconds of real time until then: none, or any number, for time passes when we say so."""
        return 0.0 if deadline <= self._clock.now else 1e6


async def pass_time(clock: Clock, done: Callable[[], bool], limit_s: float) -> bool:
    """Let virtual time pass until `done()`, for at most `limit_s`; whether it is.

    Whoever changes what trio tasks wait for must say `clock.halt()`: then they have their turn before time goes on.
    """
    end = clock.now + limit_s
    while not done():
        await trio.testing.wait_all_tasks_blocked()
        if clock.now >= end:
            return done()
        due = clock.now + trio.lowlevel.current_statistics().seconds_to_next_deadline
        clock.run(min(end, due))
    return True
