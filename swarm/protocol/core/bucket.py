"""A token bucket: what a peer may cost us, in the long run and at once. Pure; the clock is an argument."""

from dataclasses import dataclass

__all__ = ["Bucket"]


@dataclass(slots=True)
class Bucket:
    """Holds at most `burst` tokens and gains `rate` a second. It begins full.

    `take` is for what can be refused. `spend` is for what has been done already: the bucket then goes into debt, and
    says how long its owner has to wait until the debt is paid.
    """

    rate: float
    """Tokens a second."""
    burst: float
    level: float = float("inf")
    at_s: float = 0.0
    """Local time as of which `level` stands."""

    def take(self, tokens: float, now: float) -> bool:
        """Take so many, if they are there: whether they were."""
        self._fill(now)
        if self.level < tokens:
            return False
        self.level -= tokens
        return True

    def spend(self, tokens: float, now: float) -> float:
        """Take so many whether they are there or not; seconds until the bucket is out of debt (0: it has none)."""
        self._fill(now)
        self.level -= tokens
        return max(0.0, -self.level / self.rate)

    def _fill(self, now: float) -> None:
        self.level = min(self.burst, self.level + max(0.0, now - self.at_s) * self.rate)
        self.at_s = now
