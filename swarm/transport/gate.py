"""What may be done by whoever has no grant yet: prove a key, ask to join, and little else, not often and not for long.

A grant is shown on the control lane, so a connection is made first and judged later. Until its peer is admitted, a
connection that it made gets few streams, small windows, a place among a limited number, and a minute. It takes
part in no gossip and is given no further connections. So it is again once its lease is over. Connections that we make
are ours to judge.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from swarm.transport.admission import origin
from swarm.transport.base import PeerKey
from swarm.transport.lanes import WAYS_ID
from swarm.transport.muxer import MuxedConnection
from swarm.transport.yamux import Limits

__all__ = ["Gate", "GateRules"]

_CLOSED: Final = (WAYS_ID, "/meshsub/")
"""What strangers are refused, by how it begins. The bulk lane is not among it, since both lanes may come at once, by
different connections: the shell reads nothing there before its peer is admitted. Relaying has its own rules."""


@dataclass(frozen=True, slots=True)
class GateRules:
    """Bounds for peers that are not admitted. At most `connections` x `streams` x 256 KiB are held for them."""

    connections: int = 256
    per_address: int = 64
    """A site of fifty nodes behind one NAT may join at once."""
    streams: int = 6
    """On one connection: control, bulk, identify both ways, ping, and one to spare."""
    stay_s: float = 60.0


class Gate:
    """Knows the connections of peers that are not admitted. `admits` None: everybody is."""

    def __init__(
        self,
        admits: Callable[[PeerKey], bool] | None,
        full: Limits,
        rules: GateRules | None = None,
        carries: Callable[[PeerKey], bool] = lambda peer: False,
    ) -> None:
        """`full`: the limits of a connection whose peer is admitted. `carries`: whether we relay for a peer, by other
        rules than these; it may stay."""
        self._admits = admits or (lambda peer: True)
        self._full = full
        self._carries = carries
        self._rules = rules or GateRules()
        self._strange: dict[MuxedConnection, float] = {}  # since when
        self._by_address: Counter[str] = Counter()
        self._narrow = full.narrow(self._rules.streams)

    def limits(self, peer: PeerKey, *, dialed: bool) -> Limits:
        """For a new connection; `dialed`: by us."""
        return self._full if dialed or self._admits(peer) else self._narrow

    def begin(self, connection: MuxedConnection, now_s: float) -> bool:
        """A connection has come up: whether it may stay for now."""
        if connection.is_initiator or self._admits(connection.peer):
            return True
        host = _host(connection)
        if len(self._strange) >= self._rules.connections or self._by_address[host] >= self._rules.per_address:
            return False
        self._strange[connection] = now_s
        self._by_address[host] += 1
        return True

    def end(self, connection: MuxedConnection) -> None:
        """It is gone, or its peer is no stranger any more."""
        if self._strange.pop(connection, None) is not None:
            host = _host(connection)
            self._by_address[host] -= 1
            if not self._by_address[host]:
                del self._by_address[host]

    def may(self, connection: MuxedConnection, protocol: str) -> bool:
        """Whether its peer may open a stream of `protocol` on it."""
        return not self._is_strange(connection) or not protocol.startswith(_CLOSED)

    def _is_strange(self, connection: MuxedConnection) -> bool:
        if connection in self._strange and self._admits(connection.peer):
            self.end(connection)
            connection.yamux.widen(self._full)
        return connection in self._strange

    def review(self, connections: Iterable[MuxedConnection], now_s: float) -> list[MuxedConnection]:
        """Judge anew all that there are, for leases end: those that have been strange for too long or are too many now.
        Call it now and then."""
        return [each for each in connections if not self._may_stay(each, now_s)]

    def _may_stay(self, connection: MuxedConnection, now_s: float) -> bool:
        if not self._is_strange(connection):
            return self.begin(connection, now_s)  # its minute begins, if its peer's lease is over
        return self._carries(connection.peer) or now_s - self._strange[connection] <= self._rules.stay_s


def _host(connection: MuxedConnection) -> str:
    address = connection.get_remote_address()
    return origin(address[0]) if address else ""
