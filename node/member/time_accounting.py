"""Where a node's time goes: at every moment it is in one of four states, so the seconds add up to all of it."""

from collections.abc import Callable
from typing import Final, Literal

__all__ = ["STATES", "State", "TimeAccounting"]

State = Literal["generate", "wait_work", "wait_version", "commit"]
STATES: Final[tuple[State, ...]] = ("generate", "wait_work", "wait_version", "commit")
"""generate: at least one sequence is being drawn. wait_version: idle, because what the engine holds is too old for the
work there is. commit: nothing is drawn because a version is being taken, or the engine filled anew."""


class TimeAccounting:
    """`clock`: any that only moves forward, s."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[State, float] = dict.fromkeys(STATES, 0.0)
        self._state: State = "commit"
        self._since = clock()

    def enter(self, state: State) -> None:
        """From now on it is `state`."""
        now = self._clock()
        self._seconds[self._state] += now - self._since
        self._state, self._since = state, now

    def correct(self, seconds: float) -> None:
        """Of what was just booked as `generate`, so much was `commit`: who draws learns of a pause when it is over."""
        self.enter(self._state)
        moved = min(seconds, self._seconds["generate"])
        self._seconds["generate"] -= moved
        self._seconds["commit"] += moved

    @property
    def state(self) -> State:
        return self._state

    @property
    def seconds(self) -> dict[State, float]:
        """By state, up to this moment."""
        self.enter(self._state)
        return dict(self._seconds)
