"""The relays that we use: who they are, how we connect to them, and at which address they see us."""

from collections.abc import Awaitable, Callable

from swarm.protocol.core.reach import scope
from swarm.transport.base import PeerKey, Unreachable
from swarm.transport.connection.addresses import host_and_port_of
from swarm.transport.identity import peer_key
from swarm.transport.nat.connections import PeerConnections

__all__ = ["KnownRelays", "plausible_address"]


class KnownRelays:
    """One for a transport. Reservations and relayed links connect to relays through it."""

    def __init__(self, connections: PeerConnections, identify: Callable[[str], Awaitable[PeerKey]]) -> None:
        """`identify`: the key of the peer that answers at an address; raises `Unreachable`."""
        self._connections = connections
        self._identify = identify
        self._key_at: dict[str, PeerKey] = {}
        self.observed: str | None = None
        """Our own address as a relay saw it last (multiaddr text)."""

    async def connect(self, relay: str, id_: str, target: PeerKey | None = None) -> PeerKey:
        """Connect to the relay at address `relay` and return its key. `id_`: its PeerId, or "" to trust who answers.
        `target`: the peer to be reached through it. Raises `Unreachable`."""
        connections = self._connections
        key = await self._key_of(relay, id_)
        if key in (connections.key, target):
            raise Unreachable("that relay is one of the two ends itself")
        if connections.tcp is not None and (place := host_and_port_of(relay)) is not None:
            connections.tcp.from_listen_port.add(place)
        try:
            await connections.connect(key, [relay])
        except Unreachable:
            self._key_at.pop(relay, None)
            raise
        return key

    async def _key_of(self, relay: str, id_: str) -> PeerKey:
        if id_:
            return peer_key(id_)
        if relay not in self._key_at:
            self._key_at[relay] = await self._identify(relay)
        return self._key_at[relay]

    def note_observed(self, relay: str, seen_at: str | None) -> None:
        """The relay that listens at `relay` says at which address it sees us."""
        self.observed = plausible_address(relay, seen_at) or self.observed


def plausible_address(relay: str, seen_at: str | None) -> str | None:
    """The address that a relay reports for a peer; None if its scope is narrower than the relay's own address.

    Without that check a relay could make us dial into our own network.
    """
    return seen_at if seen_at is not None and scope(seen_at) >= scope(relay) else None
