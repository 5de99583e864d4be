"""How many parallel connections a path to a peer needs.

A TCP connection carries at most one window each round trip. The window is bounded by the socket buffers, a third of
which the kernel needs for itself. Over a long path several connections together fill a link that one cannot. More than
needed do harm: each BBR connection keeps packets in the queue before the link, and where two suffice, two carry more
past random losses than eight do. Where the system does not let us choose BBR, more connections are better: one loss, or
one slow start, then slows a smaller part.
"""

import math
from pathlib import Path
from typing import Final

__all__ = ["CONNECTION_COUNTS", "DEFAULT_MBIT", "socket_window_bytes", "target_connections"]

CONNECTION_COUNTS: Final = (1, 2, 4, 8)
_SHORT_S: Final = 0.02
"""Below this round trip one connection is enough: it recovers quickly from losses, and each one costs CPU time."""
DEFAULT_MBIT: Final = 1000.0
"""Our uplink in Mbit/s if the user does not state it."""
_DEFAULT_BUFFER_BYTES: Final = 6_291_456
"""Linux's default for the third number of tcp_rmem, where /proc cannot be read."""
_SYSCTLS: Final = ("/proc/sys/net/ipv4/tcp_rmem", "/proc/sys/net/ipv4/tcp_wmem")


def target_connections(round_trip_s: float, window_bytes: int, mbit: float, by_bandwidth: bool) -> int:
    """The number of connections with a window of `window_bytes` each that carry `mbit` (Mbit/s) at this round trip; 1
    while the round trip is 0 (not known).

    `by_bandwidth`: they are paced by measured bandwidth (BBR), so that neither loss nor idle time slows them.
    """
    if round_trip_s < _SHORT_S:
        return 1
    if not by_bandwidth:
        return CONNECTION_COUNTS[-1]
    wanted = math.ceil(mbit * 1e6 / 8 * round_trip_s / window_bytes)
    return next((each for each in CONNECTION_COUNTS if each >= wanted), CONNECTION_COUNTS[-1])


def socket_window_bytes() -> int:
    """The largest TCP window of a connection on this machine. We assume that the other end's is no smaller."""
    largest = []
    for path in _SYSCTLS:
        try:
            largest.append(int(Path(path).read_text().split()[2]))
        except (OSError, ValueError, IndexError):  # not Linux, or a container without this file
            largest.append(_DEFAULT_BUFFER_BYTES)
    return min(largest) * 2 // 3
