"""Bounds of the runtime: memory for each peer, and deadlines."""

import math
from dataclasses import dataclass

from swarm.protocol.core.wire import MAX_MESSAGE_BYTES

__all__ = ["RuntimeLimits"]


@dataclass(frozen=True, slots=True)
class RuntimeLimits:
    """Times in seconds, sizes in bytes."""

    message_bytes: int = MAX_MESSAGE_BYTES
    """The longest control message that a node reads from a member: rosters and seals have megabytes."""
    seed_message_bytes: int = 1280 << 10
    """The longest control message that the seed reads from a member. Nothing sent to a seed is longer: work of 1 MiB,
    or the list of the chunks that a child holds of large versions."""
    stranger_message_bytes: int = 8 << 10
    """The longest control message of a peer that has not shown a valid grant: it may ask to join, or say hello."""
    large_message_bytes: int = 64 << 10
    large_messages: int = 2
    """Of the control messages longer than `large_message_bytes`, this many, of all peers together, are decoded and wait
    for the core at a time. A decoded list takes twelve times its encoded bytes; the other messages wait encoded."""
    control_queue_bytes: int = 4 << 20
    """Control messages that wait for one peer: the seal of a large version, or a roster of 10,000 members, and what is
    sent meanwhile. A peer with more does not read, and is disconnected."""
    control_queue_messages: int = 8192
    """The same bound as a number of messages: more than an honest peer is sent in `write_deadline_s`, at a hundred a
    second. Without it, short answers to a peer that does not read would cost seconds of the core before they reach the
    bound in bytes."""
    unread_bytes: int = 1 << 20
    unread_messages: int = 1024
    """While more than this waits for a peer, its own control messages are not read: it has answers to read first. Two
    peers that both let a megabyte gather would wait for one another until `write_deadline_s`; no honest pair does,
    because only the authority sends megabytes."""
    messages_s: float = 500.0
    messages_at_once: float = 4096.0
    """Control messages of one peer that are read a second, and at once after a pause. An honest peer sends some ten a
    second for each stripe that it takes from this member, at any speed. Each costs 40 us, so ten peers that send
    without end cost a fifth of a core."""
    bulk_queue_items: int = 1 << 14
    """Headers, pieces, blobs and blocks that wait for one peer, some 300 bytes each. The core's credit keeps pushes far
    below this, so only a peer that requests without reading reaches it."""
    blobs_waiting: int = 256
    """Requested blobs and blocks that are queued for one peer. A member that catches up requests 16 at a time."""
    bulk_idle_s: float = 600.0
    """A bulk stream beyond the first is closed when it carried nothing for this long. Longer than most training steps,
    because a new connection costs round trips and starts slowly."""
    bulk_retry_s: float = 30.0
    """When a further bulk stream could not be opened, the next attempt is made after this."""
    bulk_streams_in: int = 16
    """Bulk streams of one peer that are read: twice what it needs, because old ones may end after new ones begin."""
    write_bytes: int = 256 << 10
    """Frames are gathered up to this size before they are written, for fewer TLS records and system calls."""
    part_bytes: int = 128 << 10
    """Body of a PART frame."""
    dial_deadline_s: float = 15.0
    """For connecting and opening the control stream. Three lost SYNs fit."""
    probes: int = 16
    """Peers that are dialed back at a time: a crowd that joins must not cause a crowd of our own handshakes."""
    write_deadline_s: float = 90.0
    """A peer must read `write_bytes` within this. A peer whose disk or GPU is busy may pause for up to a minute; the
    transport detects a frozen one after 20 s."""
    frame_deadline_s: float = 30.0
    """The rest of a frame or message must follow its head within this."""
    flush_deadline_s: float = 2.0
    """When a session is closed, what is queued (a refusal, a goodbye) may take this long to leave."""
    crossing_s: float = 10.0
    """Two sessions with one peer that began within this time, one from each side, crossed one another. Later, the
    second one means that the peer lost the first before we noticed."""
    request_late_bytes: int = 16 << 20
    """Bytes that one peer may still send in answer to requests that were given up; they are discarded."""
    events: int = 64
    """Events of one peer (and of our own) that wait for the core. With more, the task that reads from the peer waits,
    and so does the peer."""
    events_bytes: int = 2 << 20
    """The same bound in bytes: two of the largest messages that are sent to a seed."""
    store_memory_bytes: int = 64 << 20
    """Pieces held in memory before their chunks are complete; above this, receiving waits for the disk."""
    stage_bytes: int = 2 << 30
    """Decoded changes held until their version is sealed; further chunks stay encoded and are decoded at the seal."""
    checkpoint_every: int = 8
    """Versions from one checkpoint on disk to the next: a start replays at most this many."""
    retain_versions: int = 16
    """Sealed versions whose chunks stay on disk; the same as in `Tuning`."""
    sessions: int = 1024
    """Sessions at a time; further streams are refused."""
    requests_per_peer: int = 64
    """Open requests for blobs and blocks at one peer. The core keeps a few open; older ones it has given up."""
    workers: int = 2
    """Chunks that are decoded at a time."""
    up_mbit: float = math.inf
    """Rate of all bulk streams together, in Mbit/s; see `sessions.pacing`. Infinite: the uplink's rate is unknown."""
