"""How fast a node generates: an exponential moving average and its spread. Pure."""

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["Rate"]

MEMORY_S: Final = 120.0
"""An observation over `t` seconds has the weight 1 - exp(-t / MEMORY_S): after about two minutes a node that became
slow is known as slow, and one unusual batch of a few seconds hardly counts."""


@dataclass(slots=True)
class Rate:
    """Tokens per second. Until something is observed, the rate is what the node claims."""

    claimed: float = 0.0
    """By the node's self-test; 0: unknown."""
    mean: float = 0.0
    spread: float = 0.0
    """Mean absolute deviation of the observations from the average."""
    observed_s: float = 0.0
    """Seconds of observation behind `mean`."""

    @property
    def value(self) -> float:
        return self.mean if self.observed_s else self.claimed

    @property
    def low(self) -> float:
        """A rate that the node hardly falls below; deadlines are computed from it."""
        return max(self.value - 2.0 * self.spread, self.value / 4.0)

    def observe(self, tokens: int, seconds: float) -> None:
        """The node, which had work, generated `tokens` in `seconds`."""
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
