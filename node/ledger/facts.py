"""The facts that the ledger must make durable before anybody is told of them.

`node.ledger.book` writes a list of facts as one transaction.
"""

from collections.abc import Mapping
from typing import NamedTuple

from node.ledger.binding import Binding
from node.ledger.part_history import Record
from node.ledger.state import AcceptedRollout, Group, Head, LiveLease

__all__ = [
    "Accepted",
    "AdaptersHeld",
    "Advanced",
    "Bound",
    "Cut",
    "Discarded",
    "Dropped",
    "EvidenceHeld",
    "Fact",
    "Leased",
    "NumberFound",
    "NumbersDropped",
    "Offered",
    "Quarantined",
    "Released",
    "Requeued",
    "SampleCounted",
    "Taken",
]


class Bound(NamedTuple):
    """The key of this session stands for this work from now on."""

    session: str
    binding: Binding


class Offered(NamedTuple):
    """The trainer wants this request group."""

    group: Group


class Dropped(NamedTuple):
    """The trainer no longer wants this request group."""

    group: bytes


class Cut(NamedTuple):
    """These samples of a request group, which may be partial, are no longer wanted; the group is complete."""

    group: bytes
    dropped: tuple[int, ...]


class Leased(NamedTuple):
    """A work lease was granted."""

    lease: LiveLease


class Requeued(NamedTuple):
    """These samples of a lease are free again. The lease ends when none of its samples is open."""

    lease: int
    group: bytes
    samples: tuple[int, ...]
    why: str


class Accepted(NamedTuple):
    """A rollout counts for this sample."""

    group: bytes
    sample: int
    done: AcceptedRollout


class Discarded(NamedTuple):
    """An accepted rollout no longer counts, and its sample is free again."""

    group: bytes
    sample: int
    why: str


class Taken(NamedTuple):
    """The trainer has this request group."""

    group: bytes


class Advanced(NamedTuple):
    """A version was sealed. `record`: what is kept of the parts that it changed, if anything. `quiet_before`: see
    `PartHistory`; None: as it was."""

    head: Head
    record: Record | None = None
    quiet_before: int | None = None


class AdaptersHeld(NamedTuple):
    """The adapters that the newest version has, by name: each one's own version."""

    adapters: Mapping[str, int]


class Quarantined(NamedTuple):
    """A node gets no work, and its results are refused."""

    node: bytes
    why: str
    seconds: float | None
    """The duration; None: until a person releases the node."""
    times: int
    """The node's quarantines so far, this one included."""


class Released(NamedTuple):
    """A node may work again."""

    node: bytes
    why: str


class NumberFound(NamedTuple):
    """A checker found this number about a node; see `node.verification.nulls`."""

    context: bytes
    checker: bytes
    node: bytes
    value: float


class SampleCounted(NamedTuple):
    """One more number of a node from a replay; see `node.verification.mismatches.Counts`."""

    context: bytes
    node: bytes
    mismatches: int


class NumbersDropped(NamedTuple):
    """Numbers about and by this node (None: all numbers) no longer count."""

    node: bytes | None


class EvidenceHeld(NamedTuple):
    """What is held against a node from now on: `node.verification.record.NodeRecord.to_bytes`."""

    node: bytes
    record: bytes


Fact = (
    Bound
    | Offered
    | Dropped
    | Cut
    | Leased
    | Requeued
    | Accepted
    | Discarded
    | Taken
    | Advanced
    | AdaptersHeld
    | Quarantined
    | Released
    | NumberFound
    | SampleCounted
    | NumbersDropped
    | EvidenceHeld
)
