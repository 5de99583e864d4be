"""Bounds the connections of strangers: peers that hold no lease and have shown no grant.

A peer shows its grant on the control lane, so a connection is made before it can be judged. A connection that a
stranger made gets few streams, small windows, 32 KiB in all, one of a limited number of places, and 3 s to show a valid
ticket or lease; then its peer is admitted. Until then the peer takes part in no gossip and may not ask for more
connections. A peer whose lease ends becomes a stranger again and has a minute to join anew. Connections that we dialed
are never a stranger's.

A full table keeps no newcomer out: the address with the most strangers gives up its oldest connection, preferably one
whose peer never held a lease.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from swarm.transport.base import PeerKey
from swarm.transport.connection.handshakes import origin
from swarm.transport.connection.muxer import MuxedConnection
from swarm.transport.lanes import TARGET_CONNECTIONS_ID
from swarm.transport.yamux import YamuxLimits

__all__ = ["Gate", "GateRules"]

_REFUSED: Final = (TARGET_CONNECTIONS_ID, "/meshsub/")
"""Prefixes of the protocols that strangers may not open. The bulk lane is not among them: a joiner may open both lanes
at once, on different connections, and the runtime reads no bulk before its peer is admitted. Relaying has its own
rules."""
_MAX_MEMBER_HOSTS: Final = 2048
"""Addresses of members remembered, also after they leave; 100 bytes each."""


@dataclass(frozen=True, slots=True)
class GateRules:
    """Bounds for strangers."""

    connections: int = 256
    """In all. At 111 handshakes a second (`handshakes`) a stranger has 2 s before it can be the oldest."""
    per_address: int = 64
    """A site of fifty nodes behind one NAT may join at once."""
    streams: int = 6
    """On one connection: control, bulk, identify in both directions, ping, and one to spare."""
    speak_s: float = 3.0
    """Time to show a valid ticket or lease, from the handshake on. A joiner needs two round trips."""
    stay_s: float = 60.0
    """The same for a peer whose lease has ended."""


@dataclass(slots=True)
class _Stranger:
    host: str
    since_s: float
    held_lease: bool = False
    """Its peer held a lease, which has ended."""


class Gate:
    """Tracks the connections of strangers: limits what they may do, and says which to close."""

    def __init__(
        self,
        admits: Callable[[PeerKey], bool] | None,
        full: YamuxLimits,
        rules: GateRules | None = None,
        relays_for: Callable[[PeerKey], bool] = lambda peer: False,
        knows: Callable[[PeerKey], bool] | None = None,
    ) -> None:
        """`admits`: whether a peer has shown a grant; None: every peer counts as admitted. `full`: the limits of a
        connection whose peer is not a stranger. `relays_for`: whether we relay for a peer, which then may stay and is
        bounded by the relay's rules. `knows`: whether a peer holds a lease, shown or not; it is never a stranger. None:
        as `admits`.
        """
        self._admits = admits or (lambda peer: True)
        self._knows = knows or self._admits
        self._full = full
        self._relays_for = relays_for
        self._rules = rules or GateRules()
        self._strangers: dict[MuxedConnection, _Stranger] = {}  # the oldest first
        self._by_host: dict[str, dict[MuxedConnection, None]] = {}  # the oldest first
        self._member_hosts: dict[str, None] = {}  # where members were seen, the least recent first
        self._narrow = full.narrow(self._rules.streams)

    def limits(self, peer: PeerKey, *, dialed: bool) -> YamuxLimits:
        """The limits of a new connection. `dialed`: we dialed it."""
        return self._full if dialed or self._is_known(peer) else self._narrow

    def add_connection(self, connection: MuxedConnection, now_s: float) -> list[MuxedConnection]:
        """A connection is live, or its peer's lease has ended. Returns the connections to close to make room for it."""
        if self._is_known(connection.peer):
            self._note_member_host(connection)
            return []
        if connection.is_initiator:
            return []
        host, crowded = _host(connection), []
        same_host = self._by_host.get(host, {})
        if len(same_host) >= self._rules.per_address:
            crowded.append(self._first_to_close(same_host))
        elif len(self._strangers) >= self._rules.connections:
            most = max(len(each) for each in self._by_host.values())
            largest = (each for crowd in self._by_host.values() if len(crowd) == most for each in crowd)
            crowded.append(self._first_to_close(largest))
        for each in crowded:
            self.remove_connection(each)
        self._strangers[connection] = _Stranger(host, now_s)
        self._by_host.setdefault(host, {})[connection] = None
        return crowded

    def _first_to_close(self, connections: Iterable[MuxedConnection]) -> MuxedConnection:
        """The oldest whose peer never held a lease; if there is none, the oldest."""
        return min(connections, key=lambda each: (self._strangers[each].held_lease, self._strangers[each].since_s))

    def remove_connection(self, connection: MuxedConnection) -> None:
        """The connection is gone, or its peer is not a stranger any more. Harmless when repeated."""
        stranger = self._strangers.pop(connection, None)
        if stranger is not None:
            same_host = self._by_host[stranger.host]
            del same_host[connection]
            if not same_host:
                del self._by_host[stranger.host]

    def may_open(self, connection: MuxedConnection, protocol: str) -> bool:
        """Whether the connection's peer may open a stream for `protocol` on it."""
        return not self.is_stranger(connection) or not protocol.startswith(_REFUSED)

    def is_stranger(self, connection: MuxedConnection) -> bool:
        """Whether the connection's peer is a stranger now. Widens its limits when it has been admitted."""
        if connection.is_initiator:
            return False
        if not self._is_known(connection.peer):
            return True
        if connection in self._strangers:
            self.remove_connection(connection)
            connection.yamux.widen(self._full)
            self._note_member_host(connection)
        return False

    def is_member_host(self, host: str) -> bool:
        """Whether a member was seen at `host` (as `handshakes.origin` gives it)."""
        return host in self._member_hosts

    @property
    def has_strangers(self) -> bool:
        """Whether there is a stranger's connection, so that `overdue` has to be called."""
        return bool(self._strangers)

    def overdue(self, now_s: float) -> list[MuxedConnection]:
        """The strangers' connections whose time is over; the caller closes them. Call it every second or so while
        there are strangers."""
        return [each for each in list(self._strangers) if self.is_stranger(each) and not self._may_stay(each, now_s)]

    def review(self, connections: Iterable[MuxedConnection], now_s: float) -> list[MuxedConnection]:
        """Check all connections again, since leases end. Returns the ones to close. Call it every quarter minute."""
        crowded: list[MuxedConnection] = []
        for each in connections:
            if each not in self._strangers:
                crowded += self.add_connection(each, now_s)  # if its peer's lease has ended, its minute begins
                if each in self._strangers:
                    self._strangers[each].held_lease = True
        return crowded + self.overdue(now_s)

    def _may_stay(self, connection: MuxedConnection, now_s: float) -> bool:
        stranger = self._strangers[connection]
        limit_s = self._rules.stay_s if stranger.held_lease else self._rules.speak_s
        return now_s - stranger.since_s <= limit_s or self._relays_for(connection.peer)

    def _is_known(self, peer: PeerKey) -> bool:
        return self._admits(peer) or self._knows(peer)

    def _note_member_host(self, connection: MuxedConnection) -> None:
        host = _host(connection)
        self._member_hosts.pop(host, None)
        self._member_hosts[host] = None
        if len(self._member_hosts) > _MAX_MEMBER_HOSTS:
            del self._member_hosts[next(iter(self._member_hosts))]


def _host(connection: MuxedConnection) -> str:
    address = connection.get_remote_address()
    return origin(address[0]) if address else ""
