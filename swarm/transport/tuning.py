"""Socket options for connections that carry megabytes in bursts over long paths, set where the system allows them."""

import socket
import struct
from typing import Any, Final

__all__ = ["BBR", "PAUSE_S", "awaken", "tune"]

BBR: Final = b"bbr"
"""Congestion control by measured bandwidth. A random loss does not halve its rate, and an idle minute does not return
it to slow start. With cubic it does, unless root has turned that off (net.ipv4.tcp_slow_start_after_idle)."""

PAUSE_S: Final = 1.0
"""A write after a pause this long calls `awaken` first."""
_CHOSEN: Final = BBR
"""What `tune` asks for; the benchmark over emulated paths replaces it."""
_CC_INFO: Final = 26
"""TCP_CC_INFO of linux/tcp.h, which Python's `socket` does not name. For BBR (linux/inet_diag.h): bandwidth in two
words, shortest round trip, pacing gain and window gain, both in 256ths."""
_STARTING_GAIN: Final = 512
"""A pacing gain above 2 (in 256ths) occurs only in BBR's startup phase, where it is 2.89."""
_UNSENT_BYTES: Final = 262_144
"""TCP_NOTSENT_LOWAT: the socket becomes writable when less than this is unsent. trio's 16 KiB suits small messages; for
bulk it causes sixteen times as many wake-ups. 256 KiB delay a later message on the same connection by 2 ms at a
gigabit a second."""

_DEAD_MS: Final = 30_000
"""TCP_USER_TIMEOUT: data that is not acknowledged for this long ends the connection (`YamuxLimits` bounds silence)."""


def tune(sock: Any) -> str:
    """Set the options on a TCP socket (trio's or the standard library's) that the system allows.

    Returns the name of the congestion control in use, "" where the system does not say.
    """
    for level, option, value in (
        (socket.IPPROTO_TCP, getattr(socket, "TCP_NODELAY", None), 1),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_NOTSENT_LOWAT", None), _UNSENT_BYTES),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", None), _DEAD_MS),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_CONGESTION", None), _CHOSEN),
    ):
        try:
            if option is not None:
                sock.setsockopt(level, option, value)
        except OSError:
            pass  # this kernel lacks the option, or does not let users choose the algorithm
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).partition(b"\0")[0].decode()
    except (OSError, AttributeError):
        return ""


def awaken(sock: Any) -> None:
    """Restart BBR before the first write after a pause, if it is still in its startup phase; the window stays.

    A connection that only ever sent short bursts never leaves that phase, and its measurements hurt the next burst: the
    bandwidth is too low (a burst divided by a round trip), and the shortest round trip may be ten seconds old, so that
    BBR measures it again, with at most four packets under way for 0.2 s, in the middle of the burst. Setting the
    algorithm again discards both measurements.
    """
    try:
        _, _, _, gain, _ = struct.unpack("5I", sock.getsockopt(socket.IPPROTO_TCP, _CC_INFO, 20))
        if gain > _STARTING_GAIN:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, BBR)
    except (OSError, AttributeError, struct.error):
        pass  # another algorithm, which gives less information or none, or another system
