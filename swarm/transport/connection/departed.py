"""What has left by a TCP connection, as the kernel counts it: whole packets, and not only what a program wrote.

Headers, acknowledgements of what comes in, and what is sent again take an uplink's time, too: of a slow one beside a
fast downlink several percent.
"""

import socket
import struct
from typing import Any, Final

__all__ = ["departed_bytes"]

_TCP_INFO: Final = 11
_LENGTH: Final = 208
"""Of struct tcp_info (linux/tcp.h) up to tcpi_bytes_sent, since Linux 4.19."""
_FIELDS: Final = struct.Struct("=136xI4xI52xQ")
"""tcpi_segs_out, tcpi_notsent_bytes, tcpi_bytes_sent (with what was sent again)."""
_HEADER_BYTES: Final = {socket.AF_INET: 52, socket.AF_INET6: 72}
"""IP and TCP, with timestamps."""


def departed_bytes(sock: Any) -> int | None:
    """Bytes of IP packets, sent or taken to be sent, of a socket (trio's or the standard library's).

    None where the system does not say.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LENGTH)
        segments, unsent, sent = _FIELDS.unpack(info)
    except (OSError, struct.error):
        return None
    return segments * _HEADER_BYTES.get(sock.family, 0) + unsent + sent
