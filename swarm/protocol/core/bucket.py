"""A token bucket: bounds what a peer may cost us, as a rate and as a burst. Pure; the clock is an argument."""

from dataclasses import dataclass

__all__ = ["Bucket"]


@dataclass(slots=True)
class Bucket:
    """Holds at most `burst` tokens and gains `rate` a second. It starts full.

    `take` is for work that can be refused. `spend` is for work that is done already: the bucket then goes into debt,
    and returns how long its owner has to wait until the debt is paid.
    """

    rate: float
    """Tokens a second."""
    burst: float
    level: float = float("inf")
    at_s: float = 0.0
    """Local time, in seconds, at which `level` was last brought up to date."""

    def take(self, tokens: float, now: float) -> bool:
        """Remove `tokens` and return True, or return False if there are fewer."""
        self._fill(now)
        if self.level < tokens:
            return False
        self.level -= tokens
        return True

    def spend(self, tokens: float, now: float) -> float:
        """Remove `tokens` even if there are fewer. Returns the seconds until the bucket is out of debt; 0: it is not in
        debt."""
        self._fill(now)
        self.level -= tokens
        return max(0.0, -self.level / self.rate)

    def _fill(self, now: float) -> None:
        self.level = min(self.burst, self.level + max(0.0, now - self.at_s) * self.rate)
        self.at_s = now
