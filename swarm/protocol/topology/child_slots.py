"""How many children each node feeds, and in which stripes: the arithmetic of a plan made from nothing.

K trees over N members have K (N - 1) edges beside those from the trainer: so many *seats* are to be offered. Every node
offers them in proportion to its uplink (d'Hondt: of all ways to share them out it makes the most loaded node's load
least, which is the headroom that a plan can have). Then regions: inside a region of n members a stripe needs n - 1
seats, offered by that region, and each border is crossed once a stripe; only a region whose uplinks would be busier
with that than the swarm's are on average (`SPILL`) is fed from outside as well.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "BORDER_CHILD_SLOTS",
    "DISJOINT_FROM",
    "SPILL",
    "RegionChildSlots",
    "Supply",
    "apportion",
    "region_child_slots",
    "standing_places",
]

SPILL = 1.05
"""A region is asked for up to so many times its fair share of seats before borders are crossed more than once."""
BORDER_CHILD_SLOTS = 2
"""An edge into a region takes so many seats of its giver: a whole region waits for it, and over a long way a queue
that is ever full leaves it less than its part."""
WAYS_OUT = 1 / 64
"""The trainer's region feeds all others itself as far as that takes no more of its seats than this: then no chunk makes
two long hops, one after the other."""
LARGE_REGION = 8
"""Where regions have so many members on average. In smaller ones half of all edges are of this kind."""
DISJOINT_FROM = 4
"""With at least so many givers a stripe, nobody gives in more than one: a loss then costs one stripe. With fewer, whose
uplinks would come out too unequal by stripe, a node may stand inside several trees."""


@dataclass(frozen=True, slots=True)
class Supply:
    """One region as the arithmetic sees it."""

    members: int
    uplinks: Mapping[int, float]
    """Mbit/s of its givers, by slot."""
    closed: frozenset[int] = frozenset()
    """Members that not everyone can dial: givers among them may feed only others, who can be dialed."""


@dataclass(slots=True)
class RegionChildSlots:
    """What one region offers, by stripe: children inside itself, and across its border."""

    local: list[int]
    cross: list[int]
    entries: list[int]
    """Of those across: the first into a region, on which all of it hangs. Counted in large regions only."""
    by_slot: list[dict[int, int]] = field(default_factory=list)
    """By stripe: the seats of each giver; in all `local[k] + cross[k]`, and `BORDER_SEATS - 1` more for each entry."""


def apportion(child_slots: int, weights: Mapping[int, float]) -> dict[int, int]:
    """`child_slots` in proportion to weights (positive), by d'Hondt: least largest seats/weight. Ties: the lower
    slot."""
    total = sum(weights.values())
    shares = {slot: int(child_slots * weight / total) for slot, weight in weights.items()}
    queue = [((shares[slot] + 1) / weight, slot) for slot, weight in weights.items()]
    heapq.heapify(queue)
    for _ in range(child_slots - sum(shares.values())):
        _, slot = queue[0]
        shares[slot] += 1
        heapq.heapreplace(queue, ((shares[slot] + 1) / weights[slot], slot))
    return shares


def region_child_slots(regions: Mapping[str, Supply], stripes: int, home: str = "") -> dict[str, RegionChildSlots]:
    """What each region offers in each stripe. In every stripe all of it comes to N - 1 seats. `home`: where the trainer
    stands; a way out of it is kept in each stripe, so that heads can stand near the trainer; more where it is large."""
    count = sum(supply.members for supply in regions.values())
    uplink = {name: sum(supply.uplinks.values()) for name, supply in regions.items()}
    whole = sum(uplink.values())
    local = {}
    for name, supply in regions.items():
        fair = stripes * (count - 1) * uplink[name] / whole
        need = stripes * max(0, supply.members - 1)
        local[name] = need if len(regions) == 1 else min(need, int(SPILL * fair))
    givers = [name for name in regions if uplink[name] > 0]
    cross = _cross(stripes * (count - 1) - sum(local.values()), local, {g: uplink[g] for g in givers})
    weighed = BORDER_CHILD_SLOTS > 1 and count >= LARGE_REGION * len(regions)
    ways_out = int(home in givers and 2 * stripes * whole <= stripes * (count - 1) * uplink[home])
    if ways_out and weighed:
        ways_out = max(1, int(WAYS_OUT * local[home] / (BORDER_CHILD_SLOTS * stripes)))
    made = {name: RegionChildSlots(_even(local[name], stripes), [0] * stripes, [0] * stripes) for name in regions}
    for stripe in range(stripes):
        lacking = count - 1 - sum(made[name].local[stripe] for name in regions)
        entries = len(regions) - 1
        if (taken := min(ways_out, entries)) > 0:
            made[home].cross[stripe] += taken
            made[home].entries[stripe] += taken * weighed
            cross[home] -= taken
            lacking -= taken
            entries -= taken
        while lacking > 0:
            # All of a stripe's crossings from one region where that can be: its chunks make one long hop, not several.
            name = max(givers, key=lambda g: (cross[g], uplink[g], g))
            taken = max(1, min(lacking, cross[name]))
            made[name].cross[stripe] += taken
            made[name].entries[stripe] += min(taken, entries) * weighed
            entries -= min(taken, entries)
            cross[name] -= taken
            lacking -= taken
    for name, supply in regions.items():
        child_slots = made[name]
        totals = [
            a + b + (BORDER_CHILD_SLOTS - 1) * c
            for a, b, c in zip(child_slots.local, child_slots.cross, child_slots.entries, strict=True)
        ]
        child_slots.by_slot = standing_places(totals, supply)
    return made


def _cross(child_slots: int, local: Mapping[str, int], uplink: Mapping[str, float]) -> dict[str, int]:
    """Seats across borders, by region, so that with the local ones loads come out as even as they can."""
    cross = dict.fromkeys(uplink, 0)
    queue = [((local[g] + 1) / weight, g) for g, weight in uplink.items()]
    heapq.heapify(queue)
    for _ in range(child_slots):
        _, name = queue[0]
        cross[name] += 1
        heapq.heapreplace(queue, ((local[name] + cross[name] + 1) / uplink[name], name))
    return cross


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (k < total % parts) for k in range(parts)]


def standing_places(room: Sequence[int], supply: Supply) -> list[dict[int, int]]:
    """Who gives in which stripe, and how many seats: fills `room` (by stripe) from givers in proportion to uplinks.

    Each stripe gets seats enough of givers that can be dialed for all members that cannot, where there are so many.
    """
    uplinks = supply.uplinks
    if not uplinks or not any(room):
        return [{} for _ in room]
    open_ = {slot: u for slot, u in uplinks.items() if slot not in supply.closed}
    closed = {slot: u for slot, u in uplinks.items() if slot in supply.closed}
    if len(uplinks) >= DISJOINT_FROM * len(room):
        return _disjoint(room, open_, closed)
    places: list[dict[int, int]] = [{} for _ in room]
    shares = apportion(sum(room), uplinks)
    reserve = [min(n, len(supply.closed)) if open_ else 0 for n in room]
    lacking = sum(reserve) - sum(shares[slot] for slot in open_)
    if lacking > 0:
        shares = apportion(sum(reserve), open_)
        shares |= apportion(sum(room) - sum(reserve), closed) if closed else {}
    left = [n - r for n, r in zip(room, reserve, strict=True)]
    _fill(places, reserve, shares, open_)
    _fill(places, [a + b for a, b in zip(left, reserve, strict=True)], shares, uplinks)
    return places


def _fill(places: list[dict[int, int]], room: list[int], shares: dict[int, int], who: Iterable[int]) -> None:
    """Put shares into stripes as far as there is room; `room` and `shares` become what is left of them."""
    for slot in sorted(who, key=lambda s: (-shares[s], s)):
        while shares[slot] > 0 and any(room):
            fitting = [k for k in range(len(room)) if room[k] >= shares[slot]]
            # The stripe that it fits best, so that it stands in few trees; else the emptiest, and what remains goes on.
            if fitting:
                stripe = min(fitting, key=lambda k: (slot not in places[k], room[k], k))
            else:
                stripe = max(range(len(room)), key=lambda k: room[k])
            taken = min(room[stripe], shares[slot])
            places[stripe][slot] = places[stripe].get(slot, 0) + taken
            room[stripe] -= taken
            shares[slot] -= taken


def _disjoint(room: Sequence[int], *kinds: Mapping[int, float]) -> list[dict[int, int]]:
    """Each giver in one stripe, each kind spread over all: to that which lacks most uplink so far for what it needs."""
    total = [0.0] * len(room)
    sides: list[dict[int, float]] = [{} for _ in room]
    needy = [k for k in range(len(room)) if room[k] > 0]
    for uplinks in kinds:
        weight = [0.0] * len(room)
        for slot in sorted(uplinks, key=lambda s: (-uplinks[s], s)):
            stripe = min(needy, key=lambda k: (weight[k] / room[k], total[k] / room[k], k))
            sides[stripe][slot] = uplinks[slot]
            weight[stripe] += uplinks[slot]
            total[stripe] += uplinks[slot]
    return [apportion(child_slots, side) if side else {} for child_slots, side in zip(room, sides, strict=True)]
