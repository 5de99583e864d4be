"""The roster's trees, as the status shows them."""

from node.status.schema import Stripes
from swarm.protocol.membership.roster import Roster

__all__ = ["stripes_of"]


def stripes_of(roster: Roster | None) -> Stripes:
    """For each stripe, the parent's slot by the child's; empty without a roster."""
    if roster is None:
        return []
    return [
        {
            member.slot: None if parent < 0 else parent  # AUTHORITY is negative
            for member, parent in zip(roster.members, parents, strict=True)
        }
        for parents in roster.parents
    ]
