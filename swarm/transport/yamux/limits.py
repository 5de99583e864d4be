"""Every number that bounds a yamux connection, in one place."""

from dataclasses import dataclass

__all__ = ["Limits"]

_KIB = 1024
_MIB = 1024 * _KIB


@dataclass(frozen=True, slots=True)
class Limits:
    """With these defaults a connection holds at most 128 x 256 KiB + 32 MiB of unread data, and 1 MiB unsent."""

    max_frame_bytes: int = 16 * _MIB
    """Longest data frame that we accept, if its stream's window has room. js-libp2p sends whole windows as one frame;
    that costs us nothing, since payload is passed on as it arrives."""

    send_frame_bytes: int = 128 * _KIB
    """Longest data frame that we send. Longer: fewer headers; shorter: streams take finer turns."""

    send_queue_bytes: int = 1 * _MIB
    """Frames that wait for the socket, all streams together. A writer beyond it waits. More only adds delay."""

    first_window_bytes: int = 2 * _MIB
    """A new stream's receive window, as far as the budget goes. What was read is given back half a window at a time, so
    with this once for four pieces of 256 KiB."""

    max_window_bytes: int = 16 * _MIB
    """What a receive window may grow to: 16 MiB fill 1.3 Gbit/s at 100 ms on one stream."""

    window_budget_bytes: int = 32 * _MIB
    """Receive windows of all streams together, beyond 256 KiB each."""

    max_inbound_streams: int = 128
    """Streams that the peer may have open. One more is refused (RST)."""

    max_outbound_streams: int = 128

    accept_backlog: int = 64
    """Streams that the peer opened and nobody accepted yet. One more is refused (RST)."""

    max_control_frames: int = 4096
    """Small frames (pongs, windows, resets) that wait for the socket. A peer that provokes more is dropped."""

    ping_interval_s: float = 10.0
    """How often the other end is asked for a sign of life; a longer `silence_s` stretches it. It keeps NAT mappings."""

    silence_s: float = 10.0
    """How long after a ping with nothing heard the peer counts as gone. A stopped one is found within the sum."""

    stall_s: float = 180.0
    """How long a stream's writer waits for a reader that takes nothing. Well over a minute: readers may pause."""

    write_stall_s: float = 30.0
    """How long the socket may take nothing at all of what we write, before the connection counts as dead."""

    discard_bytes: int = 64 * _KIB
    """What may still arrive on a stream that we closed, and is thrown away, before the peer is told to stop (RST)."""

    linger_s: float = 30.0
    """How long a stream that we closed is remembered for the peer to close its half, before it is reset."""
