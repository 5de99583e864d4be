"""How many connections an edge is worth.

A TCP connection moves at most its window a round trip, and the window is bounded by the socket buffers, a third of
which the kernel needs for itself. Over a long path several connections together fill a link that one cannot. More than
needed do harm: each BBR connection keeps its own share of packets in the queue before the link, and two that suffice
carry more past random losses than eight do. Where the system lets us choose no BBR it is the other way round: the more
there are, the less one loss or one slow start costs.
"""

import math
from pathlib import Path
from typing import Final

__all__ = ["CONNECTION_COUNTS", "DEFAULT_MBIT", "socket_window_bytes", "target_connections"]

CONNECTION_COUNTS: Final = (1, 2, 4, 8)
_SHORT_S: Final = 0.02
"""Below this round trip, one: losses mend quickly, and a connection costs CPU time."""
DEFAULT_MBIT: Final = 1000.0
"""What an edge should be able to carry when nobody has said what our uplink is."""
_DEFAULT_BUFFER_BYTES: Final = 6_291_456
_SYSCTLS: Final = ("/proc/sys/net/ipv4/tcp_rmem", "/proc/sys/net/ipv4/tcp_wmem")


def target_connections(round_trip_s: float, window_bytes: int, mbit: float, by_bandwidth: bool) -> int:
    """Enough connections of `window_bytes` each for `mbit` at this round trip; one while that is 0 (not known).

    `by_bandwidth`: they are paced by measured bandwidth (BBR), so that neither loss nor idleness slows them.
    """
    if round_trip_s < _SHORT_S:
        return 1
    if not by_bandwidth:
        return CONNECTION_COUNTS[-1]
    wanted = math.ceil(mbit * 1e6 / 8 * round_trip_s / window_bytes)
    return next((each for each in CONNECTION_COUNTS if each >= wanted), CONNECTION_COUNTS[-1])


def socket_window_bytes() -> int:
    """The largest window of one connection here; the other end's is not known and taken to be no smaller."""
    largest = []
    for path in _SYSCTLS:
        try:
            largest.append(int(Path(path).read_text().split()[2]))
        except (OSError, ValueError, IndexError):  # no Linux, or a container without it
            largest.append(_DEFAULT_BUFFER_BYTES)
    return min(largest) * 2 // 3
