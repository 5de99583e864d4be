"""A plan from nothing: trees grown from child slots. `child_slots` computes those; `planner` makes small changes."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from swarm.protocol.core.reach import is_circuit, scope
from swarm.protocol.membership.roster import AUTHORITY, Member
from swarm.protocol.topology.child_slots import BORDER_CHILD_SLOTS, RegionChildSlots, Supply, region_child_slots

__all__ = ["Spot", "grow", "parents_of", "spot_of"]

KEPT_CHILD_SLOTS = 2
"""A giver that feeds across a border keeps so many child slots for its own region, since it stands highest there."""
LOOK_AHEAD = 64
"""Givers examined to find one that a node behind NAT can have an edge with."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A member as the planner sees it."""

    slot: int
    region: str
    uplink: float
    """Mbit/s to give; 0: a leaf in every tree."""
    scope: int
    reachable: int
    """The widest scope of its direct addresses; -1: it has none."""

    def can_connect(self, other: "Spot") -> bool:
        """Whether one of the two can dial the other, as `reach.can_connect`."""
        return other.reachable >= self.scope or self.reachable >= other.scope


def spot_of(member: Member) -> Spot:
    """The member as the planner sees it."""
    reachable = max((int(scope(a)) for a in member.addrs if not is_circuit(a)), default=-1)
    return Spot(member.slot, member.region, 0.0 if member.leaf else member.up_mbit, member.scope, reachable)


def grow(who: Mapping[int, Spot], stripes: int, home: str = "") -> list[dict[int, int]]:
    """The parent of each slot, by stripe. `who`: the members, in the order of their slots. `home`: the trainer's
    region, where root children stand if possible.

    Deterministic: depends on the arguments only. When no member has uplink to give, all are root children.
    """
    regions: dict[str, list[Spot]] = {}
    for spot in who.values():
        regions.setdefault(spot.region, []).append(spot)
    if not any(spot.uplink > 0 for spot in who.values()):
        return [dict.fromkeys(who, AUTHORITY) for _ in range(stripes)]
    widest = max(spot.scope for spot in who.values())
    closed = frozenset(slot for slot, spot in who.items() if spot.reachable < widest)
    supplies = {
        name: Supply(
            len(interior),
            {s.slot: s.uplink for s in interior if s.uplink > 0},
            closed.intersection(s.slot for s in interior),
        )
        for name, interior in sorted(regions.items())
    }
    child_slots = region_child_slots(supplies, stripes, home)
    return [_Tree(who, child_slots, closed, stripe, home).grow() for stripe in range(stripes)]


class _Tree:
    """One stripe while it grows: breadth first, members with most child slots highest, so that it is flat."""

    def __init__(
        self,
        who: Mapping[int, Spot],
        child_slots: Mapping[str, RegionChildSlots],
        closed: frozenset[int],
        stripe: int,
        home: str,
    ) -> None:
        self._who = who
        self._closed = closed
        self._home = home
        self._stripe = stripe
        self._room = {slot: n for region in child_slots.values() for slot, n in region.by_slot[stripe].items() if n > 0}
        self._interior = sorted(self._room, key=lambda s: (-self._room[s], s))
        self._cross = {name: region.cross[stripe] for name, region in child_slots.items()}
        self._entries = {name: region.entries[stripe] > 0 for name, region in child_slots.items()}
        self._local = {name: region.local[stripe] for name, region in child_slots.items()}
        self._givers: dict[str, tuple[deque[int], deque[int]]] = {name: (deque(), deque()) for name in child_slots}
        """Placed givers by region, in the order of placing: those that can be dialed from everywhere, and the
        others."""
        self._entered: set[str] = set()
        self._order: dict[int, int] = {}
        self.parent: dict[int, int] = {}

    def grow(self) -> dict[int, int]:
        root = self._root()
        self._place(root, AUTHORITY)
        waiting = self._attach_interior([slot for slot in self._interior if slot != root])
        leaves = [slot for slot in self._who if slot not in self._room and slot != root]
        turn = self._stripe * len(leaves) // 8 % len(leaves) if leaves else 0
        # Leaves behind NAT are attached first, since not every giver with room can have an edge with them.
        for slot in waiting + sorted(leaves[turn:] + leaves[:turn], key=lambda s: s not in self._closed):
            if not self._attach(slot):
                self._place(slot, self._anyone(slot))
        return self.parent

    def _root(self) -> int:
        """The root child: one that can feed the other regions, and of those one in the trainer's region if there is
        one."""
        if not self._interior:  # a swarm of one
            return max(self._who.values(), key=lambda s: (s.uplink, -s.slot)).slot

        def rank(slot: int) -> tuple[bool, bool, int, bool, int, int]:
            region = self._who[slot].region
            feeds_all = len(self._givers) == 1 or self._cross[region] > 0
            open_ = slot not in self._closed
            return feeds_all, region == self._home, self._cross[region], open_, self._room[slot], -slot

        return max(self._interior, key=rank)

    def _place(self, slot: int, parent: int) -> None:
        self.parent[slot] = parent
        self._order[slot] = len(self._order)
        region = self._who[slot].region
        enters = region not in self._entered
        self._entered.add(region)
        if parent != AUTHORITY:
            near = self._who[parent].region == region
            heavy = enters and self._entries[self._who[parent].region]
            self._room[parent] -= min(BORDER_CHILD_SLOTS, self._room[parent]) if heavy else 1
            ledger = self._local if near else self._cross
            ledger[self._who[parent].region] -= 1
        if self._room.get(slot, 0) > 0:
            self._givers[region][slot in self._closed].append(slot)

    def _attach_interior(self, waiting: list[int]) -> list[int]:
        """Attach the interior nodes: enter every region that can be entered, attach all that is possible inside entered
        regions, and repeat. Returns the nodes that could not be attached."""
        while waiting:
            left = self._enter(waiting, BORDER_CHILD_SLOTS + KEPT_CHILD_SLOTS)
            left = [slot for slot in left if not self._attach_near(slot)]
            if len(left) == len(waiting):
                left = self._enter(waiting, 1)
            if len(left) == len(waiting):
                break
            waiting = left
        return waiting

    def _enter(self, waiting: list[int], child_slots: int) -> list[int]:
        """Attach one node of each region that is not entered yet, across a border, to a giver with so many child slots.
        Nodes whose region may feed others go first. Returns the nodes that were not attached."""
        left = list(waiting)
        for slot in sorted(waiting, key=lambda s: self._cross[self._who[s].region] <= 0):
            if self._who[slot].region not in self._entered and self._attach_across(slot, child_slots):
                left.remove(slot)
        return left

    def _attach(self, slot: int) -> bool:
        return self._attach_near(slot) or self._attach_across(slot, 1)

    def _attach_near(self, slot: int) -> bool:
        spot = self._who[slot]
        if spot.region not in self._entered or self._local[spot.region] <= 0:
            return False
        giver = self._first(spot, spot.region, 1)
        if giver is not None:
            self._place(slot, giver)
        return giver is not None

    def _attach_across(self, slot: int, child_slots: int) -> bool:
        """Attach to the highest giver of another region that may feed across. In a region that was entered already only
        when its own child slots are used up."""
        spot = self._who[slot]
        if spot.region in self._entered and self._local[spot.region] > 0:
            return False
        found = [g for name in self._givers if self._cross[name] > 0 and name != spot.region
                 if (g := self._first(spot, name, child_slots)) is not None]  # fmt: skip
        if found:
            self._place(slot, min(found, key=lambda g: self._order[g]))
        return bool(found)

    def _first(self, spot: Spot, region: str, child_slots: int) -> int | None:
        """The first giver of a region that has so much room and can have an edge with `spot`. A node that can be dialed
        takes the child slots of givers that cannot be dialed first."""
        open_, closed = self._givers[region]
        for givers in (open_, closed) if spot.slot in self._closed else (closed, open_):
            while givers and self._room[givers[0]] <= 0:
                givers.popleft()
            for giver in islice(givers, LOOK_AHEAD):
                if self._room[giver] >= child_slots and self._who[giver].can_connect(spot):
                    return giver
        return None

    def _anyone(self, slot: int) -> int:
        """The fallback when no rule can be kept: of placed givers that can have an edge with it, the one with most
        room."""
        spot = self._who[slot]
        fed = [g for g in self._order if self._who[g].uplink > 0]
        return min(
            fed,
            key=lambda g: (not self._who[g].can_connect(spot), -self._room.get(g, 0) / self._who[g].uplink, g),
        )


def parents_of(trees: Sequence[Mapping[int, int]], slots: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The trees as `Roster.parents`: by stripe, in the order of `slots`."""
    return tuple(tuple(tree[slot] for slot in slots) for tree in trees)
