"""Boot numbers of an authority: which are believed, and which is the next. Pure; Unix time is an argument.

A boot is numbered by the seconds since 2020, so that of two homes with one key (a copy, a backup, a reinstalled
machine) the one that was started last counts, and the other stops. A thief of the key, or an old copy of the home on a
machine with a wrong clock, could name the highest number, and no honest boot would ever count again. Therefore a number
that lies far ahead of the receiver's own clock is not believed.
"""

from typing import Final

__all__ = ["MAX_BOOT", "latest_boot", "next_boot"]

MAX_BOOT: Final = (1 << 31) - 1
"""The highest number that a heartbeat can carry: the year 2088."""
_BEGAN_S: Final = 1_577_836_800
"""2020-01-01, in Unix seconds."""
_SANE_S: Final = 1_767_225_600
"""2026-01-01: a clock that shows an earlier time is not set, as on a board without a battery, so it is not used."""
_AHEAD_S: Final = 30 * 86_400
"""30 days: more than working clocks differ, and short enough to wait for in the worst case."""


def latest_boot(unix_s: float) -> int:
    """The highest boot number that is believed while our clock shows `unix_s`."""
    if unix_s < _SANE_S:
        return MAX_BOOT
    return min(MAX_BOOT, int(unix_s) - _BEGAN_S + _AHEAD_S)


def next_boot(last: int, unix_s: float) -> int:
    """The number of a boot that starts now. `last`: the highest number of our own boots and of rivals that were
    believed. A `last` that is not believed any more, because our clock was wrong then, does not count."""
    counted = min(last, latest_boot(unix_s) - 1)
    return min(MAX_BOOT, max(counted + 1, int(unix_s) - _BEGAN_S, 1))
