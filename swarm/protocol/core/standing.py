"""Where a lease stands: the standings, what moves a lease from one to another, and what a member may do in each.

`TRANSITIONS` is the only place where these moves are written down: `standing_at` follows it as a lease ages, and
`docs/protocol.md` shows it as a diagram (`python -m tools.diagrams`). Both cores ask `RIGHTS` what a standing permits.
"""

from enum import Enum
from typing import Final, NamedTuple

from swarm.protocol.core.tuning import Tuning

__all__ = ["RIGHTS", "TRANSITIONS", "LeaseCause", "Rights", "Standing", "standing_at"]


class Standing(Enum):
    """Where a lease stands."""

    FRESH = "fresh"
    SOFT = "soft"
    DEAD = "dead"

    @property
    def rights(self) -> "Rights":
        """What the holder may do."""
        return RIGHTS[self]


class Rights(NamedTuple):
    """What the holder of a lease may do."""

    content: bool
    """Send and get content, and work for the ledger."""
    interior: bool
    """Be interior in a tree, where other members depend on it."""


RIGHTS: Final = {
    Standing.FRESH: Rights(content=True, interior=True),
    Standing.SOFT: Rights(content=True, interior=False),
    Standing.DEAD: Rights(content=False, interior=False),
}


class LeaseCause(Enum):
    """What moves a lease; the texts are labels of the diagram (mermaid takes no colon in them)."""

    GRANTED = "grant"
    RENEWED = "report that names a heartbeat less than soft_ttl_s old"
    SOFT_EXPIRY = "no such report for soft_ttl_s"
    HARD_EXPIRY = "no such report for hard_ttl_s"
    RELEASED = "goodbye, removal or a newer grant"


TRANSITIONS: Final = {
    Standing.DEAD: {LeaseCause.GRANTED: Standing.FRESH},
    Standing.FRESH: {
        LeaseCause.RENEWED: Standing.FRESH,
        LeaseCause.SOFT_EXPIRY: Standing.SOFT,
        LeaseCause.RELEASED: Standing.DEAD,
    },
    Standing.SOFT: {
        LeaseCause.RENEWED: Standing.FRESH,
        LeaseCause.HARD_EXPIRY: Standing.DEAD,
        LeaseCause.RELEASED: Standing.DEAD,
    },
}
"""By standing, what each cause makes of it; a cause that is not listed cannot occur there. A slot without a lease is
`DEAD`."""


def standing_at(age_s: float, tuning: Tuning) -> Standing:
    """The standing of a lease that was granted, or last renewed, `age_s` seconds ago by the authority's clock."""
    standing = TRANSITIONS[Standing.DEAD][LeaseCause.GRANTED]
    expiries = ((LeaseCause.SOFT_EXPIRY, tuning.soft_ttl_s), (LeaseCause.HARD_EXPIRY, tuning.hard_ttl_s))
    for cause, ttl_s in expiries:
        if age_s <= ttl_s:
            break
        standing = TRANSITIONS[standing][cause]
    return standing
