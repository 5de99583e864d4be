"""The numbers of the protocol that a preset may change, each with its reason. Presets: `wan`, `lan`, `loopback`.

`lan` is `wan` with shorter deadlines. `loopback` is for demos and tests on one machine, where a dead peer should be
noticed while a person waits.
"""

from dataclasses import dataclass, replace

__all__ = ["Tuning"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Times in seconds, sizes in bytes."""

    heartbeat_s: float = 5.0
    """The authority's heartbeat period. Lower: deaths are seen sooner, more control bytes (1 KB a heartbeat and
    edge)."""
    soft_ttl_s: float = 30.0
    """Silence after which a member gets no interior place: 6 heartbeats, so that one lost batch of reports and one new
    plan do not matter."""
    hard_ttl_s: float = 90.0
    """Silence after which a member gets no content and its slot may be given to another: 3 x soft."""
    authority_silence_s: float = 3600.0
    """Leases do not age while the authority is silent, but for no longer than this by local clocks."""
    tick_s: float = 0.25
    """How often deadlines are checked. Bounds how late every decision below may be. A member checks them less often
    while nothing is under way (`member.REST_TICKS`)."""
    report_batch_s: float = 0.1
    """Reports of children are gathered this long before they are passed on to parents: fewer, larger messages."""
    pull_after_s: float = 2.0
    """Missing chunks of a stripe that made no progress for this long are pulled from other peers."""
    pull_deadline_s: float = 5.0
    """A source that brought nothing of a pulled chunk for this long is replaced by the next one."""
    pulls_in_flight: int = 8
    """Chunks pulled at a time. With chunks of about 1 MiB this bounds what a slow source holds up."""
    lag_after_s: float = 2.0
    """A child that takes nothing for this long, or sooner if it was quick, is no longer counted as behind."""
    window_bytes: int = 4 << 20
    """The largest credit that a child grants its parent in a stripe."""
    window_least_bytes: int = 128 << 10
    """The smallest; or two pieces where that is more: one in flight and one being stored."""
    stripe_bytes_s: float = 4.4e6
    """The rate that one stripe should reach: a window is the smallest one plus a round trip of this. 200 Mbit/s over 8
    stripes are 3.1 MB/s, so there is room to catch up. With far more, the child with the shortest round trip to a busy
    parent takes what its siblings wait for."""
    rtt_guess_s: float = 0.1
    """Assumed while no round trip is measured."""
    load_shedding_after_s: float = 0.25
    """A chunk of which no piece has come this long after its header is late, unless its parent owes little besides (see
    `owed_s`). With less, a burst looks like a parent that cannot keep up."""
    owed_s: float = 0.04
    """A healthy parent may owe two pieces and what `stripe_bytes_s` brings in this time. The round-trip time cancels
    out, since headers and pieces take the same path. A late chunk is asked of neighbours when more than that is owed
    beside it."""
    load_shedding_deadline_s: float = 1.0
    """A neighbour that brought nothing of an offered chunk for this long has failed: the parent is asked for it
    again."""
    load_shedding_pause_s: float = 0.3
    """How often a member looks for late chunks and tells its neighbours. With half of this, two fifths of all messages
    among eight nodes were late-chunk wants, and no version arrived sooner."""
    load_shedding_end_s: float = 0.05
    """How often it does so once all chunks of a version are assigned: little is left, and uplinks are idle."""
    idle_s: float = 0.015
    """A member with less queued for its children than its uplink carries in this time offers late chunks to
    neighbours."""
    stripes: int = 8
    """Number of trees. One hop takes stripes x piece / uplink, but fewer stripes leave uplinks idle; 8 is near the
    optimum."""
    dial_retry_s: float = 2.0
    """Pause after a failed dial; doubles with each further failure, with 25 % jitter, up to 16 times this. To the
    authority a member pauses no longer than all members need at `returns_s`, but at least a fourth of this, so that a
    small swarm notices within a second that the network is back."""
    sessions_kept: int = 48
    """The authority closes sessions beyond this number, the longest silent first, but never those of its children. A
    member that has something to say dials again."""
    spare_sessions: int = 8
    """A member keeps so many sessions that it has no use for. With some 16 neighbours in the trees it has two dozen
    sessions: as many as are told of late chunks (`transfer.sources.MOST_NEAR`)."""
    rest_beats: int = 12
    """A working node whose session the authority closed dials it again after so many heartbeats, plus or minus half."""
    returns_s: float = 20.0
    """Members that are cut off and are not children of the authority dial it at no more than so many a second in all,
    while they are fewer than 16 x `dial_retry_s` x this (640). A dial costs the authority some 3 ms."""
    hello_deadline_s: float = 10.0
    """A session whose peer has not proven its membership by then is closed."""
    request_deadline_s: float = 15.0
    """A blob or block that did not arrive by then is requested from another peer."""
    requests_in_flight: int = 16
    """Blocks requested at a time while catching up, from all sources together (2 MiB each in bf16, so 32 MiB)."""
    requests_per_peer: int = 4
    """Of these, from one peer."""
    bootstrap_members: int = 2
    """Members that the authority itself serves blocks of the model at a time while no other member has them. Two, so
    that one that is slow or dies does not hold up the others."""
    retain_versions: int = 16
    """Sealed versions whose chunks are kept for others: a node that missed fewer replays them instead of fetching
    blocks."""

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
