"""Places at relays: kept as long as we serve, taken again when a relay was away, so that circuits lead to us."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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

if TYPE_CHECKING:
    from swarm.transport.libp2p import Libp2pTransport

__all__ = ["Reservations"]

_ANSWER_S: Final = 10.0
_AGAIN_FIRST_S: Final = 1.0
_AGAIN_MOST_S: Final = 30.0
_RENEW_MOST_S: Final = 1800.0
_RENEW_LEAST_S: Final = 30.0
RELAY_STREAMS: Final = 128
"""Streams that a relay of ours may have open with us: one for each circuit, 96 at most, and some of its own."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reservation:
    relay: str
    """As it is written in `via`: an address, perhaps with /p2p/ID."""
    key: PeerKey | None = None
    why: str = "not tried yet"
    """Empty: we have it."""


class Reservations:
    """One for a transport. `via`: relays, as addresses of theirs, with their /p2p/ID or without."""

    def __init__(self, transport: "Libp2pTransport", via: Sequence[str]) -> None:
        self._transport = transport
        self._reservations = [_Reservation(relay) for relay in via]

    @property
    def circuits(self) -> list[str]:
        """Addresses that lead to us while we have the places."""
        return [circuit(reservation.relay) for reservation in self._reservations]

    @property
    def state(self) -> dict[str, str]:
        """By relay: why we have no place there; empty where we have."""
        return {reservation.relay: reservation.why for reservation in self._reservations}

    def address_of(self, relay: PeerKey) -> str | None:
        """The circuit through this relay, if it is one that we asked for a place."""
        return next(
            (circuit(reservation.relay) for reservation in self._reservations if reservation.key == relay), None
        )

    async def keep(self) -> None:
        """For ever."""
        async with trio.open_nursery() as nursery:
            for reservation in self._reservations:
                nursery.start_soon(self._keep_one, reservation)

    async def _keep_one(self, reservation: _Reservation) -> None:
        pause_s = _AGAIN_FIRST_S
        while True:
            renew_s = _RENEW_LEAST_S
            with guarded(Source.CIRCUIT, reservation.relay) as outcome, lost_is_broken():
                with trio.fail_after(3 * _ANSWER_S):
                    renew_s = await self._reserve(reservation)
            if outcome.error is not None:
                reservation.why = outcome.why
                _log.info("no place at a relay relay=%s reason=%r", reservation.relay, reservation.why)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_MOST_S)
                continue
            reservation.why, pause_s = "", _AGAIN_FIRST_S
            assert reservation.key is not None
            with trio.move_on_after(renew_s):
                await self._transport.parted(reservation.key)

    async def _reserve(self, reservation: _Reservation) -> float:
        """Take the place: seconds until it should be renewed."""
        transport = self._transport
        reservation.key = await transport.relayed_links.connect_relay(*relay_of(circuit(reservation.relay)))
        async with await transport.open_library_stream(reservation.key, HOP_ID) as stream:
            await write_message(stream, HopMessage(type=HopMessage.RESERVE))
            answer = await read_message(stream, HopMessage)
        if answer.type != HopMessage.STATUS or answer.status != Status.OK:
            raise Unreachable(f"the relay says {status_name(answer.status)}")
        transport.let_open(reservation.key, RELAY_STREAMS)
        transport.relayed_links.saw_us(reservation.relay, observed_in(answer.peer))
        left_s = 0.7 * (answer.reservation.expire - time.time())  # by its clock; ours may differ; any 64-bit number
        return min(max(left_s, _RENEW_LEAST_S), _RENEW_MOST_S)
