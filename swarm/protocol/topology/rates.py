"""The authority's estimates of members' uplinks and regions, from what their neighbours report.

A member offers an uplink (`--up-mbit`), which is a limit and a first guess. After each version the rates that its
receivers reported are added up. Chunks are assigned to stripes by demand, so a stripe with a slow node brings less than
its part: when half of a node's receivers say so, and its own parent is not slow too, that sum is all that the node can
give. A single receiver counts for no more than twice the median. A node that was found so slow that it feeds no other
is not measured any more, so it is tried again after some versions; else one bad start would cost its uplink for good.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from swarm.protocol.core.documents import UNTIMED, Link

__all__ = ["TRIPS_KEPT", "Rates", "Regions"]

GUESS_LIMIT = 4.0
"""Until it has been measured, an uplink counts for at most so many times the swarm's median. So a member that
overstates its uplink has too many children for one version only."""
SHORT_PERCENT = 40
"""When half of the receivers got so many percent less than their part, the uplink was full. Plans are uneven by
less."""
RISE = 1.15
"""Factor by which an estimate rises with each version that did not fill the uplink, up to what the member offers."""
LEAST_MBIT = 0.1
"""No estimate falls below this, so that it can rise again."""
NEAR_MS = 30
NEAR_TIMES = 1.5
"""Two members are in one region when their round trip is below `NEAR_MS`, or below so many times the shortest of
all."""
TRIPS_KEPT = 64
"""Round trips kept for each member, the shortest of all. Over the life of a swarm it measures that to most others."""
LINKS_TO_JUDGE = 3
"""A member that is far from all of at least so many neighbours is a region of its own."""


@dataclass(slots=True)
class _Giver:
    claims: dict[int, Link] = field(default_factory=dict)
    """What each receiver reported for this version."""
    estimate: float | None = None
    """Mbit/s; None: never measured."""
    falls: int = 0
    """In how many measured versions in a row its uplink was full."""

    def is_short(self) -> bool:
        """Whether half of its receivers report that it brought `SHORT_PERCENT` less than its part, or was as much
        slower."""
        return bool(self.claims) and median(link.short_percent for link in self.claims.values()) >= SHORT_PERCENT

    def assess(self, offered: float, *, full: bool) -> float:
        """The new estimate, in Mbit/s. `full`: it delivered all that it can, so the estimate falls by what its
        receivers were short of."""
        rates = [link.kbit_s / 1000 for link in self.claims.values() if link.kbit_s > UNTIMED]
        middle = median(rates) if rates else 0.0
        delivered = sum(min(rate, 2 * middle) for rate in rates)
        if not full:
            self.falls = 0
            return min(offered, max(delivered, RISE * (offered if self.estimate is None else self.estimate)))
        self.falls += 1
        left = 1 - median(link.short_percent for link in self.claims.values()) / 100
        return min(offered, max(delivered, left * (self.estimate or 0.0), LEAST_MBIT))

    def rest(self, offered: float) -> float | None:
        """The new estimate after a version in which it fed no other member: it rises until the member is tried again,
        half as fast after each further failure."""
        if self.estimate is None:
            return None
        return min(offered, self.estimate * RISE ** (2.0 ** (1 - max(1, self.falls))))


class Rates:
    """Estimated uplinks by slot."""

    def __init__(self) -> None:
        self._givers: dict[int, _Giver] = {}
        self.measured: dict[int, dict[int, float]] = {}
        """For the status: by receiver's slot and sender's slot, Mbit/s, of the last version that could be timed."""

    def forget(self, slot: int) -> None:
        """Another peer holds the slot from now on."""
        self._givers.pop(slot, None)
        self.measured.pop(slot, None)

    def hear(self, receiver: int, links: Iterable[Link]) -> list[int]:
        """Take what `receiver` reports. Returns the slots from which it got verified bytes."""
        gave: list[int] = []
        links = tuple(links)
        if timed := {link.slot: link.kbit_s / 1000 for link in links if link.kbit_s > UNTIMED}:
            self.measured[receiver] = timed
        for link in links:
            if link.slot != receiver and (link.kbit_s or link.short_percent):
                self._givers.setdefault(link.slot, _Giver()).claims[receiver] = link
                gave += [link.slot] if link.kbit_s else []
        return gave

    def update_estimates(self, offered: Mapping[int, float], feeders: Callable[[int], set[int]]) -> None:
        """A version has arrived everywhere: make new estimates. `offered`: Mbit/s by slot. `feeders`: the parents of a
        slot in the stripes in which it has children."""
        slow = {slot for slot, giver in self._givers.items() if giver.is_short()}
        for slot, giver in self._givers.items():
            if slot in offered:
                full = slot in slow and slow.isdisjoint(feeders(slot))
                giver.estimate = giver.assess(offered[slot], full=full) if giver.claims else giver.rest(offered[slot])
            giver.claims.clear()

    def uplink(self, slot: int, offered: float, typical: float) -> float:
        """The uplink to plan with, in Mbit/s. `typical`: the median of what members offer."""
        giver = self._givers.get(slot)
        if giver is None or giver.estimate is None:
            return min(offered, GUESS_LIMIT * typical) if typical > 0 else offered
        return min(offered, giver.estimate)


class Regions:
    """The members' regions: parts of the swarm that short round trips connect. A region that a user named (`--region`)
    extends to members near by; other regions are named after a slot."""

    def __init__(self) -> None:
        self._named: dict[int, str] = {}
        self._found: dict[int, str] = {}
        self._rtt_ms: dict[int, dict[int, int]] = {}
        """The round trips of each slot. One between two slots may be kept for one of them only."""
        self._heard = False

    def forget(self, slot: int) -> None:
        """Another peer holds the slot from now on."""
        self._named.pop(slot, None)
        self._found.pop(slot, None)
        self._rtt_ms.pop(slot, None)
        for known in self._rtt_ms.values():
            known.pop(slot, None)

    def tell(self, slot: int, region: str) -> None:
        """The user of this slot's member named its region."""
        if region:
            self._named[slot] = region

    def of(self, slot: int) -> str:
        """The region of a slot; empty while it is not known."""
        return self._named.get(slot) or self._found.get(slot, "")

    def hear(self, slot: int, links: Iterable[Link]) -> None:
        """Take the round trips that this slot measured. Of two for one pair the shorter counts."""
        for link in links:
            if link.rtt_ms and link.slot != slot:
                self._note(slot, link.slot, link.rtt_ms)
                self._note(link.slot, slot, link.rtt_ms)

    def _note(self, a: int, b: int, rtt_ms: int) -> None:
        known = self._rtt_ms.setdefault(a, {})
        if b in known and known[b] <= rtt_ms:
            return
        if b not in known and len(known) == TRIPS_KEPT:
            longest = max(known, key=known.__getitem__)
            if known[longest] <= rtt_ms:
                return
            del known[longest]
        known[b] = rtt_ms
        self._heard = True

    def update(self) -> None:
        """Form regions anew from the round trips: members that are near each other, directly or through others, are in
        one."""
        if not self._heard:
            return
        self._heard = False
        shortest = min((rtt for known in self._rtt_ms.values() for rtt in known.values()), default=0)
        limit = max(NEAR_MS, NEAR_TIMES * shortest)
        near = {slot: set[int]() for slot in self._rtt_ms}
        for slot, known in self._rtt_ms.items():
            for other, rtt in known.items():
                if rtt < limit:
                    near[slot].add(other)
                    near[other].add(slot)
        unseen = set(self._rtt_ms)
        for first in sorted(self._rtt_ms):
            if first not in unseen:
                continue
            part, frontier = {first}, [first]
            while frontier:
                at = frontier.pop()
                found = near[at] - part
                part |= found
                frontier += sorted(found)
            unseen -= part
            self._name(sorted(part))

    def _name(self, part: list[int]) -> None:
        """Name a region: as most users named it; else as most of its members were named before; else after its lowest
        slot."""
        for known in (self._named, self._found):
            names = [known[slot] for slot in part if slot in known]
            if names:
                name = max(sorted(set(names)), key=names.count)
                break
        else:
            name = f"~{part[0]}"
        if len(part) == 1 and part[0] not in self._found and len(self._rtt_ms.get(part[0], {})) < LINKS_TO_JUDGE:
            return  # too few neighbours have measured it
        for slot in part:
            self._found[slot] = name
