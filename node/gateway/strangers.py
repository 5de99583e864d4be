"""Connections that have not yet said anything valid: how many there may be, in all and of one address, and how long.

A client is a stranger from its connection until the head of a request with the right key is here. A newcomer for which
there is no place gets that of the oldest stranger: of its own address where that has its share, else of the address
that has most. So a flood from some addresses keeps no other address out, and known clients are never touched.
"""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import trio

from swarm.protocol.core.bucket import Bucket

__all__ = ["Place", "Strangers", "address_of"]

MOST: Final = 512
"""Strangers in all: each may hold one head of 16 KiB and a task, some 20 MiB together."""
MOST_OF_ONE: Final = 128
"""Of one address. An honest client is a stranger for one round trip, so this many begin in each of them."""
YOUNG_S: Final = 5.0
"""A stranger is not closed for another of its own address before this age: a burst from one proxy waits its turn."""
WAITING: Final = 512
"""Newcomers that wait for a place; one more is closed."""
RATE: Final = Bucket(64.0, 1024.0)
"""Connections a second of one address, and at once, that may come to nothing. One that says something valid is not
counted, so this bounds only what guessing keys and knocking costs: half a millisecond each."""
REMEMBERED: Final = 4096
"""Addresses whose rate is remembered, the last ones seen."""


def address_of(host: str) -> str:
    """What counts as one client: an IPv4 address, or the 64 bits of an IPv6 address that a site chooses from."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


@dataclass(eq=False)
class Place:
    """A stranger's. `scope` is cancelled when another gets it."""

    address: str
    since: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Strangers:
    """All the places. Times are trio's."""

    def __init__(self, most: int = MOST, most_of_one: int = MOST_OF_ONE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._places: dict[str, OrderedDict[Place, None]] = {}
        self._count = 0
        self._waiting = 0
        self._left = trio.Event()
        self._rates: OrderedDict[str, Bucket] = OrderedDict()
        self.refused = 0
        """Connections that were closed because there was no place for them, or another got theirs."""

    def __len__(self) -> int:
        return self._count

    async def enter(self, address: str) -> Place | None:
        """A place for a new connection; None: close it."""
        if not self._rate(address).take(1.0, trio.current_time()):
            self.refused += 1
            return None
        while len(self._places.get(address, ())) >= self._most_of_one:
            oldest = next(iter(self._places[address]))
            age_s = trio.current_time() - oldest.since
            if age_s >= YOUNG_S:
                self._evict(oldest)
                break
            if self._waiting >= WAITING:
                self.refused += 1
                return None
            await self._wait(YOUNG_S - age_s)
        if self._count >= self._most:
            crowd = max(self._places.values(), key=len)
            self._evict(next(iter(crowd)))
        place = Place(address, trio.current_time())
        self._places.setdefault(address, OrderedDict())[place] = None
        self._count += 1
        return place

    def known(self, place: Place) -> None:
        """It said something valid: a stranger no more. Its connection counts for nothing."""
        if self._remove(place):
            self._rate(place.address).spend(-1.0, trio.current_time())

    def leave(self, place: Place) -> None:
        """Its connection is closed. Safe to call of one that is known, or whose place another has."""
        self._remove(place)

    async def _wait(self, seconds: float) -> None:
        self._waiting += 1
        try:
            with trio.move_on_after(seconds):
                await self._left.wait()
        finally:
            self._waiting -= 1

    def _evict(self, place: Place) -> None:
        self.refused += 1
        self._remove(place)
        place.scope.cancel()

    def _remove(self, place: Place) -> bool:
        places = self._places.get(place.address)
        if places is None or place not in places:
            return False
        del places[place]
        if not places:
            del self._places[place.address]
        self._count -= 1
        self._left.set()
        self._left = trio.Event()
        return True

    def _rate(self, address: str) -> Bucket:
        bucket = self._rates.setdefault(address, Bucket(RATE.rate, RATE.burst))
        self._rates.move_to_end(address)
        while len(self._rates) > REMEMBERED:
            self._rates.popitem(last=False)
        return bucket
