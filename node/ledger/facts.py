"""What must be durable before anybody is told of it; `node.ledger.book` writes a list of facts as one transaction."""

from typing import NamedTuple

from node.ledger.binding import Binding
from node.ledger.state import Done, Group, Head, Lease

__all__ = [
    "Accepted",
    "Advanced",
    "Bound",
    "Discarded",
    "Dropped",
    "Fact",
    "Leased",
    "Offered",
    "Quarantined",
    "Released",
    "Requeued",
    "Taken",
]


class Bound(NamedTuple):
    """This session's key stands for this work from now on."""

    session: str
    binding: Binding


class Offered(NamedTuple):
    """The trainer wants this group."""

    group: Group


class Dropped(NamedTuple):
    """The trainer no longer wants this group."""

    group: bytes


class Leased(NamedTuple):
    """A lease was given."""

    lease: Lease


class Requeued(NamedTuple):
    """These samples of a lease are free again; if they were all that was open, the lease is over."""

    lease: int
    group: bytes
    samples: tuple[int, ...]
    why: str


class Accepted(NamedTuple):
    """A sample is done."""

    group: bytes
    sample: int
    done: Done


class Discarded(NamedTuple):
    """An accepted sample is worth nothing before its group was handed over, and is free again."""

    group: bytes
    sample: int
    why: str


class Taken(NamedTuple):
    """The trainer has this group."""

    group: bytes


class Advanced(NamedTuple):
    """A version was sealed."""

    head: Head


class Quarantined(NamedTuple):
    """A node gets no work and no say. `seconds`: for how long; None: until somebody releases it. `times`: how often."""

    node: bytes
    why: str
    seconds: float | None
    times: int


class Released(NamedTuple):
    """A node may work again."""

    node: bytes
    why: str


Fact = Bound | Offered | Dropped | Leased | Requeued | Accepted | Discarded | Taken | Advanced | Quarantined | Released
