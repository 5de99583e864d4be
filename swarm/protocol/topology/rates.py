"""What members' uplinks are worth, as their receivers say: the authority's estimate, and where a swarm's regions lie.

A member says what it has to give (`--up-mbit`); that is a limit and a first guess, no more. After each version, what
its receivers say they got from it is added up. Stripes are dealt by demand, so one whose node is slow brings less than
its part: where half of a node's receivers say so, and its own parent is not to blame, that sum is all it can give. One
receiver's word is worth no more than twice the median. Who was found so slow that it feeds nobody is tried again, for
nobody measures it any more: a version that began badly would else cost the swarm that uplink for good.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from swarm.protocol.core.documents import UNTIMED, Link

__all__ = ["Rates", "Regions"]

GUESS_LIMIT = 4.0
"""Until it has been measured, an uplink counts for at most so many times the swarm's median: a boast gains one
version's worth of children, and costs them."""
SHORT_PERCENT = 40
"""When half of the receivers got so much less than its part, its uplink was full. Plans are uneven by less."""
RISE = 1.15
"""While nobody was short, an estimate rises by this a version, to what the member offers."""
LEAST_MBIT = 0.1
NEAR_MS = 30
NEAR_TIMES = 1.5
"""Round trips below `NEAR_MS`, or so many times the shortest of all, are within a region."""
LINKS_TO_JUDGE = 3
"""One that is far from so many stands alone."""


@dataclass(slots=True)
class _Giver:
    claims: dict[int, Link] = field(default_factory=dict)
    """By receiver, of this version."""
    estimate: float | None = None
    """Mbit/s; None: never measured."""
    falls: int = 0
    """How often in a row it turned out to be slow, though it had been tried again."""

    def is_short(self) -> bool:
        """Half of those that it feeds say that less than its part came, or much too slowly."""
        return bool(self.claims) and median(link.short_percent for link in self.claims.values()) >= SHORT_PERCENT

    def assess(self, offered: float, *, full: bool) -> float:
        """`full`: what was delivered is all that there is; the estimate falls as far as its receivers were short."""
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
        """It fed nobody in this version: after some it is tried again, each time after twice as many."""
        if self.estimate is None:
            return None
        return min(offered, self.estimate * RISE ** (2.0 ** (1 - max(1, self.falls))))


class Rates:
    """Estimated uplinks by slot."""

    def __init__(self) -> None:
        self._givers: dict[int, _Giver] = {}

    def forget(self, slot: int) -> None:
        """The slot is another's from now on."""
        self._givers.pop(slot, None)

    def hear(self, receiver: int, links: Iterable[Link]) -> list[int]:
        """What `receiver` says; which slots it got verified bytes from."""
        gave: list[int] = []
        for link in links:
            if link.slot != receiver and (link.kbit_s or link.short_percent):
                self._givers.setdefault(link.slot, _Giver()).claims[receiver] = link
                gave += [link.slot] if link.kbit_s else []
        return gave

    def settle(self, offered: Mapping[int, float], feeders: Callable[[int], set[int]]) -> None:
        """A version has arrived everywhere: new estimates from what was said. `offered`: Mbit/s by slot; `feeders`: who
        feeds a slot in the stripes in which it gives."""
        slow = {slot for slot, giver in self._givers.items() if giver.is_short()}
        for slot, giver in self._givers.items():
            if slot in offered:
                full = slot in slow and slow.isdisjoint(feeders(slot))
                giver.estimate = giver.assess(offered[slot], full=full) if giver.claims else giver.rest(offered[slot])
            giver.claims.clear()

    def uplink(self, slot: int, offered: float, typical: float) -> float:
        """What to plan with. `typical`: median of what members offer."""
        giver = self._givers.get(slot)
        if giver is None or giver.estimate is None:
            return min(offered, GUESS_LIMIT * typical) if typical > 0 else offered
        return min(offered, giver.estimate)


class Regions:
    """Who is near whom: parts of the swarm that short round trips hold together. A region that somebody was told
    (`--region`) spreads to those near by; others are named after a slot."""

    def __init__(self) -> None:
        self._told: dict[int, str] = {}
        self._found: dict[int, str] = {}
        self._rtt_ms: dict[int, dict[int, int]] = {}
        self._heard = False

    def forget(self, slot: int) -> None:
        """The slot is another's from now on."""
        self._told.pop(slot, None)
        self._found.pop(slot, None)
        for other in self._rtt_ms.pop(slot, {}):
            self._rtt_ms.get(other, {}).pop(slot, None)

    def tell(self, slot: int, region: str) -> None:
        """Its owner says where it stands."""
        if region:
            self._told[slot] = region

    def of(self, slot: int) -> str:
        """Empty while nobody knows."""
        return self._told.get(slot) or self._found.get(slot, "")

    def hear(self, slot: int, links: Iterable[Link]) -> None:
        """Round trips that this slot measured; the shorter of two counts."""
        for link in links:
            if link.rtt_ms and link.slot != slot:
                for a, b in ((slot, link.slot), (link.slot, slot)):
                    known = self._rtt_ms.setdefault(a, {})
                    self._heard = self._heard or known.get(b, 1 << 30) > link.rtt_ms
                    known[b] = min(known.get(b, link.rtt_ms), link.rtt_ms)

    def settle(self) -> None:
        """Take up what was heard: who is near whom, directly or by others, is of one region."""
        if not self._heard:
            return
        self._heard = False
        shortest = min((rtt for known in self._rtt_ms.values() for rtt in known.values()), default=0)
        limit = max(NEAR_MS, NEAR_TIMES * shortest)
        unseen = set(self._rtt_ms)
        for first in sorted(self._rtt_ms):
            if first not in unseen:
                continue
            part, frontier = {first}, [first]
            while frontier:
                at = frontier.pop()
                near = {b for b, rtt in self._rtt_ms.get(at, {}).items() if rtt < limit} - part
                part |= near
                frontier += sorted(near)
            unseen -= part
            self._name(sorted(part))

    def _name(self, part: list[int]) -> None:
        """By what most were told; else as most were called before; else after the first."""
        for known in (self._told, self._found):
            names = [known[slot] for slot in part if slot in known]
            if names:
                name = max(sorted(set(names)), key=names.count)
                break
        else:
            name = f"~{part[0]}"
        if len(part) == 1 and part[0] not in self._found and len(self._rtt_ms.get(part[0], {})) < LINKS_TO_JUDGE:
            return  # of one that hardly anybody has measured nothing is known
        for slot in part:
            self._found[slot] = name
