"""What a peer may do that is neither known nor admitted: prove a key, ask to join, and little else, not for long.

A grant is shown on the control lane, so a connection is made first and judged later. A connection that a stranger made
gets few streams, small windows, 32 KiB in all, a place among a limited number, and 3 s to show a ticket or a lease that
holds: from then on its peer is known. It takes part in no gossip and is given no further connections. So it is again
once its lease is over, with a minute to come in anew. Connections that we make are ours to judge.

Nobody is kept out because others are here: when the places are full, the address that occupies the most gives up its
oldest connection, first one whose peer never held a lease.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from swarm.transport.base import PeerKey
from swarm.transport.connection.admission import origin
from swarm.transport.connection.muxer import MuxedConnection
from swarm.transport.lanes import TARGET_CONNECTIONS_ID
from swarm.transport.yamux import Limits

__all__ = ["Gate", "GateRules"]

_CLOSED: Final = (TARGET_CONNECTIONS_ID, "/meshsub/")
"""What strangers are refused, by how it begins. The bulk lane is not among it, since both lanes may come at once, by
different connections: the shell reads nothing there before its peer is admitted. Relaying has its own rules."""
_HOMES: Final = 2048
"""Addresses of members that are remembered after they left, 100 bytes each."""


@dataclass(frozen=True, slots=True)
class GateRules:
    """Bounds for peers that are neither known nor admitted."""

    connections: int = 256
    """At 111 handshakes a second (`admission`) a stranger has 2 s before it can be the oldest."""
    per_address: int = 64
    """A site of fifty nodes behind one NAT may join at once."""
    streams: int = 6
    """On one connection: control, bulk, identify both ways, ping, and one to spare."""
    speak_s: float = 3.0
    """From the handshake on, to show a ticket or lease that holds. A joiner does so at once: two round trips."""
    stay_s: float = 60.0
    """For a peer whose lease is over, to come in anew."""


@dataclass(slots=True)
class _Stay:
    host: str
    since_s: float
    left: bool = False
    """Its peer held a lease, which is over: it may come in again."""


class Gate:
    """Knows the connections of strangers."""

    def __init__(
        self,
        admits: Callable[[PeerKey], bool] | None,
        full: Limits,
        rules: GateRules | None = None,
        carries: Callable[[PeerKey], bool] = lambda peer: False,
        knows: Callable[[PeerKey], bool] | None = None,
    ) -> None:
        """`admits`: who has shown a grant; None: everybody has. `full`: the limits of a connection whose peer is no
        stranger. `carries`: whether we relay for a peer, by other rules than these; it may stay. `knows`: who holds a
        lease, whether it has shown it or not: never a stranger. None: those that are admitted.
        """
        self._admits = admits or (lambda peer: True)
        self._knows = knows or self._admits
        self._full = full
        self._carries = carries
        self._rules = rules or GateRules()
        self._strange: dict[MuxedConnection, _Stay] = {}  # the oldest first
        self._by_host: dict[str, dict[MuxedConnection, None]] = {}  # likewise
        self._homes: dict[str, None] = {}  # by when a member was last seen there
        self._narrow = full.narrow(self._rules.streams)

    def limits(self, peer: PeerKey, *, dialed: bool) -> Limits:
        """For a new connection; `dialed`: by us."""
        return self._full if dialed or self._is_known(peer) else self._narrow

    def begin(self, connection: MuxedConnection, now_s: float) -> list[MuxedConnection]:
        """A connection has come up, or its peer's lease is over: those to close, to make room for it."""
        if self._is_known(connection.peer):
            self._is_home(connection)
            return []
        if connection.is_initiator:
            return []
        host, crowded = _host(connection), []
        same = self._by_host.get(host, {})
        if len(same) >= self._rules.per_address:
            crowded.append(self._worst(same))
        elif len(self._strange) >= self._rules.connections:
            most = max(len(each) for each in self._by_host.values())
            largest = (each for crowd in self._by_host.values() if len(crowd) == most for each in crowd)
            crowded.append(self._worst(largest))
        for each in crowded:
            self.end(each)
        self._strange[connection] = _Stay(host, now_s)
        self._by_host.setdefault(host, {})[connection] = None
        return crowded

    def _worst(self, connections: Iterable[MuxedConnection]) -> MuxedConnection:
        """The oldest whose peer never held a lease, or if there is none, the oldest."""
        return min(connections, key=lambda each: (self._strange[each].left, self._strange[each].since_s))

    def end(self, connection: MuxedConnection) -> None:
        """It is gone, or its peer is no stranger any more."""
        stay = self._strange.pop(connection, None)
        if stay is not None:
            same = self._by_host[stay.host]
            del same[connection]
            if not same:
                del self._by_host[stay.host]

    def may(self, connection: MuxedConnection, protocol: str) -> bool:
        """Whether its peer may open a stream of `protocol` on it."""
        return not self.is_strange(connection) or not protocol.startswith(_CLOSED)

    def is_strange(self, connection: MuxedConnection) -> bool:
        """Whether its peer is a stranger, as of now."""
        if connection.is_initiator:
            return False
        if not self._is_known(connection.peer):
            return True
        if connection in self._strange:
            self.end(connection)
            connection.yamux.widen(self._full)
            self._is_home(connection)
        return False

    def is_home(self, host: str) -> bool:
        """Whether a member was seen at `host` (as `admission.origin` gives it)."""
        return host in self._homes

    def overdue(self, now_s: float) -> list[MuxedConnection]:
        """Strangers that have been here for too long. Call it every second or so."""
        return [each for each in list(self._strange) if self.is_strange(each) and not self._may_stay(each, now_s)]

    def review(self, connections: Iterable[MuxedConnection], now_s: float) -> list[MuxedConnection]:
        """Judge anew all that there are, for leases end: those to close. Call it now and then."""
        crowded: list[MuxedConnection] = []
        for each in connections:
            if each not in self._strange:
                crowded += self.begin(each, now_s)  # if its peer's lease is over, its minute begins
                if each in self._strange:
                    self._strange[each].left = True
        return crowded + self.overdue(now_s)

    def _may_stay(self, connection: MuxedConnection, now_s: float) -> bool:
        stay = self._strange[connection]
        limit_s = self._rules.stay_s if stay.left else self._rules.speak_s
        return now_s - stay.since_s <= limit_s or self._carries(connection.peer)

    def _is_known(self, peer: PeerKey) -> bool:
        return self._admits(peer) or self._knows(peer)

    def _is_home(self, connection: MuxedConnection) -> None:
        host = _host(connection)
        self._homes.pop(host, None)
        self._homes[host] = None
        if len(self._homes) > _HOMES:
            del self._homes[next(iter(self._homes))]


def _host(connection: MuxedConnection) -> str:
    address = connection.get_remote_address()
    return origin(address[0]) if address else ""
