"""The numbers that the ledger runs by, each with its reason."""

from dataclasses import dataclass

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Defaults for production. Tests, scenarios and operators may choose others."""

    max_lag: int = 1
    """For request groups that do not give their own: how many versions older than the head a token may be when its
    group is handed over. 0: synchronous."""
    ahead: float = 2.0
    """Samples open (free or leased) for each sequence that the nodes can hold. 1 would leave nodes idle while a result
    travels; more makes rollouts older than necessary."""
    cold_groups: int = 16
    """Groups accepted from the trainer before any node has asked for work."""
    max_open_samples: int = 1 << 16
    """The bound of the pool, whatever the nodes can hold."""

    deadline_slack: float = 3.0
    """A lease runs for this many times what its node should need at `Rate.low` and at full length."""
    min_deadline_s: float = 10.0
    """Covers two round trips and the wait for a commit, however short the work is."""
    max_deadline_s: float = 600.0
    """Also the deadline for a node whose rate is unknown."""
    busy_window_s: float = 10.0
    """The rate of a node that always has work is measured this often."""
    asking_ttl_s: float = 60.0
    """A node that asked for work within this time counts when shares are computed."""
    resend_after_s: float = 5.0
    """A lease granted this long before a request that does not name it was lost on the way, and is sent again."""
    silent_s: float = 15.0
    """A node that has work and is silent for this long is gone: a node sends something every five seconds, whatever its
    engine does. Sooner where it normally sends more often; see `node.ledger.assignment.liveness`."""
    stall_s: float = 12.0
    """A node whose tokens stop for this long, or for three times its own longest gap, has stalled."""
    doubt_s: float = 2.0
    """A silent or stalled node is declared so only after this further time, in case it was the ledger that slept."""
    return_s: float = 60.0
    """Nodes find a restarted seed within this time; until then their silence means nothing."""
    fresh_s: float = 8.0
    """A node repeats a request that waits for work every five seconds; one that was not repeated is not served."""
    refusers: int = 3
    """A group is impossible when this many nodes (or all members, where there are fewer) have refused it, and no other
    generating node is left to ask."""
    remembered: int = 1 << 16
    """Ended leases and judged rollouts remembered, so that a repeated result gets the same verdict."""

    sticky_wait_s: float = 1.0
    """A group waits this long for the node that has its session's prefix in its cache; then any node may have it."""
    sticky_sessions: int = 1 << 14
    """Affinities whose node is remembered."""

    check_share: float = 0.02
    """The share of accepted rollouts that another node scores, where the engines cannot judge. Where they can, a node's
    first samples are all judged, then a share that falls to half of this, so that its mean is below it in the long run.
    0: nothing is checked. The cost is one prefill per 50 samples, some thousandths of the swarm's time; two where nodes
    judge."""
    check_tolerance: float = 0.1
    """Nats per token: the tolerated mean difference between a node's log-probabilities and those that another computes.
    A temperature below 1 divides it. Over one sample, rounding alone makes up to 3e-6 where both compute in float32,
    and 0.051 between bfloat16 engines of two makes; the tokens of another model make 4, and a version one step older
    0.01 (`python -m scenarios.bench.check_tolerance`). So 0.1 accuses no honest node and finds other models; 1e-4, in a
    swarm that computes in float32, also finds versions that are too old."""
    checks_open: int = 64
    """Checks waiting for a node; no further check begins."""
    check_ttl_s: float = 120.0
    """A check that no node could make within this time, because none holds its version any more, is given up."""

    portable_draws: bool = True
    """Whether leases ask nodes that are able for draws that others can repeat, where the sampling has no options; see
    `node.ledger.assignment.draws`."""

    fastest_sequence: float = 5000.0
    """Tokens per second of one sequence that no engine exceeds."""
    fast_needs: int = 64
    """A sample with fewer tokens proves nothing about speed."""
    copy_surprise: float = 30.0
    """Nats. Two samples with the same tokens for one prompt, which had a probability of at most e^-30, are copies."""

    judged_window: int = 64
    """How many of a node's last rollouts, and of its last leases, its reputation covers."""
    bad_least: int = 8
    bad_share: float = 0.25
    """Quarantine follows at this count and this share of rollouts that no honest node sends."""
    wrong_rewards: int = 3
    """Quarantine follows at this many rewards, among a node's last results, that other nodes computed otherwise.
    None of them was used, so a function that is not deterministic costs a node some minutes at a time."""
    reward_ttl_s: float = 120.0
    """A reward that no other node has computed by then counts as unchecked."""
    lapsed_least: int = 16
    lapsed_share: float = 0.75
    """Quarantine follows at this count and this share of leases that expired without a result."""
    quarantine_s: float = 600.0
    """The first quarantine; each further one lasts twice as long, up to `quarantine_most_s`. A node that was proven to
    lie stays in quarantine until a person releases it."""
    quarantine_most_s: float = 86400.0

    def open_samples(self, capacity: int) -> float:
        """How many samples may be open when the nodes can hold `capacity` sequences."""
        return min(self.ahead * capacity, self.max_open_samples)
