"""Finds out which peer answers at an address: dials it, completes a handshake, and closes the connection."""

from typing import Final

import trio
from libp2p.abc import IRawConnection
from libp2p.io.exceptions import IOException
from libp2p.peer.id import ID
from libp2p.transport.exceptions import OpenConnectionError, UpgradeFailure
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from swarm.guard import Source, guarded
from swarm.transport.base import PeerKey, Unreachable
from swarm.transport.host import Host

__all__ = ["answers_as", "who_answers"]

_PROBE_S: Final = 10.0
"""For TCP and security together; a slower address is of no use to the planner."""


async def answers_as(host: Host, peer: ID, address: str) -> bool:
    """Whether `peer` itself answers at `address`, on a new connection. Raises nothing that a stranger can cause."""
    with guarded(Source.PROBE, address), trio.move_on_after(_PROBE_S):
        raw = await _dial(host, address)
        try:
            await host.upgrader.upgrade_security(raw, True, peer)
        except (UpgradeFailure, IOException):
            return False
        finally:
            with trio.CancelScope(shield=True):
                await raw.close()
        return True
    return False


async def who_answers(host: Host | None, address: str) -> PeerKey:
    """The key of the peer that answers at `address`. `host` None: the transport does not serve. Raises
    `Unreachable`."""
    if host is None:
        raise Unreachable("not serving")
    with guarded(Source.PROBE, address) as outcome, trio.move_on_after(_PROBE_S):
        raw = await _dial(host, address)
        try:
            return await host.upgrader.identify(raw)
        except (UpgradeFailure, IOException) as error:
            raise Unreachable(f"no peer answers at {address}: {error}") from error
        finally:
            with trio.CancelScope(shield=True):
                await raw.close()
    if isinstance(outcome.error, Unreachable):
        raise outcome.error
    raise Unreachable(f"nothing answers at {address}")


async def _dial(host: Host, address: str) -> IRawConnection:
    try:
        return await host.tcp.dial(Multiaddr(address))
    except (OpenConnectionError, MultiaddrError, ValueError) as error:
        raise Unreachable(f"nothing answers at {address}") from error
