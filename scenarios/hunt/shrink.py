"""Makes a failing schedule small: which of its faults are needed, and how long the run has to be. Pure but for `fails`.

The faults are divided as in delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing
Input", 2002): parts of the list are left out, larger parts first, as long as the run still fails.
"""

from collections.abc import Callable

from msgspec.structs import replace

from scenarios.hunt.schedule import Schedule

__all__ = ["shrunk"]

Fails = Callable[[Schedule], bool]


def shrunk(schedule: Schedule, fails: Fails, most_runs: int = 200) -> Schedule:
    """The smallest schedule found that still fails. `fails(schedule)` runs one; it is called `most_runs` times at
    most."""
    left = most_runs

    def still_fails(candidate: Schedule) -> bool:
        nonlocal left
        left -= 1
        return fails(candidate)

    parts = 2
    while len(schedule.faults) > 1 and left > 0:
        size = -(-len(schedule.faults) // parts)
        smaller = None
        for first in range(0, len(schedule.faults), size):
            candidate = schedule.without(set(range(first, first + size)))
            if left > 0 and still_fails(candidate):
                smaller = candidate
                break
        if smaller is not None:
            schedule, parts = smaller, max(2, parts - 1)
        elif size == 1:
            break
        else:
            parts = min(len(schedule.faults), 2 * parts)
    if len(schedule.faults) == 1 and left > 0 and still_fails(schedule.without({0})):
        schedule = schedule.without({0})
    return _shorter(schedule, still_fails, lambda: left > 0)


def _shorter(schedule: Schedule, still_fails: Fails, may: Callable[[], bool]) -> Schedule:
    """With less time after the last fault, and with fewer nodes."""
    last_s = max((fault.at_s + fault.for_s for fault in schedule.faults), default=0.0)
    for seconds in (last_s + 2.0, last_s + 10.0, last_s + 20.0):
        if seconds < schedule.seconds and may() and still_fails(candidate := replace(schedule, seconds=seconds)):
            schedule = candidate
            break
    while schedule.nodes > 1 and may() and still_fails(candidate := replace(schedule, nodes=schedule.nodes - 1)):
        schedule = candidate
    return schedule
