"""Which schedule is run next: fresh ones, and crosses of those that reached something new.

A run that reached a pair of a state and an event that no run before it had reached is worth changing: its faults are
mixed with those of another seed, as fuzzers guided by coverage do with inputs. Everything follows from the first seed
and from what the runs before reached, so that a campaign can be repeated; a schedule that fails is written to a file.
"""

import random
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from scenarios.hunt.coverage import Coverage
from scenarios.hunt.schedule import Schedule

__all__ = ["Guide"]

_CROSSED: Final = 0.5
"""Share of the runs that are crosses, once there is something to cross."""
_KEPT, _TAKEN = 0.7, 0.4
"""Share of the faults of the schedule that reached something new, and of the other one, that a cross has."""
_PARENTS: Final = 32
"""The newest schedules that reached something new, from which crosses are made."""


class Guide:
    """Of one campaign."""

    def __init__(self, draw: Callable[[int], Schedule], first_seed: int) -> None:
        """`draw(seed)`: the fresh schedule of a seed."""
        self._draw, self._seed = draw, first_seed
        self._reached: set[tuple[str, str, str]] = set()
        self._parents: list[Schedule] = []

    def next(self) -> tuple[Schedule, int | None]:
        """The schedule of the next seed, and the seed of the one that it was crossed with; None: it is fresh."""
        fresh = self._draw(self._seed)
        rng = random.Random(f"guide {self._seed}")
        self._seed += 1
        if not self._parents or rng.random() >= _CROSSED:
            return fresh, None
        parent = rng.choice(self._parents)
        kept = [fault for fault in parent.faults if rng.random() < _KEPT]
        taken = [fault for fault in fresh.faults if rng.random() < _TAKEN]
        faults = tuple(sorted(kept + taken, key=lambda fault: fault.at_s))
        return replace(parent, seed=fresh.seed, faults=faults), parent.seed

    def learn(self, schedule: Schedule, coverage: Coverage) -> int:
        """The schedule was run and reached this. Returns how many pairs no run before it had reached."""
        new = coverage.pairs.keys() - self._reached
        self._reached |= new
        if new:
            self._parents = [*self._parents[1 - _PARENTS :], schedule]
        return len(new)
