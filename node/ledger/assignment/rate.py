"""How fast a node generates: an average that forgets, and its spread. Plain numbers, no clock."""

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["Rate"]

MEMORY_S: Final = 120.0
"""An observation of `t` seconds weighs 1 - exp(-t / memory): a box that becomes slow is known as slow after about two
minutes, and one odd batch of a few seconds hardly counts."""


@dataclass(slots=True)
class Rate:
    """Tokens a second. Until something was measured it is what the node itself claims (a self-test; 0: not known)."""

    claimed: float = 0.0
    mean: float = 0.0
    spread: float = 0.0
    """Mean absolute deviation of observations from the average."""
    observed_s: float = 0.0
    """Seconds of observation behind `mean`."""

    @property
    def value(self) -> float:
        return self.mean if self.observed_s else self.claimed

    @property
    def low(self) -> float:
        """A rate that the node will hardly fall below: deadlines are made from it."""
        return max(self.value - 2.0 * self.spread, self.value / 4.0)

    def observe(self, tokens: int, seconds: float) -> None:
        """`tokens` came in `seconds` during which the node had work."""
        if seconds <= 0.0:
            return
        sample = tokens / seconds
        if not self.observed_s:
            self.mean = sample
        else:
            weight = 1.0 - math.exp(-seconds / MEMORY_S)
            self.spread += weight * (abs(sample - self.mean) - self.spread)
            self.mean += weight * (sample - self.mean)
        self.observed_s += seconds
