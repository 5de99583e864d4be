"""Decides which inbound connections may begin a handshake, and when. Pure; the clock is an argument.

A handshake costs milliseconds of CPU time before the peer's key is known. So all handshakes together get at most a
third of one core, and the addresses take turns: the address with the fewest recent handshakes is next. An address at
which a member was seen goes first. A full table refuses no newcomer: the address with the most connections gives up its
oldest one, preferably one that is still silent.

An IPv6 host usually owns a /64, so a /64 counts as one address. Providers give out a /48 to any customer, so the
addresses of one /48 also share a turn.
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

__all__ = ["Arrival", "HandshakeRules", "HandshakeTurns", "origin"]

_MAX_HOSTS: Final = 8192
"""Addresses remembered, 200 bytes each. More than `HandshakeRules.pending`, so that one without connections exists."""
_HALF_LIFE_S: Final = 60.0
"""A handshake counts half after this time, so an address that was busy an hour ago counts as new."""
_SAMPLE: Final = 8
"""How many of the addresses with equally many connections are compared; comparing all would cost as much as a
handshake."""


@dataclass(frozen=True, slots=True)
class HandshakeRules:
    """Bounds for connections whose peer has not proved a key yet."""

    pending: int = 2048
    """Connections in all. One that waits costs a socket and 1 KiB; the transport lowers this to a quarter of the
    descriptors if that is less."""
    pending_per_address: int = 64
    """A site of fifty nodes behind one NAT may connect at once."""
    busy: int = 256
    """Handshakes under way: each holds a task and OpenSSL's buffers, 60 KiB."""
    silent_s: float = 3.0
    """Time for the first byte. A dialer sends it with the handshake's first packet."""
    turn_s: float = 10.0
    """How long a connection waits for its turn; by then its dialer has given up."""
    share: float = 1 / 3
    """Of one core's time, for all handshakes together, in the long run."""
    cost_s: float = 0.003
    """CPU time of one inbound handshake: 0.5 ms in OpenSSL, 0.25 ms to check the certificate, the rest in sockets, trio
    and py-libp2p, including the connection's end. Measured over loopback. It makes 111 handshakes a second."""
    token_cost_s: float = 0.0005
    """The same for a connection that begins with a token (`nat.punch`): no cryptography."""
    at_once: int = 2
    """Handshakes begun in one turn of the event loop, so that fewer begin when strangers' work makes turns longer. A
    handshake takes several turns, and a newcomer's is done in time only while they are short: with 64, a crowd that
    opens streams made turns of 1 to 2 s, and a machine with a valid ticket was not let in within a minute."""
    burst_s: float = 0.32
    """CPU time that handshakes may take at once after a quiet time: 107 of them."""
    favoured: int = 32
    """Connections, and handshakes within about a minute, for which a member's address goes before all others. One
    member makes ten connections; an address with more takes its turn among the others."""


class _Stage(IntEnum):
    SILENT = 0
    WAITING = 1
    BUSY = 2


@dataclass(slots=True)
class _Count:
    """A number of recent handshakes, which decays with `_HALF_LIFE_S`."""

    level: float = 0.0
    """The number at `at_s`."""
    at_s: float = 0.0
    rank: float = -math.inf
    """Orders counts at any time: all counts decay alike, so their order never changes."""

    def recent(self, now_s: float) -> int:
        """The number of handshakes now, rounded."""
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
    """Its pending connections, the oldest first."""
    waiting: list["Arrival"] = field(default_factory=list)
    entry: int = 0
    """The number of its valid entry in the queue; 0: it has none."""

    @property
    def rank(self) -> tuple[float, float]:
        return self.network.rank, self.own.rank


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False, repr=False)
class Arrival:
    """An inbound connection whose peer has not proved a key yet."""

    host: _Host
    at_s: float
    """When its present stage began."""
    drop: Callable[[], None] = _nothing
    """Set and called by the owner of the connection: ends it when it has to make room."""
    begin: Callable[[], None] = _nothing
    """Set and called by the owner of the connection: its turn has come."""
    cost_s: float = 0.0
    """CPU time charged when it begins."""
    stage: _Stage = _Stage.SILENT
    is_finished: bool = False


class HandshakeTurns:
    """Counts handshakes by remote address, and decides whose turn is next."""

    def __init__(
        self, rules: HandshakeRules | None = None, is_favoured: Callable[[str], bool] = lambda host: False
    ) -> None:
        """`is_favoured`: whether a member was seen at an address (as `origin` gives it)."""
        self.rules = rules or HandshakeRules()
        self._is_favoured = is_favoured
        self._hosts: dict[str, _Host] = {}  # the least recently seen first
        self._networks: dict[str, _Count] = {}
        self._by_size: list[dict[_Host, None]] = [{} for _ in range(self.rules.pending_per_address + 1)]
        """Hosts by their number of pending connections."""
        self._largest = 0  # pending connections of one host, at most
        self._silent: dict[Arrival, None] = {}
        self._waiting: dict[Arrival, None] = {}
        self._queue: list[tuple[tuple[float, float], int, _Host]] = []  # a heap of waiting hosts; see `_next_host`
        self._first: dict[_Host, None] = {}  # waiting hosts of members
        self._entries = 0
        self._busy: dict[Arrival, None] = {}
        self._bucket = Bucket(self.rules.share, self.rules.burst_s)
        self.made_room = 0
        """Metric: connections dropped so far to make room, or because their first byte or their turn came too late."""

    @property
    def pending(self) -> int:
        """Connections that have not finished."""
        return len(self._silent) + len(self._waiting) + len(self._busy)

    def add_arrival(self, address: str, now_s: float) -> tuple[Arrival | None, list[Arrival]]:
        """A connection from `address` (an IP, or a relay) has come: its arrival, and the arrivals to drop for it.

        None: drop the new connection itself, since all others belong to members. Call `finish` for every arrival.
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
        self._update_host(host, arrival)
        self._silent[arrival] = None
        return arrival, dropped

    def crowded_out(self, now_s: float) -> Arrival | None:
        """The arrival that has to make room: the oldest silent one of the addresses with the most connections, or if
        none is silent, one of the address with the most recent handshakes. None: all belong to members."""
        for count in range(self._largest, 0, -1):
            same_size = self._by_size[count]
            hosts = list(islice((host for host in same_size if not self._goes_first(host, now_s)), _SAMPLE))
            if not hosts:
                continue
            for host in hosts:  # to the end of the dict, so that the next call compares others
                del same_size[host]
                same_size[host] = None
            return max(
                (_oldest(host) for host in hosts), key=lambda each: (each.stage is _Stage.SILENT, each.host.rank)
            )
        return None

    def note_first_byte(self, arrival: Arrival, now_s: float, cost_s: float | None = None) -> None:
        """The first byte has come: the arrival waits for its turn. `cost_s`: CPU time, if not that of a handshake."""
        if arrival.stage is not _Stage.SILENT or arrival.is_finished:
            return
        del self._silent[arrival]
        arrival.stage, arrival.at_s = _Stage.WAITING, now_s
        arrival.cost_s = self.rules.cost_s if cost_s is None else cost_s
        self._waiting[arrival] = None
        arrival.host.waiting.append(arrival)
        if len(arrival.host.waiting) == 1:
            self._enqueue(arrival.host)
        if self._goes_first(arrival.host, now_s):
            self._first[arrival.host] = None

    def next_turns(self, now_s: float) -> tuple[list[Arrival], list[Arrival]]:
        """The arrivals that may begin now, at most `HandshakeRules.at_once`, and the arrivals to drop for them."""
        begun: list[Arrival] = []
        dropped: list[Arrival] = []
        while self._waiting and len(begun) < self.rules.at_once:
            host = self._first_host(now_s)
            first, host = host is not None, host or self._next_host()
            arrival = host.waiting[-1]  # the newest: the dialers of older ones may have given up
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

    def expire(self, now_s: float) -> list[Arrival]:
        """Finish the arrivals that were silent, or waited for their turn, for too long; the caller drops them."""
        expired = [
            *_older(self._silent, now_s - self.rules.silent_s),
            *_older(self._waiting, now_s - self.rules.turn_s),
        ]
        self._drop(expired)
        return expired

    def wait_s(self, now_s: float) -> float:
        """Seconds until `next_turns` or `expire` has something to do if no event comes before; infinite: never."""
        waits = [
            next(iter(each)).at_s + limit_s - now_s
            for each, limit_s in ((self._silent, self.rules.silent_s), (self._waiting, self.rules.turn_s))
            if each
        ]
        if self._waiting and self._first_host(now_s) is not None:
            return 0.0
        if self._waiting:
            waits.append((self.rules.cost_s - self._bucket.level) / self._bucket.rate)
        return max(0.0, min(waits, default=math.inf))

    def finish(self, arrival: Arrival) -> None:
        """The arrival's peer has proved its key, or its connection is gone. Harmless when repeated."""
        if arrival.is_finished:
            return
        arrival.is_finished = True
        if arrival.stage is _Stage.SILENT:
            del self._silent[arrival]
        elif arrival.stage is _Stage.WAITING:
            self._leave_queue(arrival)
        else:
            del self._busy[arrival]
        self._update_host(arrival.host, arrival)

    def _drop(self, arrivals: list[Arrival]) -> None:
        self.made_room += len(arrivals)
        for each in arrivals:
            self.finish(each)

    def _leave_queue(self, arrival: Arrival) -> None:
        host = arrival.host
        del self._waiting[arrival]
        host.waiting.remove(arrival)
        if not host.waiting:
            host.entry = 0
            self._first.pop(host, None)

    def _update_host(self, host: _Host, arrival: Arrival) -> None:
        """Add `arrival` to its host's arrivals, or remove it if it is finished."""
        self._by_size[len(host.arrivals)].pop(host, None)
        if arrival.is_finished:
            del host.arrivals[arrival]
        else:
            host.arrivals[arrival] = None
        if host.arrivals:
            self._by_size[len(host.arrivals)][host] = None
        self._largest = max(self._largest, len(host.arrivals))
        while self._largest and not self._by_size[self._largest]:
            self._largest -= 1

    def _goes_first(self, host: _Host, now_s: float) -> bool:
        most = self.rules.favoured
        return len(host.arrivals) <= most and self._is_favoured(host.name) and host.own.recent(now_s) < most

    def _first_host(self, now_s: float) -> _Host | None:
        """The waiting host that goes before all others; None: there is none."""
        return next((each for each in self._first if self._goes_first(each, now_s)), None)

    def _enqueue(self, host: _Host) -> None:
        self._entries += 1
        host.entry = self._entries
        heapq.heappush(self._queue, (host.rank, -self._entries, host))
        if len(self._queue) > 2 * self.rules.pending:  # entries whose host left the queue have piled up
            self._queue = [entry for entry in self._queue if -entry[1] == entry[2].entry]
            heapq.heapify(self._queue)

    def _next_host(self) -> _Host:
        """The waiting host with the fewest recent handshakes. Of equals the one that came last: once all addresses of a
        crowd wait, a newcomer is served at once, and each address of the crowd can come before it only once.

        An entry may be outdated because the host has left the queue or had handshakes since. Ranks only grow, so it is
        enough to check the first entry.
        """
        while True:
            rank, order, host = self._queue[0]
            if -order == host.entry and rank == host.rank:
                return host
            if -order == host.entry:
                heapq.heapreplace(self._queue, (host.rank, order, host))
            else:
                heapq.heappop(self._queue)

    def _slowest(self, now_s: float) -> Arrival:
        """The handshake that has run longest, among those of the address with the most recent handshakes. Rounded
        numbers are compared: by exact ranks it would always be the last one that began."""
        return max(
            self._busy,
            key=lambda each: (not self._goes_first(each.host, now_s), each.host.own.recent(now_s), -each.at_s),
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
    """The oldest of a host's arrivals in the earliest stage that it has."""
    return min(host.arrivals, key=lambda each: each.stage)


def _older(arrivals: dict[Arrival, None], than_s: float) -> Iterator[Arrival]:
    for each in list(islice(arrivals, 256)):
        if each.at_s > than_s:
            return
        yield each


@lru_cache(maxsize=4096)  # parsing takes 10 us, and the same addresses come again
def origin(address: str) -> str:
    """What an address counts as: an IPv6 address as its /64, everything else (IPv4, a relay) as itself."""
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
    """The network of a host (as `origin` gives it): its /48 for IPv6, otherwise the host itself."""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.ip_network((host, 48), strict=False))
    except ValueError:  # a relay
        return host
