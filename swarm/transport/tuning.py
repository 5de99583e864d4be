"""Socket options for streams that carry megabytes in bursts over long paths. Each is set where the system allows it."""

import socket
from typing import Any, Final

__all__ = ["BBR", "tune"]

BBR: Final = b"bbr"
"""Congestion control by measured bandwidth: a random loss does not halve it, and an idle minute does not send it back
to slow start, as it does with cubic unless root has switched that off for the machine."""

_CHOSEN: Final = BBR
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
