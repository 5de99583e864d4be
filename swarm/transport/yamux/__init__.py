"""Yamux (/yamux/1.0.0): several streams over one connection, with windows that are enforced and memory that is bounded.

`Limits` has every number. Stock yamux peers are served; the wire format is theirs.
"""

from swarm.transport.yamux.connection import ByteLink, Connection, StreamLink
from swarm.transport.yamux.cost import PeerBudget, PeerBudgets
from swarm.transport.yamux.limits import Limits
from swarm.transport.yamux.stream import YamuxStream

__all__ = ["ByteLink", "Connection", "Limits", "PeerBudget", "PeerBudgets", "StreamLink", "YamuxStream"]
