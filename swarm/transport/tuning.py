"""Socket options for streams that carry megabytes in bursts over long paths. Each is set where the system allows it."""

import socket
import struct
from typing import Any, Final

__all__ = ["BBR", "PAUSE_S", "awaken", "tune"]

BBR: Final = b"bbr"
"""Congestion control by measured bandwidth: a random loss does not halve it, and an idle minute does not send it back
to slow start, as it does with cubic unless root has switched that off for the machine."""

PAUSE_S: Final = 1.0
"""Who writes after so long has paused: `awaken`."""
_CHOSEN: Final = BBR
_CC_INFO: Final = 26
"""TCP_CC_INFO of linux/tcp.h, which the library does not name. Of BBR (linux/inet_diag.h): bandwidth as two words, the
shortest round trip, the gain of the pacing and that of the window, in 256ths."""
_STARTING_GAIN: Final = 512
"""Nothing but BBR's first phase paces at more than twice the bandwidth (at 2.89 times)."""
_UNSENT_BYTES: Final = 262_144
"""The kernel asks for more when less than this is unsent. trio's 16 KiB suits small messages; for bulk it means sixteen
wake-ups where one would do. What waits here delays a later message on the same connection by 2 ms at a gigabit."""

_DEAD_MS: Final = 30_000
"""Data that the other host has not acknowledged for this long ends the connection, as does silence (yamux.Limits)."""


def tune(sock: Any) -> str:
    """Set what can be set on a TCP socket, trio's or the standard library's.

    Returns the congestion control in use ("" where the system does not say).
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
            pass  # an option that this kernel lacks, or an algorithm that it does not let users choose
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).partition(b"\0")[0].decode()
    except (OSError, AttributeError):
        return ""


def awaken(sock: Any) -> None:
    """What comes now ends a pause. A connection that never had more to send than a burst has BBR in its first phase
    still, and it has learnt two things wrong: that the path is as slow as a burst divided by a round trip, by which it
    paces the next one; and since when it knows the shortest round trip, which it measures anew after ten seconds, with
    no more than four packets under way for 0.2 s, and be it amid a burst. Choosing it once more makes it forget both;
    the window stays.
    """
    try:
        _, _, _, gain, _ = struct.unpack("5I", sock.getsockopt(socket.IPPROTO_TCP, _CC_INFO, 20))
        if gain > _STARTING_GAIN:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, BBR)
    except (OSError, AttributeError, struct.error):
        pass  # another algorithm, which says less or nothing, or another system
