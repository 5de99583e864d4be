"""How many children each node has, and in which stripes: the arithmetic of a plan made from nothing.

K trees over N members have K (N - 1) edges beside those from the trainer, so a plan needs as many *child slots*. Nodes
offer them in proportion to their uplinks, by d'Hondt's method, which makes the load of the most loaded node as small as
it can be. Then regions: inside a region of n members a stripe needs n - 1 child slots, which that region offers, and
each border is crossed once a stripe. A region whose uplinks would then be more than `SPILL` times as busy as the
swarm's on average is also fed from outside.

A *giver* is a member that has uplink to give.
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
    "child_slots_by_giver",
    "region_child_slots",
]

SPILL = 1.05
"""A region offers up to so many times its fair share of child slots before its border is crossed more than once."""
BORDER_CHILD_SLOTS = 2
"""Child slots that the first edge into a region takes of its giver: a whole region waits for it, and over a long round
trip it gets less than its part of a queue that is always full."""
WAYS_OUT = 1 / 64
"""The trainer's region feeds other regions itself with up to this share of its own child slots, so that no chunk makes
two long hops in sequence."""
LARGE_REGION = 8
"""`BORDER_CHILD_SLOTS` applies where regions have at least so many members on average. In smaller regions half of all
edges would be such edges."""
DISJOINT_FROM = 4
"""With at least so many givers a stripe, each gives in one stripe only, so that a loss costs one stripe. With fewer,
the uplinks of the stripes would be too unequal, so a node may be interior in several trees."""


@dataclass(frozen=True, slots=True)
class Supply:
    """One region's members and uplinks."""

    members: int
    uplinks: Mapping[int, float]
    """Uplinks of its givers in Mbit/s, by slot."""
    closed: frozenset[int] = frozenset()
    """Slots of members that cannot be dialed from everywhere: such a giver needs children that can be dialed."""


@dataclass(slots=True)
class RegionChildSlots:
    """The child slots that one region offers, by stripe: inside itself (`local`) and across its border (`cross`)."""

    local: list[int]
    cross: list[int]
    entries: list[int]
    """Of `cross`: edges that are the first into another region, which then depends on them. 0 where regions are
    small."""
    by_slot: list[dict[int, int]] = field(default_factory=list)
    """By stripe: the child slots of each giver. Their sum is `local[k] + cross[k]` and `BORDER_CHILD_SLOTS - 1` more
    for each entry."""


def apportion(child_slots: int, weights: Mapping[int, float]) -> dict[int, int]:
    """Share `child_slots` out in proportion to positive weights, by d'Hondt's method: the largest quotient of child
    slots and weight is as small as it can be. Of equals the lower slot gets more."""
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
    """The child slots of each region in each stripe; N - 1 in every stripe over all regions. `home`: the trainer's
    region. It keeps at least one child slot across its border in each stripe, if it has uplink enough, so that root
    children can stand near the trainer; more where it is large."""
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
            # Take all crossings of a stripe from one region if possible: then a chunk makes one long hop, not several.
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
        child_slots.by_slot = child_slots_by_giver(totals, supply)
    return made


def _cross(child_slots: int, local: Mapping[str, int], uplink: Mapping[str, float]) -> dict[str, int]:
    """Child slots across borders, by region, so that the regions' loads are as even as possible together with
    `local`."""
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


def child_slots_by_giver(room: Sequence[int], supply: Supply) -> list[dict[int, int]]:
    """The child slots of each giver in each stripe: fills `room` (by stripe) from givers in proportion to uplinks.

    Each stripe gets enough child slots of givers that can be dialed for all members that cannot, if there are so many.
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


def _fill(places: list[dict[int, int]], room: list[int], shares: dict[int, int], slots: Iterable[int]) -> None:
    """Put `shares` into stripes as far as there is `room`. Both are changed to what is left of them."""
    for slot in sorted(slots, key=lambda s: (-shares[s], s)):
        while shares[slot] > 0 and any(room):
            fitting = [k for k in range(len(room)) if room[k] >= shares[slot]]
            # A stripe that takes the whole share, so that the giver is interior in few trees: one where it is interior
            # already, else the fullest. If none does, the emptiest stripe takes a part.
            if fitting:
                stripe = min(fitting, key=lambda k: (slot not in places[k], room[k], k))
            else:
                stripe = max(range(len(room)), key=lambda k: room[k])
            taken = min(room[stripe], shares[slot])
            places[stripe][slot] = places[stripe].get(slot, 0) + taken
            room[stripe] -= taken
            shares[slot] -= taken


def _disjoint(room: Sequence[int], *kinds: Mapping[int, float]) -> list[dict[int, int]]:
    """Put each giver into one stripe: the one that has least uplink so far for the child slots that it needs. Each kind
    of giver is spread over all stripes."""
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
