"""What a process says of its work: where the nodes' time goes, samples and their verdicts. A part of `schema`."""

from typing import Final

from msgspec import Struct, field

__all__ = [
    "SUSPICIOUS",
    "CheckCounts",
    "CommitTimes",
    "EvidenceStatus",
    "LedgerNode",
    "LedgerStatus",
    "QuarantineStatus",
    "RewardCounts",
    "TimeSplit",
    "Version",
    "WorkerStatus",
]

SUSPICIOUS: Final = 1000.0
"""Evidence (`EvidenceStatus.factor`) from which on people are shown a node; one honest node in 1,000 gets there."""

Version = tuple[int, int]
"""(epoch, number within the epoch); versions are ordered by it."""


class TimeSplit(Struct, kw_only=True):
    """Seconds since the node started, by what it did; the sum is all of its time."""

    generate: float = 0.0
    """At least one sequence was being generated."""
    wait_work: float = 0.0
    """Idle: there was no work for it."""
    wait_version: float = 0.0
    """Idle: the engine's version is too old for the work that there is."""
    commit: float = 0.0
    """Nothing was generated because a version was being committed or the engine was being loaded."""

    @property
    def total(self) -> float:
        return self.generate + self.wait_work + self.wait_version + self.commit


class CommitTimes(Struct, kw_only=True):
    """What one version took on one node's engine."""

    version: Version = (0, 0)
    wait_s: float = 0.0
    """From the replica's commit to the engine's; includes `stage_s` and `pause_s`."""
    stage_s: float = 0.0
    """Staged in the background, while the engine generated."""
    pause_s: float = 0.0
    """Nothing was generated."""
    resume_s: float = 0.0
    """From the end of the pause until the sequences that ran before had their next token."""


class QuarantineStatus(Struct, kw_only=True):
    """A node's quarantine, during which it gets no work."""

    why: str = ""
    left_s: float | None = None
    """Until it ends by itself; None: a person has to release the node."""


class EvidenceStatus(Struct, kw_only=True):
    """What checks hold against a node, over its whole life (docs/verification.md)."""

    factor: float = 1.0
    """The evidence of all kinds together; at 1.1 million the node is quarantined. An honest node's grows beyond x with
    a probability of at most 1 / x."""
    kinds: dict[str, float] = {}
    """The same by kind: "stale", "drawn", "claims" and "unlike" against its samples, "scores", "steps" and "apart"
    against its opinions on others'."""
    checks: int = 0
    """Opinions of other nodes on its samples."""
    tokens: int = 0
    """Of its samples that were checked, whatever the number of opinions on them."""
    opinions: int = 0
    """That it gave on samples of others."""
    arithmetic: str = ""
    """Its class: nodes of one class are expected to round alike. Empty: it has named none."""


class LedgerNode(Struct, kw_only=True):
    """One node in the seed's ledger. Counts are since the seed started."""

    member: bool = False
    """It has a live lease on membership."""
    tokens_per_s: float = 0.0
    """Measured by the ledger; what the node claims until something was measured."""
    spread: float = 0.0
    """Mean absolute deviation of the measured rate, tokens/s."""
    outstanding: int = 0
    """Samples leased to it and still to come."""
    capacity: int = 0
    """Sequences that it can hold in all."""
    accepted: int = 0
    """Samples."""
    tokens: int = 0
    """Of accepted samples."""
    refused: dict[str, int] = {}
    """Samples, by the reason."""
    quarantine: QuarantineStatus | None = None
    quarantines: int = 0
    """How often it was in quarantine."""
    checked: int = 0
    """Its samples that another node confirmed."""
    disputed: int = 0
    """Its samples that one node doubted and no others could judge."""
    evidence: EvidenceStatus | None = None
    """None: its samples are not judged, because it or too few others are able to."""
    arrival_s: float | None = None
    """Until its engine is expected to hold the head; None: not known."""
    seconds: TimeSplit | None = None
    """Where its time went; None: the node has not reported it."""
    used: int = 0
    """Samples that a trainer, or a client of the gateway, has taken."""
    unused: dict[str, int] = {}
    """Samples that were generated and will never be used, by the reason."""
    generating: float | None = None
    """Share of its time in which it generated, 0..1; None: the node has not reported it."""
    useful: float | None = None
    """`generating` times the share of its generated tokens that were used; None: not reported."""
    commits: list[CommitTimes] = []
    """Of its last versions, the newest last."""


class CheckCounts(Struct, kw_only=True):
    """Spot checks of samples by other nodes: the first four count those of nodes that cannot judge."""

    begun: int = 0
    confirmed: int = 0
    open: int = 0
    given_up: int = 0
    judged: int = 0
    """Samples on which other nodes gave opinions."""
    judging: int = 0
    """Samples on which opinions are to come."""
    not_judged: int = 0
    """Samples that were drawn, and that no node could judge in time."""
    drifts: int = 0
    """How often the numbers of half of a class moved together, so that its evidence was dropped."""
    period: Version = (0, 0)
    """The version whose nonce draws the checks now."""
    commitment: str = ""
    """The hash of that nonce, in hex."""
    next_commitment: str = ""
    """The hash of the next version's nonce, in hex: published before it counts."""
    opened: str = ""
    """The nonce of the version before, in hex; empty: there is none."""


class RewardCounts(Struct, kw_only=True):
    """Rewards that nodes have computed, and what a second node found."""

    checked: int = 0
    """The second node had the same."""
    unchecked: int = 0
    """No other node could compute it."""
    wrong: int = 0
    """Other nodes had another one, and agreed: the sample was generated again."""
    disputed: int = 0
    """The second node had another one, and no others could decide."""
    open: int = 0
    """A second node is still to answer."""
    functions: dict[str, dict[str, int]] = {}
    """By name and digest of the function: how many members have it."""
    chosen: dict[str, str] = {}
    """By name: the digest that counts."""


class ClientStatus(Struct, kw_only=True):
    """A key of the gateway with a quota. Counts are since the gateway started; a limit of 0 is none."""

    requests: int = 0
    tokens: int = 0
    """Of prompts and answers."""
    refused: int = 0
    """Requests that got 429 because the quota was used up."""
    in_flight: int = 0
    """Sequences that were asked for and are not answered."""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    most_in_flight: int = 0


class LedgerStatus(Struct, kw_only=True):
    """The seed's ledger. Counts are since the seed started, except those of work that is open."""

    groups_open: int = 0
    """Request groups of which samples are still to come, without those of evaluations."""
    groups_ready: int = 0
    """Complete request groups that the trainer has not taken, without those of evaluations."""
    groups_evaluating: int = 0
    """Request groups of evaluations that were not taken."""
    samples_free: int = 0
    """Of open groups: leased to no node."""
    samples_leased: int = 0
    samples_to_come: int = 0
    """Of prompts that a trainer has announced and not offered yet."""
    tokens_per_s: float = 0.0
    """Of all members together."""
    generating: float | None = None
    """Share of the nodes' time in which they generated, 0..1; None: no node has reported it."""
    useful: float | None = None
    """`generating` times the share of generated tokens that trainers and clients have used; None: not reported."""
    samples_used: int = 0
    """Taken by a trainer or by a client of the gateway."""
    samples_unused: int = 0
    """Generated, and never to be used."""
    unused: dict[str, int] = {}
    """`samples_unused` by the reason."""
    next_version_s: float | None = None
    """Until the next seal is expected; None: not known."""
    accepted: int = 0
    """Samples."""
    refused: dict[str, int] = {}
    """Samples, by the reason."""
    checks: CheckCounts = field(default_factory=CheckCounts)
    rewards: RewardCounts = field(default_factory=RewardCounts)
    unread: int = 0
    """Message bodies dropped because their node had sent too many."""
    unmet: dict[str, list[str]] = {}
    """By open session: sampling options that it asks for and no node's engine has; `reward:NAME`: no node has it."""
    nodes: dict[str, LedgerNode] = {}
    """By public key in hex."""
    clients: dict[str, ClientStatus] = {}
    """The keys of the gateway with quotas, by name."""


class WorkerStatus(Struct, kw_only=True):
    """A node's worker: what it generates and what became of it. Counts are since the node started."""

    engine_ready: bool = False
    engine_version: Version = (0, 0)
    tokens_per_s: float = 0.0
    """Generated tokens by the seconds in which at least one sequence was generated, lately."""
    jobs: int = 0
    """Samples that wait to be generated."""
    generating: int = 0
    """Samples that are being generated."""
    unanswered: int = 0
    """Finished samples that the ledger has neither accepted nor refused."""
    accepted: int = 0
    """Samples."""
    refused: dict[str, int] = {}
    """Samples, by the reason."""
    lost_tokens: int = 0
    """Generated and never to be used: cancelled, too late or refused."""
    doing: str = ""
    """The field of `TimeSplit` that grows now."""
    seconds: TimeSplit = field(default_factory=TimeSplit)
    useful: float = 0.0
    """Share of its time in which it generated, 0..1."""
    worst_pause_s: float = 0.0
    """The longest pause of the last 256 commits."""
    rewards: int = 0
    """Computed, of own samples and to check those of others."""
    rewards_failed: int = 0
    """Of these, the ones without a number."""
