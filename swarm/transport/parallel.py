"""How many connections an edge is worth.

A TCP connection moves at most its window a round trip, and the window is bounded by the socket buffers, half of which
the kernel keeps for itself. Over a long path several connections together fill a link that one cannot; they also share
a loss between them.
"""

import math
from pathlib import Path
from typing import Final

__all__ = ["WAYS", "socket_window_bytes", "ways"]

WAYS: Final = (1, 4, 8)
_SHORT_S: Final = 0.02
"""Below this round trip, one: losses mend quickly, and a connection costs CPU time."""
_TARGET_BYTES_S: Final = 125_000_000
"""A gigabit a second: what an edge should be able to carry."""
_HEADROOM: Final = 1.5
_DEFAULT_BUFFER_BYTES: Final = 6_291_456
_SYSCTLS: Final = ("/proc/sys/net/ipv4/tcp_rmem", "/proc/sys/net/ipv4/tcp_wmem")


def ways(round_trip_s: float, window_bytes: int) -> int:
    """1, 4 or 8: enough connections of `window_bytes` each for a gigabit at this round trip, with headroom."""
    if round_trip_s < _SHORT_S:
        return 1
    wanted = math.ceil(_HEADROOM * _TARGET_BYTES_S * round_trip_s / window_bytes)
    return next((each for each in WAYS if each >= wanted), WAYS[-1])


def socket_window_bytes() -> int:
    """The largest window of one connection here; the other end's is not known and taken to be no smaller."""
    largest = []
    for path in _SYSCTLS:
        try:
            largest.append(int(Path(path).read_text().split()[2]))
        except (OSError, ValueError, IndexError):  # no Linux, or a container without it
            largest.append(_DEFAULT_BUFFER_BYTES)
    return min(largest) // 2
