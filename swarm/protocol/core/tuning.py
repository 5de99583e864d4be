"""The numbers that the protocol runs by and a preset may change, each with its reason: `wan`, `lan`, `loopback`.

LAN is WAN except for what is said; loopback is for demos and tests on one machine, where a dead peer should be
noticed in the time that a person waits.
"""

from dataclasses import dataclass, replace

__all__ = ["Tuning"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Times in seconds, sizes in bytes. Raise or lower with the comment in mind."""

    heartbeat_s: float = 5.0
    """The authority speaks this often. Lower: deaths are seen sooner, more control bytes (1 KB a beat and edge)."""
    soft_ttl_s: float = 30.0
    """Silence after which a peer gets no new work and no interior place: 6 heartbeats, so that one lost batch of
    reports and one re-plan pass unnoticed."""
    hard_ttl_s: float = 90.0
    """Silence after which a peer gets no content and its slot may be given away: 3 x soft."""
    authority_silence_s: float = 3600.0
    """Leases stand still while the authority is silent, but by local clocks no longer than this."""
    tick_s: float = 0.25
    """How often deadlines are looked at. Bounds the lateness of every decision below."""
    report_batch_s: float = 0.1
    """Reports of children are gathered this long before they climb on: fewer, larger messages."""
    pull_after_s: float = 2.0
    """A stripe that made no progress for this long while something is missing is pulled from elsewhere."""
    pull_deadline_s: float = 5.0
    """A pull that brought nothing for this long goes to the next source."""
    pulls_in_flight: int = 8
    """Chunks pulled at a time; with chunks of about 1 MiB this bounds what a slow source holds up."""
    lag_after_s: float = 2.0
    """A child that takes nothing for so long, at most, no longer holds back its siblings' credit."""
    window_bytes: int = 4 << 20
    """The largest credit that a receiver grants an edge and stripe."""
    window_least_bytes: int = 128 << 10
    """And the least; or two pieces where that is more, one on the way and one being taken."""
    stripe_bytes_s: float = 4.4e6
    """What a stripe should be able to bring: a window is the least, and this for a round trip. 200 Mbit/s over 8
    stripes are 3.1 MB/s; above it there is room to catch up. Far more, and whoever has the shortest way to a busy
    parent takes what its siblings wait for."""
    rtt_guess_s: float = 0.1
    """A round trip that is not measured yet."""
    load_shedding_after_s: float = 0.25
    """A chunk of which nothing has come so long after its header is late, unless it is about to come. Less, and a burst
    is taken for a parent that cannot keep up."""
    owed_s: float = 0.04
    """A parent in time may owe two pieces, and what a stripe brings in this. Headers and pieces come the same way, so
    its length is of no account. A late chunk besides which more is owed is not about to come."""
    load_shedding_deadline_s: float = 1.0
    """A neighbour that brought nothing of what it offered for so long is not believed: it is the parent's again."""
    load_shedding_pause_s: float = 0.3
    """How often a member looks at what comes late, and tells its neighbours. Twice as often, two fifths of
    all messages among eight nodes were wishes, and nobody was sooner."""
    load_shedding_end_s: float = 0.05
    """And how often once all of a version has been dealt: little of it is left, and uplinks have nothing else to do."""
    idle_s: float = 0.015
    """Whoever has less waiting for its children than its uplink carries in this offers what others' parents owe."""
    stripes: int = 8
    """Trees. A hop's delay is stripes x piece / uplink, but fewer stripes leave uplinks idle; 8 is near the optimum."""
    dial_retry_s: float = 2.0
    """First pause after a failed dial; doubles, with a quarter of jitter, up to 16 times this."""
    sessions_kept: int = 48
    """The trainer lets sessions go beyond so many, the longest silent first, but never those of its own children: who
    has something to say comes back."""
    rest_beats: int = 12
    """A node that works and was let go comes back for more work after so many heartbeats, give or take a half."""
    returns_s: float = 20.0
    """Members that hear nothing and do not hang on the trainer turn to it at no more than so many a second in all."""
    hello_deadline_s: float = 10.0
    """A session that has not said who it is by then is closed."""
    request_deadline_s: float = 15.0
    """A blob or block that did not arrive by then is asked of the next peer."""
    requests_in_flight: int = 16
    """Blocks asked for at a time while catching up (2 MiB each in bf16, so 32 MiB), over all sources."""
    requests_per_peer: int = 4
    """Of which from one peer."""
    bootstrap_members: int = 2
    """Members that the trainer itself gives blocks of the model at a time, where nobody else has it. One would do; two,
    so that one that is slow or dies does not hold up all."""
    retain_versions: int = 16
    """Sealed versions whose chunks are kept for others: a node asleep for fewer steps replays instead of refetching."""

    @classmethod
    def wan(cls) -> "Tuning":
        return cls()

    @classmethod
    def lan(cls) -> "Tuning":
        return replace(cls(), heartbeat_s=2.0, soft_ttl_s=12.0, hard_ttl_s=36.0, pull_after_s=1.0, lag_after_s=1.0)

    @classmethod
    def loopback(cls) -> "Tuning":
        return replace(
            cls(),
            heartbeat_s=0.5,
            soft_ttl_s=3.0,
            hard_ttl_s=6.0,
            tick_s=0.1,
            report_batch_s=0.02,
            pull_after_s=0.5,
            pull_deadline_s=2.0,
            lag_after_s=1.0,
            dial_retry_s=0.25,
        )

    @classmethod
    def named(cls, name: str) -> "Tuning":
        """`wan`, `lan` or `loopback`."""
        return {"wan": cls.wan, "lan": cls.lan, "loopback": cls.loopback}[name]()
