"""Reservations at relays, renewed for as long as the transport serves, so that circuits lead to us."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from swarm.guard import Source, guarded
from swarm.protocol.core.reach import circuit, relay_of
from swarm.transport.base import PeerKey, Unreachable
from swarm.transport.connection.migrating_connection import lost_is_broken
from swarm.transport.nat.circuit import (
    HOP_ID,
    HopMessage,
    Status,
    observed_in,
    read_message,
    status_name,
    write_message,
)
from swarm.transport.nat.connections import PeerConnections
from swarm.transport.nat.known_relays import KnownRelays

__all__ = ["Reservations"]

_ANSWER_S: Final = 10.0
"""A third of the time for one attempt: connect to the relay, open a stream, read the answer."""
_RETRY_FIRST_S: Final = 1.0
"""Pause after the first failure; it doubles with each further one."""
_RETRY_MOST_S: Final = 30.0
_RENEW_MOST_S: Final = 1800.0
"""Renew after this at the latest, whatever time the relay states."""
_RENEW_LEAST_S: Final = 30.0
"""Renew after this at the earliest: a relay may state a time in the past."""
RELAY_STREAMS: Final = 128
"""Streams that a relay of ours may have open with us: one for each circuit, 96 at most, and some of its own."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reservation:
    relay: str
    """As the user wrote it in `via`: an address, with or without /p2p/ID."""
    key: PeerKey | None = None
    why: str = "not tried yet"
    """Why the relay gave us none; empty while we hold it."""


class Reservations:
    """One for a transport."""

    def __init__(self, connections: PeerConnections, relays: KnownRelays, via: Sequence[str]) -> None:
        """`via`: the relays' addresses, each with or without /p2p/ID."""
        self._connections = connections
        self._relays = relays
        self._reservations = [_Reservation(relay) for relay in via]

    @property
    def circuits(self) -> list[str]:
        """The addresses that lead to us while we hold the reservations."""
        return [circuit(reservation.relay) for reservation in self._reservations]

    @property
    def state(self) -> dict[str, str]:
        """By relay: why we have no reservation there; empty where we have one."""
        return {reservation.relay: reservation.why for reservation in self._reservations}

    def address_of(self, relay: PeerKey) -> str | None:
        """Our address through this relay; None if we asked it for no reservation."""
        return next(
            (circuit(reservation.relay) for reservation in self._reservations if reservation.key == relay), None
        )

    async def keep_all(self) -> None:
        """Hold every reservation until cancelled."""
        async with trio.open_nursery() as nursery:
            for reservation in self._reservations:
                nursery.start_soon(self._keep, reservation)

    async def _keep(self, reservation: _Reservation) -> None:
        pause_s = _RETRY_FIRST_S
        while True:
            renew_s = _RENEW_LEAST_S
            with guarded(Source.CIRCUIT, reservation.relay) as outcome, lost_is_broken():
                with trio.fail_after(3 * _ANSWER_S):
                    renew_s = await self._reserve(reservation)
            if outcome.error is not None:
                reservation.why = outcome.why
                _log.info("no reservation relay=%s reason=%r", reservation.relay, reservation.why)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_MOST_S)
                continue
            reservation.why, pause_s = "", _RETRY_FIRST_S
            assert reservation.key is not None
            with trio.move_on_after(renew_s):
                await self._connections.wait_disconnected(reservation.key)

    async def _reserve(self, reservation: _Reservation) -> float:
        """Reserve once; return the seconds after which to renew."""
        reservation.key = await self._relays.connect(*relay_of(circuit(reservation.relay)))
        async with await self._connections.open_protocol_stream(reservation.key, HOP_ID) as stream:
            await write_message(stream, HopMessage(type=HopMessage.RESERVE))
            answer = await read_message(stream, HopMessage)
        if answer.type != HopMessage.STATUS or answer.status != Status.OK:
            raise Unreachable(f"the relay says {status_name(answer.status)}")
        self._connections.allow_streams(reservation.key, RELAY_STREAMS)
        self._relays.note_observed(reservation.relay, observed_in(answer.peer))
        # The relay writes the end by its own clock, which may differ from ours, and may write any 64-bit number.
        left_s = 0.7 * (answer.reservation.expire - time.time())
        return min(max(left_s, _RENEW_LEAST_S), _RENEW_MOST_S)
