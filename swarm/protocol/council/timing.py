"""The times of a council, in seconds, and how long a leader may lead.

A follower that answers an `Append` promises to elect nobody for `lease_s` of its own clock, from the moment at which it
took the message. The leader counts from the moment at which it sent the message, so its lease begins earlier. Clocks of
two machines need not show the same time, but their rates must not differ from true seconds by more than `drift`; so a
lease that the leader ends after `leads_s` of its own clock is over before the promise is.
"""

from typing import Final, NamedTuple

__all__ = ["LAN", "LOOPBACK", "TIMINGS", "WAN", "Timing"]


class Timing(NamedTuple):
    """Times of a council, all in seconds of a machine's own monotonic clock."""

    lease_s: float
    """How long the answer to an `Append` lends the lead."""
    beat_s: float
    """The pause between two `Append`s to a follower, whether or not there are entries."""
    jitter_s: float
    """A machine that may campaign waits a random time below this first, so that seldom two campaign at once."""
    resend_s: float
    """Entries that a follower has not acknowledged for this long are sent again."""
    drift: float = 0.01
    """By how much the rate of a clock may differ from true seconds, as a share of 1. Quartz clocks differ by less than
    0.0002, and the kernel corrects a monotonic clock's rate by at most 0.0005."""

    @property
    def leads_s(self) -> float:
        """How long a leader leads after it sent what a majority has answered: `lease_s` of the fastest clock that the
        drift allows, measured by the slowest, less 5 % in which the leader's process stops what it does."""
        return 0.95 * self.lease_s * (1 - self.drift) / (1 + self.drift)

    @property
    def takeover_s(self) -> float:
        """The limit, in true seconds, from a leader's last message until another one is elected, if a majority is up,
        hears one another within `beat_s`, and the first campaign succeeds."""
        return (self.lease_s + self.jitter_s) / (1 - self.drift) + 4 * self.beat_s


WAN: Final = Timing(lease_s=6.0, beat_s=1.0, jitter_s=2.0, resend_s=3.0)
LAN: Final = Timing(lease_s=3.0, beat_s=0.5, jitter_s=1.0, resend_s=1.5)
LOOPBACK: Final = Timing(lease_s=1.5, beat_s=0.25, jitter_s=0.5, resend_s=1.0)
TIMINGS: Final = {"wan": WAN, "lan": LAN, "loopback": LOOPBACK}
"""By preset."""
