"""Which strangers may begin a handshake, and when. Pure; the clock is an argument.

A handshake costs milliseconds of CPU time before we know who is there, so all handshakes together get a third of one
core at most, and the addresses take turns: the one with the fewest handshakes lately is next. An address at which a
member was seen goes first. Nobody is refused because others are here: when the places are full, the address that
occupies the most of them gives up its oldest connection, first one that has said nothing yet.

An IPv6 host owns a /64 as a rule, so that is its address here; and since a provider hands out a /48 to anybody, those
of one /48 take turns as one, too.
"""

import heapq
import ipaddress
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from itertools import islice
from typing import Final

from swarm.protocol.core.bucket import Bucket

__all__ = ["Admission", "AdmissionRules", "Arrival", "origin"]

_MAX_HOSTS: Final = 8192
"""Addresses remembered, 200 bytes each; more than there are places, so that there is always one to forget."""
_HALF_LIFE_S: Final = 60.0
"""After so long a handshake counts half: who was busy an hour ago is a newcomer again."""
_SAMPLE: Final = 8
"""Of several addresses with as many connections, so many are compared; to look at all would cost as much as a
handshake."""


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """Bounds for connections whose peer is not known yet."""

    pending: int = 2048
    """Connections. Those that wait cost a socket and 1 KiB each; a quarter of the descriptors if that is less."""
    pending_per_address: int = 64
    """A site of fifty nodes behind one NAT may come at once."""
    busy: int = 256
    """Handshakes under way: each holds a task and OpenSSL's buffers, 60 KiB."""
    silent_s: float = 3.0
    """For the first byte. A dialer sends it with the handshake's first packet."""
    turn_s: float = 10.0
    """How long a connection waits for its turn; its dialer has given up by then."""
    share: float = 1 / 3
    """Of one core, for all handshakes together, in the long run."""
    cost_s: float = 0.003
    """CPU time of one inbound handshake: 0.5 ms in OpenSSL, 0.25 ms to check the certificate, the rest in sockets, trio
    and py-libp2p, with the connection's end. Measured over loopback; so there are 111 handshakes a second."""
    token_cost_s: float = 0.0005
    """The same for a connection that begins with a token (`punch`): no cryptography."""
    burst_s: float = 0.32
    """CPU time that handshakes may take at once after a quiet time: 107 of them."""
    favoured: int = 32
    """Connections, and handshakes within a minute or so, for which the address of a member goes before all others. One
    member makes ten connections; with more the address takes its turn among the others."""


class _Stage(IntEnum):
    SILENT = 0
    WAITING = 1
    BUSY = 2


@dataclass(slots=True)
class _Count:
    """How many handshakes there were lately."""

    level: float = 0.0
    at_s: float = 0.0
    rank: float = -math.inf
    """Of two counts the one with the larger rank is larger, at any time: all of them decay alike."""

    def lately(self, now_s: float) -> int:
        return round(self.level * 2.0 ** ((self.at_s - now_s) / _HALF_LIFE_S)) if self.level else 0

    def add(self, now_s: float) -> None:
        self.level = 1.0 + self.level * 2.0 ** ((self.at_s - now_s) / _HALF_LIFE_S)
        self.at_s = now_s
        self.rank = math.log2(self.level) + now_s / _HALF_LIFE_S


@dataclass(slots=True, eq=False, repr=False)
class _Host:
    name: str
    network: _Count
    own: _Count = field(default_factory=_Count)
    arrivals: dict["Arrival", None] = field(default_factory=dict)
    """Those of them that are here, the oldest first."""
    waiting: list["Arrival"] = field(default_factory=list)
    ticket: int = 0
    """Which entry of the queue stands for it."""

    @property
    def rank(self) -> tuple[float, float]:
        return self.network.rank, self.own.rank


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False, repr=False)
class Arrival:
    """An inbound connection whose peer is not known yet."""

    host: _Host
    at_s: float
    drop: Callable[[], None] = _nothing
    """For the caller: ends it when it has to make room."""
    begin: Callable[[], None] = _nothing
    """For the caller: its turn has come."""
    cost_s: float = 0.0
    stage: _Stage = _Stage.SILENT
    is_over: bool = False


class Admission:
    """Counts handshakes by remote address, and says whose turn it is."""

    def __init__(
        self, rules: AdmissionRules | None = None, is_favoured: Callable[[str], bool] = lambda host: False
    ) -> None:
        """`is_favoured`: whether a member was seen at an address (as `origin` gives it)."""
        self.rules = rules or AdmissionRules()
        self._is_favoured = is_favoured
        self._hosts: dict[str, _Host] = {}  # by when each was last heard of
        self._networks: dict[str, _Count] = {}
        self._crowds: list[dict[_Host, None]] = [{} for _ in range(self.rules.pending_per_address + 1)]
        self._most = 0  # of one host
        self._silent: dict[Arrival, None] = {}
        self._waiting: dict[Arrival, None] = {}
        self._queue: list[tuple[tuple[float, float], int, _Host]] = []  # a heap of hosts that wait; see `_next_host`
        self._first: dict[_Host, None] = {}  # members' hosts that wait
        self._tickets = 0
        self._busy: dict[Arrival, None] = {}
        self._bucket = Bucket(self.rules.share, self.rules.burst_s)
        self.made_room = 0
        """Connections that were dropped for others, or because nothing came from them. So far; for metrics."""

    @property
    def pending(self) -> int:
        """Connections that are here and not yet known."""
        return len(self._silent) + len(self._waiting) + len(self._busy)

    def arrive(self, address: str, now_s: float) -> tuple[Arrival | None, list[Arrival]]:
        """A connection from `address` (an IP, or a relay) has come: what stands for it, and those to drop for it.

        None: it is to be dropped itself, since all the others are members'. Each one ends with `over`.
        """
        host = self._host(origin(address), now_s)
        dropped = []
        if len(host.arrivals) >= self.rules.pending_per_address:
            dropped.append(_oldest(host))
        elif self.pending >= self.rules.pending and (victim := self.crowded_out(now_s)) is not None:
            dropped.append(victim)
        elif self.pending >= self.rules.pending:
            return None, []
        self._drop(dropped)
        arrival = Arrival(host, now_s)
        self._move(host, arrival)
        self._silent[arrival] = None
        return arrival, dropped

    def crowded_out(self, now_s: float) -> Arrival | None:
        """Which one has to make room: of the addresses with the most connections the oldest that says nothing; if all
        have spoken, that of the address with the most handshakes lately. None: all are members'."""
        for count in range(self._most, 0, -1):
            crowd = self._crowds[count]
            hosts = list(islice((host for host in crowd if not self._goes_first(host, now_s)), _SAMPLE))
            if not hosts:
                continue
            for host in hosts:  # the next time it is others
                del crowd[host]
                crowd[host] = None
            return max(
                (_oldest(host) for host in hosts), key=lambda each: (each.stage is _Stage.SILENT, each.host.rank)
            )
        return None

    def spoke(self, arrival: Arrival, now_s: float, cost_s: float | None = None) -> None:
        """It has said something: it waits for its turn. `cost_s`: if that is other than a handshake's."""
        if arrival.stage is not _Stage.SILENT or arrival.is_over:
            return
        del self._silent[arrival]
        arrival.stage, arrival.at_s = _Stage.WAITING, now_s
        arrival.cost_s = self.rules.cost_s if cost_s is None else cost_s
        self._waiting[arrival] = None
        arrival.host.waiting.append(arrival)
        if len(arrival.host.waiting) == 1:
            self._line_up(arrival.host)
        if self._goes_first(arrival.host, now_s):
            self._first[arrival.host] = None

    def turns(self, now_s: float) -> tuple[list[Arrival], list[Arrival]]:
        """Those that may begin now, and those to drop for them."""
        begun: list[Arrival] = []
        dropped: list[Arrival] = []
        while self._waiting:
            host = next((each for each in self._first if self._goes_first(each, now_s)), None)
            first, host = host is not None, host or self._next_host()
            arrival = host.waiting[-1]  # the newest: the dialers of old ones have given up
            if first:
                self._bucket.spend(arrival.cost_s, now_s)
            elif not self._bucket.take(arrival.cost_s, now_s):
                break
            if len(self._busy) >= self.rules.busy:
                dropped.append(self._slowest(now_s))
                self._drop(dropped[-1:])
            self._leave_queue(arrival)
            arrival.stage, arrival.at_s = _Stage.BUSY, now_s
            self._busy[arrival] = None
            host.own.add(now_s)
            if host.network is not host.own:
                host.network.add(now_s)
            begun.append(arrival)
        return begun, dropped

    def expired(self, now_s: float) -> list[Arrival]:
        """Those that said nothing for too long, or waited for too long: to be dropped."""
        gone = [*_older(self._silent, now_s - self.rules.silent_s), *_older(self._waiting, now_s - self.rules.turn_s)]
        self._drop(gone)
        return gone

    def wait_s(self, now_s: float) -> float:
        """Until there is anything to do for `turns` or `expired`, if nothing comes before; infinite: nothing is."""
        waits = [
            next(iter(each)).at_s + limit_s - now_s
            for each, limit_s in ((self._silent, self.rules.silent_s), (self._waiting, self.rules.turn_s))
            if each
        ]
        if self._waiting:
            waits.append((self.rules.cost_s - self._bucket.level) / self._bucket.rate)
        return max(0.0, min(waits, default=math.inf))

    def over(self, arrival: Arrival) -> None:
        """It is known, or gone. Again is nothing."""
        if arrival.is_over:
            return
        arrival.is_over = True
        if arrival.stage is _Stage.SILENT:
            del self._silent[arrival]
        elif arrival.stage is _Stage.WAITING:
            self._leave_queue(arrival)
        else:
            del self._busy[arrival]
        self._move(arrival.host, arrival)

    def _drop(self, arrivals: list[Arrival]) -> None:
        self.made_room += len(arrivals)
        for each in arrivals:
            self.over(each)

    def _leave_queue(self, arrival: Arrival) -> None:
        host = arrival.host
        del self._waiting[arrival]
        host.waiting.remove(arrival)
        if not host.waiting:
            host.ticket = 0
            self._first.pop(host, None)

    def _move(self, host: _Host, arrival: Arrival) -> None:
        """Add `arrival` to those of its host, or take it out."""
        self._crowds[len(host.arrivals)].pop(host, None)
        if arrival.is_over:
            del host.arrivals[arrival]
        else:
            host.arrivals[arrival] = None
        if host.arrivals:
            self._crowds[len(host.arrivals)][host] = None
        self._most = max(self._most, len(host.arrivals))
        while self._most and not self._crowds[self._most]:
            self._most -= 1

    def _goes_first(self, host: _Host, now_s: float) -> bool:
        most = self.rules.favoured
        return len(host.arrivals) <= most and self._is_favoured(host.name) and host.own.lately(now_s) < most

    def _line_up(self, host: _Host) -> None:
        self._tickets += 1
        host.ticket = self._tickets
        heapq.heappush(self._queue, (host.rank, -self._tickets, host))
        if len(self._queue) > 2 * self.rules.pending:  # most of them left the queue from its middle
            self._queue = [entry for entry in self._queue if -entry[1] == entry[2].ticket]
            heapq.heapify(self._queue)

    def _next_host(self) -> _Host:
        """The one with the fewest handshakes lately. Of equals the last that came: once all addresses of a
        crowd wait, a newcomer is served at once; and each of them can come before it only once.

        An entry may be outdated: the host has left, or had handshakes since. Ranks only grow, so it is enough to look
        at the first.
        """
        while True:
            rank, order, host = self._queue[0]
            if -order == host.ticket and rank == host.rank:
                return host
            if -order == host.ticket:
                heapq.heapreplace(self._queue, (host.rank, order, host))
            else:
                heapq.heappop(self._queue)

    def _slowest(self, now_s: float) -> Arrival:
        """Of the addresses with the most handshakes lately the one that is under way for longest. Whole handshakes are
        compared: by their exact ranks the last to begin would always be the one to go."""
        return max(
            self._busy,
            key=lambda each: (not self._goes_first(each.host, now_s), each.host.own.lately(now_s), -each.at_s),
        )

    def _host(self, name: str, now_s: float) -> _Host:
        host = self._hosts.pop(name, None)
        if host is None:
            network = _network(name)
            own = _Count()
            count = own if network == name else self._networks.setdefault(network, _Count())
            host = _Host(name, count, own)
        self._hosts[name] = host
        if len(self._hosts) > _MAX_HOSTS:
            del self._hosts[next(each for each, other in self._hosts.items() if not other.arrivals)]
        if len(self._networks) > _MAX_HOSTS:
            del self._networks[next(iter(self._networks))]
        return host


def _oldest(host: _Host) -> Arrival:
    """Of the arrivals of one address that furthest from its end, and of those the oldest."""
    return min(host.arrivals, key=lambda each: each.stage)


def _older(arrivals: dict[Arrival, None], than_s: float) -> Iterator[Arrival]:
    for each in list(islice(arrivals, 256)):
        if each.at_s > than_s:
            return
        yield each


@lru_cache(maxsize=4096)  # addresses come back, and to parse one takes 10 us
def origin(address: str) -> str:
    """What `address` counts as: itself, or of IPv6 its /64. What is no IP (a relay) is itself."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.version == 6:
        if ip.ipv4_mapped:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, 64), strict=False).network_address)
    return str(ip)


def _network(host: str) -> str:
    """What a host (by `origin`) belongs to: of IPv6 its /48, else itself."""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.ip_network((host, 48), strict=False))
    except ValueError:  # a relay
        return host
