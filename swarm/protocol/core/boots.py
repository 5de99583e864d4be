"""Boot numbers of an authority: which can be believed, and which is the next. Pure; Unix time is an argument.

Boots are numbered by the second since 2020, so that of two homes with one key (a copy, a backup, a machine set up anew)
the one that was started last counts. The older one stops. So whoever has the key, or an old copy of the home on a
machine with a wrong clock, could name the last number that there is, and no honest boot would ever count again.
Therefore nobody believes a number that lies far ahead of its own clock.
"""

from typing import Final

__all__ = ["MAX_BOOT", "latest_boot", "next_boot"]

MAX_BOOT: Final = (1 << 31) - 1
"""As a heartbeat can name it: the year 2088."""
_BEGAN_S: Final = 1_577_836_800
"""2020-01-01."""
_SANE_S: Final = 1_767_225_600
"""2026-01-01: a clock that says less is not set, as on a board without a battery, and refutes nothing."""
_AHEAD_S: Final = 30 * 86_400
"""More than clocks that people rely on are apart, and short enough to wait for in the worst case."""


def latest_boot(unix_s: float) -> int:
    """The last boot number that is believed when our clock says so."""
    if unix_s < _SANE_S:
        return MAX_BOOT
    return min(MAX_BOOT, int(unix_s) - _BEGAN_S + _AHEAD_S)


def next_boot(last: int, unix_s: float) -> int:
    """The number of a boot that begins now. `last`: the highest of our own and of rivals that were believed; one that
    cannot be believed any more (our clock was wrong) does not count."""
    counted = min(last, latest_boot(unix_s) - 1)
    return min(MAX_BOOT, max(counted + 1, int(unix_s) - _BEGAN_S, 1))
