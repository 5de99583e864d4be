"""Strangers: connections that have not sent a valid head yet; bounds how many there are, in all and per address.

A client is a stranger from the opening of its connection until it has sent the head of a request with the right key. A
new connection for which there is no place takes that of the oldest stranger: of its own address, if that address has
its share, otherwise of the address that has most. So a flood from some addresses keeps no other address out, and known
clients are never affected.
"""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import trio

from swarm.protocol.core.bucket import Bucket

__all__ = ["StrangerPlace", "Strangers", "address_of"]

MOST: Final = 512
"""Strangers in all. Each may hold one head of 16 KiB and a task: some 20 MiB together."""
MOST_OF_ONE: Final = 128
"""Strangers of one address. An honest client is a stranger for one round trip, so this many may connect in each."""
YOUNG_S: Final = 5.0
"""A stranger younger than this is not closed for another of its own address, so that a burst from one proxy waits."""
WAITING: Final = 1024
"""New connections that may wait for a place; further ones are closed."""
RATE: Final = Bucket(64.0, 1024.0)
"""Connections of one address, per second and at once, that send no valid head. One that does is not counted, so this
bounds only what clients cost that guess keys or only connect: half a millisecond each."""
REMEMBERED: Final = 4096
"""Addresses whose rate is remembered: the most recent ones."""


def address_of(host: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 network of an IPv6 address, because a site has all of
    it."""
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
class StrangerPlace:
    """The place of one stranger. `scope` is cancelled when another connection takes the place."""

    address: str
    since: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Strangers:
    """The places of all strangers. Times are trio's."""

    def __init__(self, most: int = MOST, most_of_one: int = MOST_OF_ONE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._places: dict[str, OrderedDict[StrangerPlace, None]] = {}
        self._count = 0
        self._waiting = 0
        self._left = trio.Event()
        self._rates: OrderedDict[str, Bucket] = OrderedDict()
        self.refused = 0
        """Connections that were closed because there was no place for them, or because another took theirs."""

    def __len__(self) -> int:
        return self._count

    async def enter(self, address: str) -> StrangerPlace | None:
        """A place for a new connection, perhaps after a wait. None: close the connection."""
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
        place = StrangerPlace(address, trio.current_time())
        self._places.setdefault(address, OrderedDict())[place] = None
        self._count += 1
        return place

    def known(self, place: StrangerPlace) -> None:
        """The client sent a valid head: it is no stranger any more, and its connection does not count against its
        address."""
        if self._remove(place):
            self._rate(place.address).spend(-1.0, trio.current_time())

    def leave(self, place: StrangerPlace) -> None:
        """The connection is closed. Safe to call for a place that was given up or taken."""
        self._remove(place)

    async def _wait(self, seconds: float) -> None:
        self._waiting += 1
        try:
            with trio.move_on_after(seconds):
                await self._left.wait()
        finally:
            self._waiting -= 1

    def _evict(self, place: StrangerPlace) -> None:
        self.refused += 1
        self._remove(place)
        place.scope.cancel()

    def _remove(self, place: StrangerPlace) -> bool:
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
