"""A relay's own side of circuit relay v2: places for peers that cannot be dialed, and circuits to them.

What it copies is TLS between the two ends; it reads nothing of it and can only delay or end it. Everything is bounded:
places, circuits in all, from one peer and to one, each circuit's time and bytes. A circuit holds two streams' windows.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from codec.errors import PeerError
from swarm.transport.base import PeerKey, Unreachable
from swarm.transport.circuit import (
    STOP_ID,
    HopMessage,
    Limit,
    Reservation,
    Status,
    StopMessage,
    key_in,
    peer_in,
    read_message,
    write_message,
)

__all__ = ["Relay", "RelayRules"]

_READ_BYTES: Final = 131_072


@dataclass(frozen=True, slots=True)
class RelayRules:
    """What a relay gives."""

    places: int = 256
    place_s: float = 3600.0
    """A place is kept this long unless it is renewed, which its owner does in time."""
    circuits: int = 512
    circuits_to_one: int = 96
    """A peer takes 128 streams from us on one connection."""
    circuits_from_one: int = 16
    circuit_s: float = 3600.0
    circuit_bytes: int = 4 << 30
    """Either way. Ends that care go on with another circuit before; a forgotten one ends."""
    setup_s: float = 10.0
    """For a request to be read, and for its target to answer."""


class Relay:
    """One for a transport. `open_stream`: on the connection that the peer made. `seen_at`: where a peer is seen."""

    def __init__(
        self,
        rules: RelayRules,
        may_reserve: Callable[[PeerKey], bool],
        open_stream: Callable[[PeerKey, str], Awaitable[trio.abc.HalfCloseableStream]],
        seen_at: Callable[[PeerKey], str | None],
    ) -> None:
        self._rules = rules
        self._may_reserve = may_reserve
        self._open_stream = open_stream
        self._seen_at = seen_at
        self._places: dict[PeerKey, float] = {}
        self._from: Counter[PeerKey] = Counter()
        self._to: Counter[PeerKey] = Counter()
        self.relayed_bytes = 0

    @property
    def circuits(self) -> int:
        """Those that are open."""
        return self._from.total()

    @property
    def places(self) -> list[PeerKey]:
        """Who keeps a place."""
        now = trio.current_time()
        return [peer for peer, until_s in self._places.items() if until_s > now]

    def carries(self, peer: PeerKey) -> bool:
        """Whether it keeps a place or has a circuit here."""
        return self._places.get(peer, 0.0) > trio.current_time() or self._from[peer] > 0

    async def serve(self, peer: PeerKey, stream: trio.abc.HalfCloseableStream) -> None:
        """Answer one `hop` stream, and carry its circuit if it gets one. Raises `PeerError`."""
        with trio.move_on_after(self._rules.setup_s) as scope:
            request = await read_message(stream, HopMessage)
            if request.type == HopMessage.RESERVE:
                await write_message(stream, self._reserve(peer))
            elif request.type == HopMessage.CONNECT:
                target = key_in(request.peer)
                far = await self._connect(peer, target)
                if isinstance(far, int):
                    await write_message(stream, HopMessage(type=HopMessage.STATUS, status=far))
                else:
                    scope.deadline = float("inf")
                    await self._carry(peer, target, stream, far)
            else:
                raise PeerError(f"relay: a request of type {request.type}")

    def _reserve(self, peer: PeerKey) -> HopMessage:
        now = trio.current_time()
        self._places = {other: until_s for other, until_s in self._places.items() if until_s > now}
        if not self._may_reserve(peer):
            return HopMessage(type=HopMessage.STATUS, status=Status.PERMISSION_DENIED)
        if peer not in self._places and len(self._places) >= self._rules.places:
            return HopMessage(type=HopMessage.STATUS, status=Status.RESERVATION_REFUSED)
        self._places[peer] = now + self._rules.place_s
        return HopMessage(
            type=HopMessage.STATUS,
            status=Status.OK,
            reservation=Reservation(expire=int(time.time() + self._rules.place_s)),
            limit=self._limit(),
            peer=peer_in(peer, self._seen_at(peer)),
        )

    def _limit(self) -> Limit:
        return Limit(duration=int(self._rules.circuit_s), data=self._rules.circuit_bytes)

    async def _connect(self, peer: PeerKey, target: PeerKey) -> "trio.abc.HalfCloseableStream | Status.ValueType":
        """The target's end of a new circuit, or the status that says why there is none."""
        rules = self._rules
        if self._places.get(target, 0.0) <= trio.current_time():
            return Status.NO_RESERVATION
        if (
            self.circuits >= rules.circuits
            or self._from[peer] >= rules.circuits_from_one
            or self._to[target] >= rules.circuits_to_one
        ):
            return Status.RESOURCE_LIMIT_EXCEEDED
        self._from[peer] += 1
        self._to[target] += 1
        far = None
        try:
            far = await self._open_stream(target, STOP_ID)
            hello = StopMessage(type=StopMessage.CONNECT, peer=peer_in(peer, self._seen_at(peer)), limit=self._limit())
            await write_message(far, hello)
            answer = await read_message(far, StopMessage)
            if answer.status == Status.OK:
                return far
        except (Unreachable, PeerError, trio.BrokenResourceError):
            pass
        except BaseException:
            self._ended(peer, target)
            if far is not None:
                await trio.aclose_forcefully(far)
            raise
        self._ended(peer, target)
        if far is not None:
            await trio.aclose_forcefully(far)
        return Status.CONNECTION_FAILED

    def _ended(self, peer: PeerKey, target: PeerKey) -> None:
        self._from[peer] -= 1
        self._to[target] -= 1
        self._from, self._to = +self._from, +self._to

    async def _carry(
        self, peer: PeerKey, target: PeerKey, near: trio.abc.HalfCloseableStream, far: trio.abc.HalfCloseableStream
    ) -> None:
        """Copy both ways until both have ended, or a limit is reached; then the circuit breaks."""
        try:
            async with far:
                seen = peer_in(peer, self._seen_at(peer))
                yes = HopMessage(type=HopMessage.STATUS, status=Status.OK, limit=self._limit(), peer=seen)
                await write_message(near, yes)
                with trio.move_on_after(self._rules.circuit_s):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._copy, near, far, nursery.cancel_scope)
                        nursery.start_soon(self._copy, far, near, nursery.cancel_scope)
        finally:
            self._ended(peer, target)

    async def _copy(
        self, source: trio.abc.ReceiveStream, sink: trio.abc.HalfCloseableStream, scope: trio.CancelScope
    ) -> None:
        left = self._rules.circuit_bytes
        try:
            while data := await source.receive_some(_READ_BYTES):
                left -= len(data)
                if left < 0:
                    scope.cancel()
                    return
                self.relayed_bytes += len(data)
                await sink.send_all(data)
            await sink.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            scope.cancel()
