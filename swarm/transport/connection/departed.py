"""Bytes of IP packets that a TCP connection has sent, as the kernel counts them.

Besides the payload these have headers, acknowledgements of received data, and retransmissions. Those use the uplink,
too: several percent of a slow uplink beside a fast downlink.
"""

import socket
import struct
from typing import Any, Final

__all__ = ["departed_bytes"]

_TCP_INFO: Final = 11
_LENGTH: Final = 208
"""Length of struct tcp_info (linux/tcp.h) up to tcpi_bytes_sent, which Linux has since 4.19."""
_FIELDS: Final = struct.Struct("=136xI4xI52xQ")
"""tcpi_segs_out, tcpi_notsent_bytes, tcpi_bytes_sent (including retransmissions)."""
_HEADER_BYTES: Final = {socket.AF_INET: 52, socket.AF_INET6: 72}
"""IP and TCP headers of one packet, with TCP timestamps."""


def departed_bytes(sock: Any) -> int | None:
    """Bytes of IP packets that a socket (trio's or the standard library's) has sent or queued to send.

    None where the system does not say.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LENGTH)
        segments, unsent, sent = _FIELDS.unpack(info)
    except (OSError, struct.error):
        return None
    return segments * _HEADER_BYTES.get(sock.family, 0) + unsent + sent
