"""How peers are reached, for `status`: directly, by a connection that they made, or through a relay."""

from typing import Any, Final

import structlog
import trio

from swarm.transport.libp2p import Libp2pTransport

__all__ = ["reached", "relayed", "tell"]

_LOOK_EVERY_S: Final = 5.0
_log = structlog.get_logger(__name__)


def reached(transport: Libp2pTransport, peer: bytes, dialable: bool | None) -> str:
    """As `Way` says: direct, dialed us, punched, circuit. Without a connection as the roster says (`dialable`): "can be
    dialed" or "cannot be dialed"; empty: nothing is known."""
    path_kind = transport.path_kind(peer)
    if path_kind is not None:
        return path_kind.value
    return {None: "", True: "can be dialed", False: "cannot be dialed"}[dialable]


async def tell(transport: Libp2pTransport) -> None:
    """Say, when it changes, at which relays we have a place and where we have none, and why. For ever."""
    told: dict[str, str] = {}
    while True:
        await trio.sleep(_LOOK_EVERY_S)
        for relay, why in transport.reservations.state.items():
            if told.get(relay) == why:
                continue
            told[relay] = why
            if why:
                _log.warning("no_relay", relay=relay, why=why, hint="nobody reaches this machine through it until then")
            else:
                _log.info("reached_through", relay=relay)


def relayed(transport: Libp2pTransport) -> dict[str, Any]:
    """What a relay does for those that cannot be dialed; nothing where this is no relay."""
    relay = transport.relay
    if relay is None:
        return {}
    return {"places": len(relay.reservations), "circuits": relay.circuits, "relayed_bytes": relay.relayed_bytes}
