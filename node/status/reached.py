"""How peers are reached, for the status and the log: directly, by a connection that they made, or through a relay."""

from typing import Final

import structlog
import trio

from node.status.schema import RelayStatus
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.nat.relay import Relay

__all__ = ["add_relay_counts", "how_reached", "log_reservations"]

_LOOK_EVERY_S: Final = 5.0
"""A reservation takes seconds to get, so a line in the log that is this late misses nothing."""
_log = structlog.get_logger(__name__)


def how_reached(transport: Libp2pTransport, peer: bytes, dialable: bool | None) -> str:
    """The value of `PathKind`: "direct", "dialed us", "punched" or "circuit".

    Without a connection, what the roster says (`dialable`): "can be dialed" or "cannot be dialed"; empty if it says
    nothing.
    """
    path_kind = transport.path_kind(peer)
    if path_kind is not None:
        return path_kind.value
    return {None: "", True: "can be dialed", False: "cannot be dialed"}[dialable]


async def log_reservations(transport: Libp2pTransport) -> None:
    """Log each relay that begins or ceases to lead to this machine, and why. Runs until cancelled, or not at
    all where no relay is to lead here."""
    logged: dict[str, str] = {}
    while transport.reservations.state:
        await trio.sleep(_LOOK_EVERY_S)
        for relay, why in transport.reservations.state.items():
            if logged.get(relay) == why:
                continue
            logged[relay] = why
            if why:
                _log.warning(
                    "no_relay", relay=relay, why=why, hint="no peer reaches this machine through that relay until then"
                )
            else:
                _log.info("reached_through", relay=relay)


def add_relay_counts(status: RelayStatus, relay: Relay) -> None:
    """Fill in what `relay` does for peers that cannot be dialed."""
    status.places = len(relay.reservations)
    status.circuits = relay.circuits
    status.relayed_bytes = relay.relayed_bytes
