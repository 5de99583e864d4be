"""Who stands where, as the authority decides it: planned when membership changes, told as the change that it was."""

from collections.abc import Callable

from swarm.protocol.documents import AuthorityTime
from swarm.protocol.enrolment import Enrolments
from swarm.protocol.lease import LeaseBook, Standing
from swarm.protocol.membership import pass_on
from swarm.protocol.planner import Planner
from swarm.protocol.roster import AUTHORITY, Member, Roster, difference, seal_change
from swarm.protocol.state import State

__all__ = ["Scheme"]


class Scheme:
    """The plan, and what it is made of."""

    def __init__(
        self,
        state: State,
        book: LeaseBook,
        enrolled: Enrolments,
        time: Callable[[float], AuthorityTime],
        *,
        boot: int,
        home: str,
    ) -> None:
        """`home`: the trainer's region."""
        self._state = state
        self._book = book
        self._enrolled = enrolled
        self._time = time
        self._boot = boot
        self._planner = Planner(state.tuning.stripes, home)
        self.lost: dict[int, float] = {}
        """Slots that a neighbour lost and that are late themselves, and since when: outside for a while."""
        self.stale = True
        self.serial = 0
        self.addrs: tuple[str, ...] = ()
        """The authority's."""
        self._planned_at = float("-inf")

    def plan_if_due(self, now: float) -> bool:
        """Plan anew if anything changed, at most once a tick: a crowd that comes together is planned for together."""
        if not self.stale or now - self._planned_at < self._state.tuning.tick_s:
            return False
        state = self._state
        members = tuple(self._member(slot, now) for slot in sorted(self._book.leases))
        self.serial += 1
        self.stale = False
        self._planned_at = now
        parents = self._planner.update(members, idle=not any(state.exchange.children.values()))
        roster = Roster(state.swarm, self._boot, self.serial, self.addrs, members, parents)
        state.rosters.set(roster, seal_change(difference(state.roster, roster), state.key))
        pass_on(state, roster)
        state.notify("planned", serial=self.serial, members=len(members))
        return True

    def _member(self, slot: int, now: float) -> Member:
        peer = self._book.leases[slot].grant.peer
        enrolment = self._enrolled[peer]
        fresh = self._book.standing(slot, self._time(now)) is Standing.FRESH and slot not in self.lost
        leaf = not fresh or not enrolment.held_once or enrolment.join.up_mbit == 0
        return enrolment.member(slot, peer, leaf=leaf)

    def is_head(self, stripe: int, peer: bytes) -> bool:
        """The plan hangs this peer on the authority itself."""
        roster = self._state.roster
        member = roster.member_of(peer) if roster is not None else None
        return roster is not None and member is not None and roster.parent(stripe, member.slot) == AUTHORITY

    def hear_of_loss(self, slot: int, now: float) -> None:
        """Hearsay only moves edges: a slot that somebody lost, and that is late itself, stands outside for a while."""
        lease = self._book.leases.get(slot)
        if lease is None or slot in self.lost:
            return
        if self._time(now) - lease.renewed > 2 * self._state.tuning.heartbeat_s:
            self.lost[slot] = now
            self.stale = True

    def tick(self, now: float) -> None:
        """Those that were lost long ago and live on may stand inside again."""
        for slot in [s for s, at in self.lost.items() if now - at > self._state.tuning.soft_ttl_s]:
            del self.lost[slot]
            self.stale = True
