"""How a node's time divides: at every moment it is in one of four states, so their seconds add up to all of it."""

from collections.abc import Callable
from typing import Final, Literal

__all__ = ["STATES", "State", "TimeAccounting"]

State = Literal["generate", "wait_work", "wait_version", "commit"]
STATES: Final[tuple[State, ...]] = ("generate", "wait_work", "wait_version", "commit")
"""generate: at least one sequence is being generated. wait_work: idle, without work. wait_version: idle, because the
engine's version is too old for the work there is. commit: nothing is generated because a version is being committed or
the engine is being loaded."""


class TimeAccounting:
    """Begins in `commit`. `clock`: monotonic, s."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[State, float] = dict.fromkeys(STATES, 0.0)
        self._state: State = "commit"
        self._since = clock()

    def enter(self, state: State) -> None:
        """The node is in `state` from now on."""
        now = self._clock()
        self._seconds[self._state] += now - self._since
        self._state, self._since = state, now

    def correct(self, seconds: float) -> None:
        """Move so many seconds from `generate` to `commit`: an engine reports a pause only when it is over."""
        self.enter(self._state)
        moved = min(seconds, self._seconds["generate"])
        self._seconds["generate"] -= moved
        self._seconds["commit"] += moved

    @property
    def state(self) -> State:
        return self._state

    @property
    def seconds(self) -> dict[State, float]:
        """Seconds by state, up to this moment."""
        self.enter(self._state)
        return dict(self._seconds)
