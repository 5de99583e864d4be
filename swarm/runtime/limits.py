"""The shell's own bounds: what it keeps in memory for a peer, and how long it waits for one."""

import math
from dataclasses import dataclass

from swarm.protocol.core.wire import MAX_MESSAGE_BYTES

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, sizes in bytes."""

    message_bytes: int = MAX_MESSAGE_BYTES
    """The longest control message that we read of a member. A node is sent rosters and seals of megabytes."""
    seed_message_bytes: int = 1280 << 10
    """And at the seed, to which nobody has that much to say: work of 1 MiB, or what a child holds of large versions."""
    stranger_message_bytes: int = 8 << 10
    """The longest control message of a peer that has not proven that it belongs here: it may ask to join, or greet."""
    large_message_bytes: int = 64 << 10
    large_messages: int = 2
    """Of control messages longer than this, so many of all peers are decoded and wait for the core at a time: a list
    takes twelve times its bytes once it is decoded. The others wait undecoded."""
    control_queue_bytes: int = 4 << 20
    """Control messages waiting for one peer: the seal of a large version, or a roster of 10,000 members, and what comes
    meanwhile. A peer that lets more gather does not read: it is closed."""
    control_queue_messages: int = 8192
    """And how many of them: a hundred a second, which is more than honest peers are sent, for longer than
    `write_deadline_s`. Short answers that nobody reads would cost seconds of the core before they reach the bytes."""
    unread_bytes: int = 1 << 20
    unread_messages: int = 1024
    """While more than this waits for a peer, we read no further control message of it: it has answers to read first.
    Two peers that both let a megabyte gather would wait for one another until `write_deadline_s`; no honest pair does,
    since only the authority has megabytes to say."""
    messages_s: float = 500.0
    messages_at_once: float = 4096.0
    """Control messages of one peer that we read a second, and after a pause. An honest peer sends some ten a second for
    each stripe that it takes from us, at any speed. Each costs 40 us, so ten peers that send without end cost a fifth
    of a core."""
    bulk_queue_items: int = 1 << 14
    """Headers, pieces, blobs and blocks waiting for one peer, some 300 bytes each. The core's credit keeps pushes far
    below this, so only a peer that asks without reading gets here."""
    blobs_waiting: int = 256
    """Blobs and blocks that one peer may have us keep in mind. A member that catches up asks for 16 at a time."""
    bulk_idle_s: float = 600.0
    """A bulk stream beyond the first that carried nothing for so long is closed. Longer than most training steps: a new
    connection costs round trips and begins slowly."""
    bulk_retry_s: float = 30.0
    """When a further bulk stream could not be had, the next is tried after this."""
    bulk_streams_in: int = 16
    """Bulk streams of one peer that we read: twice what it needs, since old ones may end later than new ones begin."""
    write_bytes: int = 256 << 10
    """Frames are gathered up to this size before they are written: fewer, larger TLS records and system calls."""
    part_bytes: int = 128 << 10
    """Body of a PART frame."""
    dial_deadline_s: float = 15.0
    """Connecting and opening the control stream; three lost SYNs fit."""
    probes: int = 16
    """Peers dialed back at a time: a crowd that joins must not meet a crowd of handshakes of our own."""
    write_deadline_s: float = 90.0
    """`write_bytes` must leave within this. Well over a minute, for which a peer whose disk or GPU is busy may pause;
    one that is frozen altogether is found by the transport in 20 s."""
    frame_deadline_s: float = 30.0
    """The rest of a frame or message must follow its head within this."""
    flush_deadline_s: float = 2.0
    """What is queued when we close a session (a refusal, a goodbye) has this long to leave."""
    crossing_s: float = 10.0
    """A second session from a peer within this time of the first is taken for a crossing; later it is a return: the
    peer lost the first one before we noticed."""
    request_late_bytes: int = 16 << 20
    """Parts that come after we gave a request up are thrown away; a peer may owe us so much."""
    events: int = 64
    """Events of one peer (and of our own) that wait for the core. With more, whoever reads from that peer waits, and so
    does the peer."""
    events_bytes: int = 2 << 20
    """And their bytes: two of the largest messages that are sent to a seed."""
    store_memory_bytes: int = 64 << 20
    """Pieces held in memory before their chunks are whole; beyond it receiving waits for the disk."""
    stage_bytes: int = 2 << 30
    """Decoded changes held until their seal; beyond it chunks stay coded and are decoded at the seal."""
    anchor_every: int = 8
    """A checkpoint is written to disk every so many versions: a start replays at most that many."""
    retain_versions: int = 16
    """Sealed versions whose chunks stay on disk; as in `Tuning`."""
    sessions: int = 1024
    """Sessions at a time; more streams are refused."""
    requests_per_peer: int = 64
    """Blobs and blocks asked of one peer and not answered; the core asks for a few, older ones it has given up."""
    workers: int = 2
    """Chunks decoded at a time."""
    up_mbit: float = math.inf
    """What bulk streams together may send at; see `pacing`. Infinite: nobody said what the uplink carries."""
