"""The plan kept up to date: when a member joins or leaves, few edges move.

A plan from nothing (`trees.grow`) is made at the start and when a quarter of the swarm has changed. Between, a newcomer
is attached to the least loaded giver, the children of a member that left are shared out among the others, and a member
that has uplink to give again takes children from the most loaded. An update moves the edges that it must (those of
members that joined or left) and at most `EXTRA_MOVES` more for each member that changed.

A *giver* is a member with uplink to give; its *load* is its number of children, in all stripes, for each Mbit/s.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest

from swarm.protocol.membership.roster import AUTHORITY, Member
from swarm.protocol.topology.child_slots import DISJOINT_FROM, SPILL
from swarm.protocol.topology.trees import Spot, grow, parents_of, spot_of

__all__ = ["EXTRA_MOVES", "Planner"]

EXTRA_MOVES = 24
"""Edges that a changed member may move beside its own: as many as the children of a node of three times the mean uplink
in 8 stripes."""
UNEVEN = 1.25
"""A node sheds children when its load is more than so many times the mean. Below that, a move costs more than it
gains."""
GROW_ANEW = 4
"""All trees are grown anew when more than one in so many members joined, left, or began or ceased to give."""
LOOK_ANEW = 32
"""Whenever one in so many members has changed, an idle update checks whether growing anew pays."""
CROSSINGS_TIMES = 1.25
"""Growing anew pays when so many times as many edges cross borders as would then."""
SMALL = 64
"""A swarm of up to so many members is small: a whole roster is a few KB, one edge too many across a border is a good
part of a copy, and one node without children is a good part of all uplink. Small changes cannot mend that in small
regions: trees that grew by single joins were worse than trees planned at once in two of five join orders of eight
unequal nodes."""
SMALL_UNEVEN = 1.02
"""In a small swarm, growing anew pays when the highest load is so many times what it would be then: a step waits for
the most loaded node."""


class Planner:
    """The current trees. `home`: the trainer's region."""

    def __init__(self, stripes: int, home: str = "") -> None:
        self.stripes = stripes
        self._home = home
        self._who: dict[int, Spot] = {}
        self._givers_of: Counter[str] = Counter()
        """The number of givers of each region."""
        self._mean = 0.0
        """The mean load."""
        self._budget = 0
        """Edges that may still be moved for balance in this update."""
        self._changes = 0
        """Members that joined, left, or began or ceased to give since the trees were grown."""
        self._looked_at = 0
        """`_changes` when it was last checked whether growing anew pays."""
        self._touched: set[int] = set()
        """Slots that were given children in this update."""
        self._seen: dict[int, tuple[Member, Spot]] = {}
        self._parent: list[dict[int, int]] = [{} for _ in range(stripes)]
        self._kids: list[dict[int, set[int]]] = [{} for _ in range(stripes)]
        self._given: dict[int, int] = {}
        self._only: dict[int, int] = {}
        """Maps a slot to the single stripe in which it may be interior."""
        self._givers: dict[tuple[str, int], set[int]] = {}
        """By region and stripe: the slots that may be interior there."""

    def update(self, members: Sequence[Member], *, idle: bool = False) -> tuple[tuple[int, ...], ...]:
        """`Roster.parents` for these members, in the order of their slots. `idle`: no version is on its way, so the
        trees may also be grown anew because many members joined, or because small changes have added up."""
        who = self._spots(members)
        self._givers_of = Counter(spot.region for spot in who.values() if spot.uplink > 0)
        self._mean = self.stripes * max(0, len(who) - 1) / (sum(spot.uplink for spot in who.values()) or 1.0)
        before = self._who
        gone = [s for s in before if s not in who]
        came = [s for s in who if s not in before]
        gave = {s for s, spot in before.items() if spot.uplink > 0}
        gives = {s for s, spot in who.items() if spot.uplink > 0}
        upset = gave.symmetric_difference(gives).union(gone)
        changed = len(upset.union(came))
        self._changes += changed
        if not gave or not gives or GROW_ANEW * (changed if idle else len(upset)) > 3 + len(who):
            self._who = who
            self._use(grow(who, self.stripes, self._home))
        else:
            self._budget = EXTRA_MOVES * max(1, changed)
            self._adjust(who, gone, came)
            if idle:
                self._renew()
        return parents_of(self._parent, list(who))

    def _renew(self) -> None:
        """No version is on its way: grow the trees anew if that pays. That sends a whole roster to each member, so the
        trees must be much better, or as much must have been sent in changes."""
        if LOOK_ANEW * (self._changes - self._looked_at) <= len(self._who):
            return
        self._looked_at = self._changes
        grown = grow(self._who, self.stripes, self._home)
        now, least = self._crossings(self._parent), self._crossings(grown)
        if len(self._who) <= SMALL:
            pays = (
                now > least
                or self._worst_load(self._parent) > SMALL_UNEVEN * self._worst_load(grown)
                or _places(self._parent) > _places(grown)
            )
        else:
            pays = now > CROSSINGS_TIMES * least + self.stripes
        if pays or GROW_ANEW * self._changes > len(self._who):
            self._use(grown)

    def _spots(self, members: Sequence[Member]) -> dict[int, Spot]:
        """The members as spots, in the order of slots. Spots of unchanged members are reused."""
        seen, self._seen = self._seen, {}
        for member in sorted(members, key=lambda m: m.slot):
            known = seen.get(member.slot)
            if known is None or known[0] != member:
                known = member, spot_of(member)
            self._seen[member.slot] = known
        return {slot: spot for slot, (_, spot) in self._seen.items()}

    # ------------------------------------------------------------ from nothing

    def _use(self, trees: list[dict[int, int]]) -> None:
        """Use these trees from now on."""
        self._changes = self._looked_at = 0
        self._parent = trees
        self._kids = [{} for _ in range(self.stripes)]
        self._given = dict.fromkeys(self._who, 0)
        for stripe, tree in enumerate(self._parent):
            for slot, parent in tree.items():
                if parent != AUTHORITY:
                    self._kids[stripe].setdefault(parent, set()).add(slot)
                    self._given[parent] += 1
        self._only.clear()
        self._givers.clear()
        for slot in self._who:
            self._open_stripes(slot)

    def _crossings(self, trees: list[dict[int, int]]) -> int:
        """The number of edges that cross a border."""
        who = self._who
        return sum(
            parent != AUTHORITY and who[parent].region != who[slot].region
            for tree in trees
            for slot, parent in tree.items()
        )

    def _worst_load(self, trees: list[dict[int, int]]) -> float:
        """The highest load of a member."""
        given = Counter(parent for tree in trees for parent in tree.values() if parent != AUTHORITY)
        return max((count / (self._who[slot].uplink or 1.0) for slot, count in given.items()), default=0.0)

    def _open_stripes(self, slot: int) -> None:
        """Decide in which stripes a giver may be interior: in one, if its region has givers enough."""
        spot = self._who[slot]
        if spot.uplink <= 0:
            return
        interior = [k for k in range(self.stripes) if self._kids[k].get(slot)]
        if len(interior) < 2 and self._givers_of[spot.region] >= DISJOINT_FROM * self.stripes:
            self._only[slot] = interior[0] if interior else self._poorest_stripe(spot.region)
        for stripe in [self._only[slot]] if slot in self._only else range(self.stripes):
            self._givers.setdefault((spot.region, stripe), set()).add(slot)

    def _open_all_stripes(self) -> None:
        """Let givers be interior in every stripe, in regions that have too few givers left for one stripe each."""
        for slot in [s for s in self._only if 2 * self._givers_of[self._who[s].region] < DISJOINT_FROM * self.stripes]:
            del self._only[slot]
            for stripe in range(self.stripes):
                self._givers.setdefault((self._who[slot].region, stripe), set()).add(slot)

    def _poorest_stripe(self, region: str) -> int:
        """The stripe whose givers in this region have least uplink."""
        return min(
            range(self.stripes),
            key=lambda k: (sum(self._who[s].uplink for s in self._givers.get((region, k), ())), k),
        )

    def _close_stripes(self, slot: int, region: str) -> None:
        self._only.pop(slot, None)
        for stripe in range(self.stripes):
            self._givers.get((region, stripe), set()).discard(slot)

    # ------------------------------------------------------------ small changes

    def _adjust(self, who: dict[int, Spot], gone: list[int], came: list[int]) -> None:
        before, self._who = self._who, who
        stopped = [s for s, spot in who.items() if s in before and before[s].uplink > 0 >= spot.uplink]
        moved = [s for s, spot in who.items() if s in before and before[s].region != spot.region]
        for slot in [*gone, *stopped, *moved]:
            self._close_stripes(slot, before[slot].region)
        orphans = [self._detach_children(slot, leaves=slot in gone) for slot in [*gone, *stopped]]
        for slot in gone:
            del self._given[slot]
        for slot in came:
            self._given[slot] = 0
        started = [s for s, spot in who.items() if spot.uplink > 0 and (s not in before or before[s].uplink <= 0)]
        for slot in sorted({*started, *(s for s in moved if who[s].uplink > 0)}):
            self._open_stripes(slot)
        self._open_all_stripes()
        for stripe in range(self.stripes):
            unattached = [s for mine in orphans for k, s in mine if k == stripe and s in who]
            self._attach_all(stripe, [*unattached, *came])
        for slot in moved:
            self._attach_in_region(slot)
        self._balance(who, before, [*started, *moved])

    def _detach_children(self, slot: int, *, leaves: bool) -> list[tuple[int, int]]:
        """Detach its children, and with `leaves` the member itself. Returns (stripe, slot) of those to attach
        elsewhere."""
        unattached: list[tuple[int, int]] = []
        for stripe in range(self.stripes):
            for child in sorted(self._kids[stripe].pop(slot, ())):
                del self._parent[stripe][child]
                self._given[slot] -= 1
                unattached.append((stripe, child))
            if leaves:
                self._detach(stripe, slot)
            elif self._parent[stripe].get(slot) == AUTHORITY:
                self._detach(stripe, slot)
                unattached.append((stripe, slot))
        return unattached

    def _detach(self, stripe: int, slot: int) -> None:
        parent = self._parent[stripe].pop(slot, None)
        if parent is not None and parent != AUTHORITY:
            self._kids[stripe].get(parent, set()).discard(slot)
            self._given[parent] -= 1

    def _attach(self, stripe: int, slot: int, parent: int) -> None:
        self._parent[stripe][slot] = parent
        if parent != AUTHORITY:
            self._kids[stripe].setdefault(parent, set()).add(slot)
            self._given[parent] += 1
            self._touched.add(parent)

    def _attach_all(self, stripe: int, slots: list[int]) -> None:
        """Attach these slots, each with its subtree. A tree without a root child gets one first."""
        waiting = list(dict.fromkeys(slots))
        if waiting and not any(True for _ in self._all_givers(stripe)):
            strongest = max((s for s in self._who.values() if s.uplink > 0), key=lambda s: (s.uplink, -s.slot))
            self._givers.setdefault((strongest.region, stripe), set()).add(strongest.slot)
        if waiting and AUTHORITY not in self._parent[stripe].values():
            root_child = max(waiting, key=lambda s: (self._may_give(s, stripe), self._who[s].uplink, -s))
            if not self._may_give(root_child, stripe):
                root_child = max(self._all_givers(stripe), key=lambda s: (self._who[s].uplink, -s))
                self._detach(stripe, root_child)
            waiting = [s for s in waiting if s != root_child]
            self._attach(stripe, root_child, AUTHORITY)
        # Slots with most children first, so that the others can be attached below them.
        for slot in sorted(waiting, key=lambda s: (-len(self._kids[stripe].get(s, ())), s)):
            self._attach(stripe, slot, self._giver(stripe, slot))

    def _may_give(self, slot: int, stripe: int) -> bool:
        return slot in self._givers.get((self._who[slot].region, stripe), ())

    def _all_givers(self, stripe: int) -> Iterable[int]:
        for (_, k), slots in sorted(self._givers.items()):
            if k == stripe:
                yield from sorted(slots)

    def _giver(self, stripe: int, slot: int) -> int:
        """The parent to attach `slot` to: the least loaded giver of its own region, or of another one if all of those
        are loaded too much."""
        region = self._who[slot].region
        near = self._least(stripe, slot, self._givers.get((region, stripe), ()))
        if near is not None and self._load(near, 1) <= SPILL * self._mean:
            return near
        far = self._least(stripe, slot, [g for g in self._all_givers(stripe) if self._who[g].region != region])
        if far is not None and (near is None or SPILL * self._load(far, 1) < self._load(near, 1)):
            return far
        # No giver of this stripe is available, since all are below this very slot: the root child takes it.
        return near if near is not None else next(s for s, p in self._parent[stripe].items() if p == AUTHORITY)

    def _least(self, stripe: int, slot: int, group: Iterable[int]) -> int | None:
        spot = self._who[slot]
        usable = [g for g in group if g != slot]
        for look_at in (16, len(usable)):
            near = nsmallest(look_at, usable, key=lambda g: (self._load(g, 1), g))
            near = [g for g in near if self._depth(stripe, g, below=slot) is not None]
            near = [g for g in near if self._who[g].can_connect(spot)] or near
            if near:
                limit = max(UNEVEN * self._load(near[0], 1), self._mean)
                return min(near, key=lambda g: self._rank(stripe, slot, g, limit))
        return None

    def _rank(self, stripe: int, slot: int, giver: int, limit: float) -> tuple[bool, bool, int, int]:
        """Sort key of givers: not overloaded, interior in this tree already, near the root."""
        depth = self._depth(stripe, giver, below=slot)
        new = not self._kids[stripe].get(giver)
        return self._load(giver, 1) > limit, new, 0 if depth is None else depth, giver

    def _load(self, slot: int, more: int = 0) -> float:
        return (self._given[slot] + more) / self._who[slot].uplink

    def _depth(self, stripe: int, slot: int, below: int) -> int | None:
        """Hops from the trainer; None when `slot` is below `below`, or not attached."""
        at: int | None = slot
        for depth in range(len(self._who) + 2):
            if at == AUTHORITY:
                return depth
            if at is None or at == below:
                return None
            at = self._parent[stripe].get(at)
        return None

    def _attach_in_region(self, slot: int) -> None:
        """Its region has changed: attach it to a giver of that region in each stripe where there is one."""
        region = self._who[slot].region
        for stripe in range(self.stripes):
            parent = self._parent[stripe][slot]
            if parent == AUTHORITY or self._who[parent].region == region:
                continue
            giver = self._least(stripe, slot, self._givers.get((region, stripe), ()))
            if giver is not None:
                self._detach(stripe, slot)
                self._attach(stripe, slot, giver)

    # ------------------------------------------------------------ balance

    def _balance(self, who: dict[int, Spot], before: dict[int, Spot], started: list[int]) -> None:
        """Givers with room take children from the most loaded; givers with too many shed some."""
        changed = [s for s, spot in who.items() if s in before and before[s].uplink != spot.uplink]
        for slot in dict.fromkeys([*started, *changed]):
            if who[slot].uplink > 0:
                self._repeat(lambda s=slot: self._load(s, 1) <= self._mean and self._take_child(s))
        for slot in sorted({*changed, *self._touched}):
            if slot in who and who[slot].uplink > 0:
                self._repeat(lambda s=slot: self._load(s, -1) > UNEVEN * self._mean and self._shed_child(s))
        self._touched.clear()

    def _repeat(self, step: Callable[[], bool]) -> None:
        while self._budget > 0 and step():
            self._budget -= 1

    def _take_child(self, slot: int) -> bool:
        """Move a child from the most loaded giver of its region to `slot`, in a stripe where `slot` may be interior."""
        region = self._who[slot].region
        loaded: list[tuple[float, int, int]] = []
        for stripe in [self._only[slot]] if slot in self._only else range(self.stripes):
            # Prefer a tree where it is interior already: in each further one, its loss would cost one more stripe.
            worth = 1.1 if self._kids[stripe].get(slot) else 1.0
            for giver in self._givers.get((region, stripe), ()):
                load = self._load(giver) * worth
                if giver != slot and self._kids[stripe].get(giver) and load > UNEVEN * self._load(slot, 1):
                    loaded.append((-load, giver, stripe))
        return any(self._move_child(stripe, giver, slot) for _, giver, stripe in sorted(loaded))

    def _shed_child(self, slot: int) -> bool:
        """Move a child from `slot` to the least loaded giver that can take it."""
        region = self._who[slot].region
        free: list[tuple[float, int, int]] = []
        for stripe in range(self.stripes):
            for giver in self._givers.get((region, stripe), ()) if self._kids[stripe].get(slot) else ():
                load = self._load(giver, 1)
                if giver != slot and UNEVEN * load < self._load(slot):
                    free.append((load, giver, stripe))
        return any(self._move_child(stripe, slot, giver) for _, giver, stripe in sorted(free))

    def _move_child(self, stripe: int, source: int, target: int) -> bool:
        """Move one child from `source` to `target`: preferably of the target's region and with few children, and never
        one that the target is below."""
        region = self._who[target].region
        children = [
            c for c in self._kids[stripe][source] if c != target and self._who[c].can_connect(self._who[target])
        ]
        children.sort(key=lambda c: (self._who[c].region != region, len(self._kids[stripe].get(c, ())), c))
        for child in children:
            if self._who[child].region != region and self._who[source].region == region:
                return False  # an edge more would cross the border
            if self._depth(stripe, target, below=child) is not None:
                self._detach(stripe, child)
                self._attach(stripe, child, target)
                return True
        return False


def _places(trees: list[dict[int, int]]) -> int:
    """Over all nodes, the number of trees in which each is interior: each such place adds a hop for other nodes."""
    return sum(len(set(tree.values()) - {AUTHORITY}) for tree in trees)
