"""Every number that the ledger runs by, with its reason."""

from dataclasses import dataclass

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """A test, a scenario or an operator may choose others."""

    max_lag: int = 1
    """For groups of which nothing else is said: a token may be this many versions older than the head when its group is
    handed over. 0: synchronous."""
    ahead: float = 2.0
    """Samples open (queued or leased) for each sequence that the nodes can hold: 1 would leave nodes idle while a
    result travels, more makes rollouts older than they need be."""
    cold_groups: int = 16
    """Groups taken from the trainer before any node has asked for work."""
    max_open_samples: int = 1 << 16
    """The pool's bound, whatever the nodes hold."""

    deadline_slack: float = 3.0
    """A lease runs this many times as long as its node should need at its own low rate, at full length."""
    min_deadline_s: float = 10.0
    """Covers two round trips and a commit's wait, however short the work."""
    max_deadline_s: float = 600.0
    """Also the deadline for a node of which nothing is known."""
    busy_window_s: float = 10.0
    """A node that always has work is measured this often."""
    asking_ttl_s: float = 60.0
    """A node that asked for work this lately counts when shares are worked out."""
    resend_after_s: float = 5.0
    """A lease that a request made this long after it does not name was lost on the way, and is sent again."""
    silent_s: float = 15.0
    """A node that has work and says nothing for so long is gone: it speaks every five seconds, whatever its engine
    does. Sooner (`node.ledger.assignment.liveness`) where its words come more often, as they do while tokens flow."""
    stall_s: float = 12.0
    """A node whose tokens flowed and do not for so long (or three times its own longest gap) hangs."""
    doubt_s: float = 2.0
    """So long the ledger doubts that, in case it was the ledger that slept."""
    return_s: float = 60.0
    """Nodes find a seed that was restarted within this time; until then their silence means nothing."""
    fresh_s: float = 8.0
    """A request that waits for work is repeated every five seconds; one that was not is not served any more."""
    refusers: int = 3
    """A group is impossible when so many nodes (or all members, where there are fewer) have refused it, and no other
    node that generates is left to ask."""
    remembered: int = 1 << 16
    """Ended leases and judged samples remembered, to answer repeated results as the first time."""

    sticky_wait_s: float = 1.0
    """So long a request waits for the node that has its session's prefix in its cache; then any may have it."""
    sticky_sessions: int = 1 << 14
    """Sessions whose node is remembered."""

    check_share: float = 0.02
    """This share of accepted samples is scored by a second node: 50 lies, and one is found out with 63 %; the cost is a
    prefill in fifty, some thousandths of the swarm's time."""
    check_tolerance: float = 0.1
    """Nats: mean difference a token between what a node said and what another computes; divided by a temperature below
    1. Of one sample, rounding alone makes up to 3e-6 where both compute in float32 and 0.051 between bfloat16 engines
    of two makes; another model's tokens make 4, and a version one step older 0.01 (`python -m
    scenarios.bench.check_tolerance`). So 0.1 accuses no honest node and finds other models; 1e-4, in a swarm that
    computes in float32, also finds versions that are too old."""
    checks_open: int = 64
    """Checks waiting for a node; beyond, none is begun."""
    check_ttl_s: float = 120.0
    """A check that no node could make by then, because none holds its version any more, is given up."""

    fastest_sequence: float = 5000.0
    """Tokens a second of one sequence: no engine draws them faster one after another."""
    fast_needs: int = 64
    """A sample shorter than this proves nothing about speed."""
    copy_surprise: float = 30.0
    """Nats: equal tokens to one prompt twice, when they had a chance of e^-30, are a copy."""

    judged_window: int = 64
    """A node's last so many results and leases say how it behaves."""
    bad_least: int = 8
    bad_share: float = 0.25
    """So many results, and so large a share, that no honest node would send: quarantine."""
    lapsed_least: int = 16
    lapsed_share: float = 0.75
    """So many leases, and so large a share, that ran out without a result: quarantine."""
    quarantine_s: float = 600.0
    """The first time; twice as long each time after, up to a day. Who was proven to lie stays until released."""
    quarantine_most_s: float = 86400.0

    def open_samples(self, capacity: int) -> float:
        """How many may be open when the nodes can hold `capacity` sequences."""
        return min(self.ahead * capacity, self.max_open_samples)
