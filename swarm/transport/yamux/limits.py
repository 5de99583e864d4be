"""Every number that bounds a yamux connection, in one place."""

from dataclasses import dataclass, replace

__all__ = ["Limits"]

_KIB = 1024
_MIB = 1024 * _KIB


@dataclass(frozen=True, slots=True)
class Limits:
    """What is said "of a peer" holds for all of its connections together (`PeerBudget`).

    With these defaults a peer has us hold at most 48 x 256 KiB + 32 MiB = 44 MiB of unread data; with those of
    `lean()` 20 x 256 KiB + 1 MiB = 6 MiB. Unsent are at most 1 MiB a connection.
    """

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
    """Of a peer: receive windows of all streams together, beyond 256 KiB each."""

    max_inbound_streams: int = 48
    """Of a peer: streams that it may have open. One more is refused (RST). A member needs 16 for bulk (half of that as
    a rule: old ones end later than new ones begin), 16 circuits through us if we are a relay, 2 for the control lane,
    and some 10 more (gossip, identify, ping, hole punching, the next circuit). A relay of ours may open more
    (`places.RELAY_STREAMS`)."""

    max_outbound_streams: int = 128

    accept_backlog: int = 64
    """Streams that the peer opened and nobody accepted yet. One more is refused (RST)."""

    max_control_frames: int = 4096
    """Small frames (pongs, windows, resets) that wait for the socket. A peer that provokes more is dropped."""

    allowance_bytes: int | None = None
    """Bytes of data frames that the peer may send in all before `widen`; None: no bound. One that sends more loses the
    connection."""

    units_per_s: float = 4000.0
    """Of a peer: work that it may cause in the long run, in `cost.Cost`'s units of some 2.5 us: 1 % of a processor for
    empty frames. A peer that causes more is read later. Bulk pays for itself (`Cost.BYTES_A_UNIT`); above some 200
    small messages a second, each in a packet of its own, several are read at once, every few milliseconds."""

    units_at_once: float = 32_000.0
    """And so much at once: 2000 small messages, or 320 new streams, before anything waits."""

    library_reads_per_s: float = 200.0
    """Of a peer: reads by the library's own protocols (identify, ping). Each costs some 140 us; 128 KiB of pings are
    4096 of them. The rest of the peer's bytes waits in its streams' windows."""

    library_reads_at_once: float = 500.0

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

    def lean(self) -> "Limits":
        """For a process that takes no bulk (the seed): a peer can have it hold 6 MiB, so ten of them 60 MiB."""
        return replace(self, window_budget_bytes=1 * _MIB, max_inbound_streams=20)

    def narrow(self, streams: int, allowance_bytes: int = 32 * _KIB) -> "Limits":
        """For a peer that has shown no grant yet: `streams` streams, 32 KiB in all (a message of 8 KiB, negotiation and
        identify), and work for ten streams and 150 small messages, or 10 ms."""
        return replace(
            self,
            max_inbound_streams=streams,
            accept_backlog=streams,
            window_budget_bytes=0,
            allowance_bytes=allowance_bytes,
            units_per_s=250.0,
            units_at_once=4000.0,
            library_reads_per_s=5.0,
            library_reads_at_once=30.0,
        )
