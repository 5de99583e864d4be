"""How peers are reached, for `status`: directly, by a connection that they made, or through a relay."""

from typing import Any

from swarm.transport.libp2p import Libp2pTransport

__all__ = ["reached", "relayed"]


def reached(transport: Libp2pTransport, peer: bytes, dialable: bool | None) -> str:
    """As `Way` says: direct, dialed us, punched, circuit. Without a connection as the roster says (`dialable`): "can be
    dialed" or "cannot be dialed"; empty: nothing is known."""
    way = transport.way(peer)
    if way is not None:
        return way.value
    return {None: "", True: "can be dialed", False: "cannot be dialed"}[dialable]


def relayed(transport: Libp2pTransport) -> dict[str, Any]:
    """What a relay does for those that cannot be dialed; nothing where this is no relay."""
    relay = transport.relay
    if relay is None:
        return {}
    return {"places": len(relay.places), "circuits": relay.circuits, "relayed_bytes": relay.relayed_bytes}
