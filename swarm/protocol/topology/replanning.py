"""The authority's plan: made anew when membership or measurements change, and sent as a change of the roster."""

from collections.abc import Callable, Mapping
from itertools import groupby
from statistics import median

from msgspec.structs import replace

from swarm.protocol.core.documents import AuthorityTime, Report
from swarm.protocol.core.events import Persist
from swarm.protocol.core.notices import Planned
from swarm.protocol.membership.enrolment import Enrolments, record_of
from swarm.protocol.membership.greeting import pass_on
from swarm.protocol.membership.lease import LeaseBook
from swarm.protocol.membership.roster import AUTHORITY, Member, Roster, difference, seal_change
from swarm.protocol.startup import Site
from swarm.protocol.state import State
from swarm.protocol.topology.planner import Planner
from swarm.protocol.topology.rates import Rates, Regions

__all__ = ["Replanner"]

UNCHANGED_SHARE = 0.15
"""An uplink whose estimate changed by less than this share keeps its old value in the roster."""
FEW_TIMES = 4
"""While a version is on its way only members that could be interior when it was opened are so, unless the swarm has
more than this many times as many members."""
ARRIVED_BEATS = 6
"""So many heartbeats after its seal a version counts as arrived everywhere, even if a member never reports it."""


class Replanner:
    """The plan, and what it is made from."""

    def __init__(
        self,
        state: State,
        book: LeaseBook,
        enrolled: Enrolments,
        time: Callable[[float], AuthorityTime],
        *,
        boot: int,
        site: Site,
    ) -> None:
        """`site`: the trainer's region and addresses."""
        self._state = state
        self._book = book
        self._enrolled = enrolled
        self._time = time
        self._boot = boot
        self._planner = Planner(state.tuning.stripes, site.region)
        self.lost: dict[int, float] = {}
        """Slots that a neighbour lost and whose reports are late, and since when: leaves in every tree for
        `soft_ttl_s`."""
        self._stale = True
        self.serial = 0
        self._addrs = site.addrs
        self._planned_at = float("-inf")
        self._rates = Rates()
        self._regions = Regions()
        self._newly_proven = False
        """A member has served verified bytes for the first time since the last plan."""
        self._busy_since: float | None = None
        """Local time at which the version on its way was sealed; infinity: not yet; None: no version is on its way."""
        self._took_part: set[bytes] = set()
        """Members that could be interior when that version was opened."""

    @property
    def addrs(self) -> tuple[str, ...]:
        """The addresses at which members reach the authority, as multiaddr text."""
        return self._addrs

    def listening(self, addrs: tuple[str, ...]) -> None:
        """The authority listens at `addrs`: rosters name these, unless the addresses at which members reach it were
        given."""
        self._addrs = self._addrs or addrs

    def mark_stale(self) -> None:
        """Something that the plan depends on has changed: plan anew when it is due."""
        self._stale = True

    def plan_if_due(self, now: float) -> bool:
        """Plan anew if anything has changed, at most once a tick, so that members that join together are planned
        together. True when a plan was made."""
        if not self._stale or now - self._planned_at < self._state.tuning.tick_s:
            return False
        state = self._state
        members = self._members(now)
        self._stale = False
        self._planned_at = now
        parents = self._planner.update(members, idle=self._busy_since is None)
        before = state.roster
        if before is not None and (before.members, before.parents, before.authority) == (members, parents, self._addrs):
            return True
        self.serial += 1
        roster = Roster(state.swarm, self._boot, self.serial, self._addrs, members, parents)
        state.rosters.set(roster, seal_change(difference(state.roster, roster), state.key))
        pass_on(state, roster)
        state.outbox.notify(Planned(self.serial, len(members)))
        return True

    def _members(self, now: float) -> tuple[Member, ...]:
        offered = {slot: self._enrolled[lease.grant.peer].join.up_mbit for slot, lease in self._book.leases.items()}
        typical = median(offered.values()) if offered else 0.0
        able = self._able()
        able -= self._slow_downlinks(able, typical)
        return tuple(self._member(slot, typical, able, now) for slot in sorted(self._book.leases))

    def _slow_downlinks(self, able: set[bytes], typical: float) -> set[bytes]:
        """Members whose downlink is slower than the per-member rate that the members with faster downlinks could
        supply: all that such a member passes on would be late.

        Only uplinks of members that may be interior count, and of each no more than the plan uses. Otherwise a member
        that has served no byte could make all others leaves by overstating its own link, and the trainer would have to
        send a copy to each of them.
        """
        able_slots = [(slot, lease.grant.peer) for slot, lease in self._book.leases.items() if lease.grant.peer in able]
        joins = {slot: self._enrolled[peer].join for slot, peer in able_slots}
        widest_first = sorted(joins, key=lambda slot: -joins[slot].down_mbit)
        given = 0.0
        for down_mbit, slots in groupby(widest_first, key=lambda slot: joins[slot].down_mbit):
            if down_mbit * len(self._book.leases) < given:
                return {peer for slot, peer in able_slots if joins[slot].down_mbit <= down_mbit}
            given += sum(self._rates.uplink(slot, joins[slot].up_mbit, typical) for slot in slots)
        return set()

    def _able(self) -> set[bytes]:
        """Members that may be interior: those that have held a version and served verified bytes; in a new swarm, where
        most have served none, those that hold the base.

        While a version is on its way these are the members that could be interior when it was opened, unless few of
        them are left. A member that joined since lacks the chunks before, so its children would wait for it to catch
        up.
        """
        peers = {lease.grant.peer for lease in self._book.leases.values() if lease.grant.shard is None}
        held = {peer for peer in peers if self._enrolled[peer].held_once}
        proven = {peer for peer in held if self._enrolled[peer].proven}
        able = proven if 2 * len(proven) > len(held) else held
        took_part = self._took_part & held
        return took_part if self._busy_since is not None and FEW_TIMES * len(took_part) >= len(peers) else able

    def _member(self, slot: int, typical: float, able: set[bytes], now: float) -> Member:
        peer = self._book.leases[slot].grant.peer
        enrolment = self._enrolled[peer]
        fresh = self._book.standing(slot, self._time(now)).rights.interior and slot not in self.lost
        has_part = self._book.leases[slot].grant.shard is not None  # so it lacks what children would need
        offered = 0.0 if enrolment.saving or has_part else enrolment.join.up_mbit
        uplink = round(self._rates.uplink(slot, offered, typical), 1)
        before = self._state.roster.member(slot) if self._state.roster is not None else None
        if before is not None and before.peer == peer and abs(before.up_mbit - uplink) < UNCHANGED_SHARE * uplink:
            uplink = before.up_mbit  # so small a change would not pay for sending it to every member
        self._regions.tell(slot, enrolment.join.region)
        member = enrolment.member(slot, peer, leaf=not (fresh and peer in able) or uplink == 0)
        return replace(member, up_mbit=uplink, region=self._regions.of(slot))

    # ------------------------------------------------------------ what members measured

    def hear(self, report: Report, now: float) -> None:
        """Take what a report says of the reporter's neighbours."""
        for slot in self._rates.hear(report.slot, report.links):
            lease = self._book.leases.get(slot)
            enrolment = self._enrolled.get(lease.grant.peer) if lease is not None else None
            if lease is not None and enrolment is not None and not enrolment.proven:
                enrolment.proven = True
                self._state.outbox.emit(Persist(f"proven/{slot}", f"grant/{slot}", record_of(lease.sealed, enrolment)))
                self._newly_proven = True
        self._regions.hear(report.slot, report.links)

    @property
    def measured(self) -> Mapping[int, Mapping[int, float]]:
        """By receiver's slot and sender's slot, the rate of the last version, in Mbit/s, as the receivers report it."""
        return self._rates.measured

    def forget(self, slot: int) -> None:
        """The lease of this slot has ended."""
        self.lost.pop(slot, None)
        self._rates.forget(slot)
        self._regions.forget(slot)
        self._stale = True

    # Measurements move edges only between versions: a root child that changes while chunks leave costs a second copy.

    def opened(self) -> None:
        """Chunks of a version are being assigned."""
        self._version_begins(float("inf"))

    def sealed(self, now: float) -> None:
        """The version is sealed; reports will tell which members hold it."""
        self._version_begins(now)

    def abandoned(self) -> None:
        """The attempt under way will not be sealed."""
        if self._busy_since == float("inf"):
            self._busy_since, self._stale = None, True

    def _version_begins(self, since: float) -> None:
        """A version is on its way: which members may be interior is decided as it begins."""
        if self._busy_since != float("inf"):
            before, self._busy_since = self._took_part, None
            self._took_part = self._able()
            self._stale = self._stale or self._took_part != before
        self._busy_since = since

    def _take_measurements(self, now: float) -> None:
        head, since = self._state.held, self._busy_since
        if since is None:
            self._stale, self._newly_proven = self._stale or self._newly_proven, False
            return
        late = now - since > ARRIVED_BEATS * self._state.tuning.heartbeat_s
        if head is None or since > now:
            return
        if late or all(lease.report is not None and lease.report.held >= head for lease in self._book.leases.values()):
            self._busy_since = None
            offered = {s: self._enrolled[x.grant.peer].join.up_mbit for s, x in self._book.leases.items()}
            self._rates.update_estimates(offered, self._feeders)
            self._regions.update()
            self._stale = True

    def _feeders(self, slot: int) -> set[int]:
        """The parents of a slot in the stripes in which it has children."""
        roster = self._state.roster
        if roster is None or roster.index_of(slot) is None:
            return set()
        stripes = [k for k in range(roster.stripes) if roster.children(k, slot)]
        return {parent for k in stripes if (parent := roster.parent(k, slot)) is not None}

    def is_root_child(self, stripe: int, peer: bytes) -> bool:
        """Whether the plan makes this peer a child of the authority in this stripe."""
        roster = self._state.roster
        member = roster.member_of(peer) if roster is not None else None
        return roster is not None and member is not None and roster.parent(stripe, member.slot) == AUTHORITY

    def hear_of_loss(self, slot: int, now: float) -> None:
        """A member reports that it lost the holder of `slot`. If that one's own reports are late too, it becomes a leaf
        for a while: hearsay alone changes nothing."""
        lease = self._book.leases.get(slot)
        if lease is None or slot in self.lost:
            return
        if self._time(now) - lease.renewed > 2 * self._state.tuning.heartbeat_s:
            self.lost[slot] = now
            self._stale = True

    def tick(self, now: float) -> None:
        """Let slots that were lost `soft_ttl_s` ago be interior again; use what was measured if a version has
        arrived."""
        self._take_measurements(now)
        for slot in [s for s, at in self.lost.items() if now - at > self._state.tuning.soft_ttl_s]:
            del self.lost[slot]
            self._stale = True
