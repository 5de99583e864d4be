"""What configures a libp2p transport besides its key and addresses: what the swarm says of peers, and all bounds."""

from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.transport.base import PeerKey
from swarm.transport.connection.gate import GateRules
from swarm.transport.connection.handshakes import HandshakeRules
from swarm.transport.dialer import DialRules
from swarm.transport.nat.relay import RelayRules
from swarm.transport.yamux import YamuxLimits

__all__ = ["PeerPolicy", "TransportRules"]


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """What the swarm says of a peer. The transport asks again whenever it matters, since leases begin and end."""

    admits: Callable[[PeerKey], bool] | None = None
    """Whether the peer has shown a valid grant. None: every peer counts as admitted. Others get what `Gate` allows."""

    knows: Callable[[PeerKey], bool] | None = None
    """Whether the peer holds a lease, shown or not: then `Gate` never treats it as a stranger. None: as `admits`."""

    may_reserve: Callable[[PeerKey], bool] | None = None
    """Whether the peer may keep a reservation here, if this transport is a relay. None: it is no relay."""


@dataclass(frozen=True, slots=True)
class TransportRules:
    """Every bound of a libp2p transport, by the part that keeps it."""

    limits: YamuxLimits = field(default_factory=YamuxLimits)
    """Of each yamux connection, and of all connections of a peer together."""
    dial: DialRules = field(default_factory=DialRules)
    handshakes: HandshakeRules = field(default_factory=HandshakeRules)
    gate: GateRules = field(default_factory=GateRules)
    relay: RelayRules = field(default_factory=RelayRules)
    """Only if this transport is a relay."""
