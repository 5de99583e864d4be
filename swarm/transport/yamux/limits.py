"""Every number that bounds a yamux connection, in one place."""

from dataclasses import dataclass, replace

__all__ = ["YamuxLimits"]

_KIB = 1024
_MIB = 1024 * _KIB


@dataclass(frozen=True, slots=True)
class YamuxLimits:
    """Limits of a connection. A limit "for a peer" holds for all of its connections together (`PeerBudget`).

    With these defaults a peer can make us hold at most 48 x 256 KiB + 32 MiB = 44 MiB of unread data; with `lean()`,
    20 x 256 KiB + 1 MiB = 6 MiB. At most 1 MiB of unsent data waits on each connection.
    """

    max_frame_bytes: int = 16 * _MIB
    """Longest data frame that we accept, if its stream's window has room. js-libp2p sends a whole window as one frame;
    that costs us nothing, since we pass payload on as it arrives."""

    send_frame_bytes: int = 260 * _KIB
    """Longest data frame that we send: a piece of 256 KiB with its frame head. Longer frames need fewer headers; with
    shorter ones streams alternate more often."""

    send_queue_bytes: int = 1 * _MIB
    """Frames that wait for the socket, all streams together; writers wait beyond it. A longer queue only adds delay."""

    first_window_bytes: int = 2 * _MIB
    """A new stream's receive window, if the peer's budget has room. Credit is given back half a window at a time, so
    with this number once for each four pieces of 256 KiB."""

    max_window_bytes: int = 16 * _MIB
    """Largest receive window: 16 MiB fill 1.3 Gbit/s at 100 ms on one stream."""

    window_budget_bytes: int = 32 * _MIB
    """For a peer: receive windows of all its streams together, beyond 256 KiB each."""

    max_inbound_streams: int = 48
    """For a peer: streams that it may have open; one more is refused (RST). A member needs 16 for bulk (usually half of
    that: old ones end after new ones begin), 16 circuits through us if we are a relay, 2 for the control lane, and some
    10 more (gossip, identify, ping, hole punching, the next circuit). A relay that we use may open more
    (`reservations.RELAY_STREAMS`)."""

    max_outbound_streams: int = 128
    """Streams that we may have open on one connection."""

    accept_backlog: int = 64
    """Streams that the peer opened and we have not accepted yet; one more is refused (RST)."""

    max_control_frames: int = 4096
    """Small frames (pongs, windows, resets) that wait for the socket. One more ends the connection: the peer causes
    them and does not read."""

    allowance_bytes: int | None = None
    """Bytes of data frames that the peer may send in all before `Connection.widen`; more ends the connection. None: no
    limit."""

    units_per_s: float = 4000.0
    """For a peer: work that it may cause in the long run, in `cost.Cost`'s units of some 2.5 us: 1 % of a processor for
    empty frames. A peer that causes more is read later. Bulk pays for itself (`Cost.BYTES_A_UNIT`). Above some 200
    small messages a second, each in a packet of its own, we read every few milliseconds, several messages at once."""

    units_at_once: float = 32_000.0
    """For a peer: work at once, before anything waits: 2000 small messages, or 320 new streams."""

    library_reads_per_s: float = 200.0
    """For a peer: reads by the library's own protocols (identify, ping) in the long run. One read costs some 140 us,
    and 128 KiB of pings cause 4096 reads. Meanwhile the peer's bytes wait in its streams' windows."""

    library_reads_at_once: float = 500.0
    """For a peer: such reads at once."""

    ping_interval_s: float = 10.0
    """A ping is sent when nothing was heard from the peer for this long, and at this interval while the connection is
    in use; at least `silence_s`."""

    silence_s: float = 10.0
    """Time after a ping in which something must be heard, or the peer counts as gone. A stopped peer is noticed within
    `ping_interval_s` + `silence_s`."""

    stall_s: float = 180.0
    """How long a stream's writer waits for a reader that takes nothing. Readers may pause for a minute."""

    write_stall_s: float = 30.0
    """How long the socket may take none of the bytes that we write, before the connection counts as dead."""

    discard_bytes: int = 64 * _KIB
    """Bytes that may still arrive on a stream that we closed, and are dropped, before we reset it."""

    linger_s: float = 30.0
    """How long we remember a stream that we closed and the peer has not, before we reset it."""

    def lean(self) -> "YamuxLimits":
        """For a process that receives no bulk (the seed): a peer can make it hold 6 MiB, ten peers 60 MiB."""
        return replace(self, window_budget_bytes=1 * _MIB, max_inbound_streams=20)

    def narrow(self, streams: int, allowance_bytes: int = 32 * _KIB) -> "YamuxLimits":
        """For a stranger: this many streams, an allowance (a message of 8 KiB, negotiation and identify need less), and
        work for ten streams and 150 small messages: 10 ms."""
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
