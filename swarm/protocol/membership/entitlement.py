"""Which children may take our uplink at once: those that the plan attaches to us, and those whose parent is lost.

Other children are served while little is queued for these (see `late_joiners`); otherwise members that attach to every
peer would take the uplinks of planned children.
"""

from dataclasses import dataclass

from swarm.protocol.core.documents import Grant
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.membership.roster import AUTHORITY, Roster
from swarm.protocol.membership.rosterbook import RosterBook

__all__ = ["Entitlement", "LostPeers", "OwnLease"]


@dataclass(slots=True)
class OwnLease:
    """The grant that this peer shows to others. Only `Membership` changes it."""

    is_authority: bool = False
    grant: Grant | None = None
    sealed: bytes = b""

    @property
    def slot(self) -> int | None:
        """This peer's slot in rosters: `AUTHORITY`, or a member's slot; None while it has no grant."""
        if self.is_authority:
            return AUTHORITY
        return self.grant.slot if self.grant is not None else None


class LostPeers:
    """The slots whose holders a member lost as parents or sources, and the members whose sessions ended.

    Times are local, in seconds.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._slots: dict[int, float] = {}
        """The time at which each slot's holder was lost."""
        self._gone: dict[bytes, float] = {}
        """The time at which each member's session ended."""

    def note_lost(self, slot: int, now: float) -> None:
        """The holder of `slot` is gone, or does not answer."""
        self._slots[slot] = now

    def note_present(self, slot: int | None) -> bool:
        """The holder of `slot` is present (again); whether it was lost."""
        return slot is not None and self._slots.pop(slot, None) is not None

    def is_lost(self, slot: int | None) -> bool:
        """Whether the holder of `slot` is lost."""
        return slot in self._slots

    def recent(self, now: float) -> tuple[int, ...]:
        """Slots whose holders were lost less than `soft_ttl_s` ago, in order."""
        return tuple(sorted(s for s, at in self._slots.items() if now - at < self._tuning.soft_ttl_s))

    def forget_old(self, now: float) -> None:
        """Forget slots lost more than `soft_ttl_s` ago, so that their holders are tried again, and members whose
        sessions ended `hard_ttl_s` ago."""
        for slot in [s for s, at in self._slots.items() if now - at > self._tuning.soft_ttl_s]:
            del self._slots[slot]
        for peer in [peer for peer, at in self._gone.items() if now - at > self._tuning.hard_ttl_s]:
            del self._gone[peer]

    def new_roster(self, before: Roster | None, after: Roster) -> None:
        """Forget slots that another peer holds now, or none."""
        for slot in list(self._slots):
            was = before.member(slot) if before is not None else None
            if was is None or (holder := after.member(slot)) is None or holder.peer != was.peer:
                del self._slots[slot]

    def session_ended(self, peer: bytes, now: float) -> None:
        """The session with a member ended."""
        self._gone[peer] = now

    def greeted(self, peer: bytes) -> bool:
        """The member said hello; whether its last session had ended."""
        return self._gone.pop(peer, None) is not None

    def is_gone(self, peer: bytes) -> bool:
        """Whether the session with this member ended, and it has not come back."""
        return peer in self._gone


class Entitlement:
    """Judges the children of one peer by its newest roster."""

    def __init__(self, rosters: RosterBook, own_lease: OwnLease, lost_peers: LostPeers) -> None:
        self._rosters = rosters
        self._own_lease = own_lease
        self._lost_peers = lost_peers

    def is_entitled(self, stripe: int, peer: bytes) -> bool:
        """Whether the plan attaches `peer` to us in this stripe, or to a member of which we know that it is lost.

        While we have no roster every child is entitled.
        """
        roster, slot = self._rosters.roster, self._own_lease.slot
        member = roster.member_of(peer) if roster is not None else None
        if roster is None or slot is None or member is None or stripe >= roster.stripes:
            return roster is None
        planned = roster.parent(stripe, member.slot)
        if planned is None or planned in (slot, AUTHORITY):
            return planned == slot
        holder = roster.member(planned)
        return holder is None or self._lost_peers.is_gone(holder.peer) or self._lost_peers.is_lost(planned)
