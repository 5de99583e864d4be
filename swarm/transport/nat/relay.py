"""A relay's own side of circuit relay v2: reservations for peers that cannot be dialed, and circuits to them.

The bytes that it copies are TLS between the two ends: it cannot read them, only delay them or end the circuit. All of
it is bounded: reservations, circuits in all, from one peer and to one peer, and each circuit's time and bytes. A
circuit holds the windows of two streams. Peers that are not members have bounds of their own (`relay_strangers`) and
never take a member's circuit.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import trio

from codec.errors import PeerError
from swarm.guard import Source, guarded
from swarm.transport.base import PeerKey, Unreachable
from swarm.transport.connection.addresses import host_and_port_of
from swarm.transport.connection.handshakes import origin
from swarm.transport.nat.circuit import (
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
from swarm.transport.nat.relay_strangers import StrangerCircuit, StrangerCircuits, StrangerRules

__all__ = ["Relay", "RelayRules"]

_READ_BYTES: Final = 131_072


@dataclass(frozen=True, slots=True)
class RelayRules:
    """What a relay gives."""

    reservations: int = 256
    reservation_s: float = 3600.0
    """How long a reservation lasts; its owner renews it before."""
    circuits: int = 512
    circuits_to_one: int = 96
    """The target allows its relay 128 streams (`reservations.RELAY_STREAMS`)."""
    circuits_from_one: int = 16
    circuit_s: float = 3600.0
    circuit_bytes: int = 4 << 30
    """In either direction. An end that is still there moves to another circuit before the limit."""
    stranger_s: float = 60.0
    """For a circuit of a peer that may not reserve: long enough to join. The circuit after it is a member's."""
    stranger_bytes: int = 16 << 20
    """The same limit in bytes, in either direction. A join takes some 20 KiB, and the dialer asks for the next circuit
    at half of the limit."""
    strangers: StrangerRules = field(default_factory=StrangerRules)
    setup_s: float = 10.0
    """For a request to be read, and for its target to answer."""


class _Ends(NamedTuple):
    """The two ends of a circuit."""

    peer: PeerKey
    """It asked for the circuit."""
    target: PeerKey
    stranger: StrangerCircuit | None
    """None if `peer` may reserve here."""

    @property
    def is_member(self) -> bool:
        return self.stranger is None


class Relay:
    """One for a transport."""

    def __init__(
        self,
        rules: RelayRules,
        may_reserve: Callable[[PeerKey], bool],
        open_stream: Callable[[PeerKey, str], Awaitable[trio.abc.HalfCloseableStream]],
        seen_at: Callable[[PeerKey], str | None],
    ) -> None:
        """`open_stream`: opens a stream for a protocol on the connection that a peer made; raises `Unreachable`.
        `seen_at`: the address at which a peer is seen (multiaddr text)."""
        self._rules = rules
        self._may_reserve = may_reserve
        self._open_stream = open_stream
        self._seen_at = seen_at
        self._reservations: dict[PeerKey, float] = {}  # until when (trio's clock)
        self._from: Counter[PeerKey] = Counter()
        self._to: Counter[PeerKey] = Counter()
        self.strangers = StrangerCircuits(may_reserve, self._rules.strangers)
        self.relayed_bytes = 0

    @property
    def circuits(self) -> int:
        """How many circuits are open or being opened."""
        return self._from.total()

    @property
    def reservations(self) -> list[PeerKey]:
        """The peers that hold a reservation."""
        now = trio.current_time()
        return [peer for peer, until_s in self._reservations.items() if until_s > now]

    def relays_for(self, peer: PeerKey) -> bool:
        """Whether the peer holds a reservation or has a circuit here."""
        return self._reservations.get(peer, 0.0) > trio.current_time() or self._from[peer] > 0

    async def serve_hop(
        self, peer: PeerKey, stream: trio.abc.HalfCloseableStream, on_circuit: Callable[[], None] = lambda: None
    ) -> None:
        """Answer one `hop` stream, and carry its circuit until it ends. `on_circuit`: called before it is carried.
        Raises `PeerError`."""
        with trio.move_on_after(self._rules.setup_s) as scope:
            request = await read_message(stream, HopMessage)
            if request.type == HopMessage.RESERVE:
                await write_message(stream, self._reserve(peer))
            elif request.type == HopMessage.CONNECT:
                ends = self._ends(peer, key_in(request.peer), scope)
                far = await self._connect(ends)
                if isinstance(far, int):
                    await write_message(stream, HopMessage(type=HopMessage.STATUS, status=far))
                else:
                    scope.deadline = float("inf")
                    on_circuit()
                    await self._carry(ends, stream, far)
            else:
                raise PeerError(f"relay: a request of type {request.type}")

    def _ends(self, peer: PeerKey, target: PeerKey, scope: trio.CancelScope) -> _Ends:
        """`scope`: cancelled if the circuit has to make room for another stranger's."""
        if self._may_reserve(peer):
            return _Ends(peer, target, None)
        seen_at = self._seen_at(peer) or ""
        host_and_port = host_and_port_of(seen_at)
        address = origin(host_and_port[0]) if host_and_port else seen_at
        return _Ends(peer, target, StrangerCircuit(peer, address, target, scope.cancel))

    def _reserve(self, peer: PeerKey) -> HopMessage:
        now = trio.current_time()
        self._reservations = {other: until_s for other, until_s in self._reservations.items() if until_s > now}
        if not self._may_reserve(peer):
            return HopMessage(type=HopMessage.STATUS, status=Status.PERMISSION_DENIED)
        if peer not in self._reservations and len(self._reservations) >= self._rules.reservations:
            return HopMessage(type=HopMessage.STATUS, status=Status.RESERVATION_REFUSED)
        self._reservations[peer] = now + self._rules.reservation_s
        return HopMessage(
            type=HopMessage.STATUS,
            status=Status.OK,
            reservation=Reservation(expire=int(time.time() + self._rules.reservation_s)),
            limit=self._limit(is_member=True),
            peer=peer_in(peer, self._seen_at(peer)),
        )

    def _limit(self, *, is_member: bool) -> Limit:
        seconds = self._rules.circuit_s if is_member else min(self._rules.stranger_s, self._rules.circuit_s)
        return Limit(duration=max(1, int(seconds)), data=self._limit_bytes(is_member=is_member))

    def _limit_bytes(self, *, is_member: bool) -> int:
        return self._rules.circuit_bytes if is_member else min(self._rules.stranger_bytes, self._rules.circuit_bytes)

    async def _connect(self, ends: _Ends) -> "trio.abc.HalfCloseableStream | Status.ValueType":
        """Open a circuit: the stream to its target, or the status that says why there is none."""
        if self._reservations.get(ends.target, 0.0) <= trio.current_time():
            return Status.NO_RESERVATION
        if self._is_full(ends):
            return Status.RESOURCE_LIMIT_EXCEEDED
        if ends.stranger is not None and not self.strangers.add_circuit(ends.stranger, trio.current_time()):
            return Status.RESOURCE_LIMIT_EXCEEDED
        self._count(ends, 1)
        far = None
        try:
            far = await self._open_stream(ends.target, STOP_ID)
            caller = peer_in(ends.peer, self._seen_at(ends.peer))
            hello = StopMessage(type=StopMessage.CONNECT, peer=caller, limit=self._limit(is_member=ends.is_member))
            await write_message(far, hello)
            answer = await read_message(far, StopMessage)
            if answer.status == Status.OK:
                return far
        except (Unreachable, PeerError, trio.BrokenResourceError):
            pass
        except BaseException:
            self._count(ends, -1)
            if far is not None:
                await trio.aclose_forcefully(far)
            raise
        self._count(ends, -1)
        if far is not None:
            await trio.aclose_forcefully(far)
        return Status.CONNECTION_FAILED

    def _is_full(self, ends: _Ends) -> bool:
        rules = self._rules
        return (
            self.circuits >= rules.circuits
            or self._from[ends.peer] >= rules.circuits_from_one
            or self._to[ends.target] >= rules.circuits_to_one
        )

    def _count(self, ends: _Ends, change: int) -> None:
        self._from[ends.peer] += change
        self._to[ends.target] += change
        if change < 0:
            self._from, self._to = +self._from, +self._to
            if ends.stranger is not None:
                self.strangers.remove_circuit(ends.stranger)

    async def _carry(self, ends: _Ends, near: trio.abc.HalfCloseableStream, far: trio.abc.HalfCloseableStream) -> None:
        """Copy in both directions until both have ended, or break the circuit when a limit is reached."""
        limit = self._limit(is_member=ends.is_member)
        try:
            async with far:
                seen = peer_in(ends.peer, self._seen_at(ends.peer))
                accepted = HopMessage(type=HopMessage.STATUS, status=Status.OK, limit=limit, peer=seen)
                await write_message(near, accepted)
                with trio.move_on_after(limit.duration):
                    async with trio.open_nursery() as nursery:
                        for source, sink in ((near, far), (far, near)):
                            nursery.start_soon(self._copy_guarded, ends, source, sink, nursery.cancel_scope)
        finally:
            self._count(ends, -1)

    async def _copy_guarded(
        self,
        ends: _Ends,
        source: trio.abc.ReceiveStream,
        sink: trio.abc.HalfCloseableStream,
        scope: trio.CancelScope,
    ) -> None:
        with guarded(Source.CIRCUIT, ends.peer) as outcome:
            await self._copy(source, sink, scope, self._limit_bytes(is_member=ends.is_member))
        if outcome.error is not None:
            scope.cancel()

    async def _copy(
        self,
        source: trio.abc.ReceiveStream,
        sink: trio.abc.HalfCloseableStream,
        scope: trio.CancelScope,
        left_bytes: int,
    ) -> None:
        """Copy one direction. `left_bytes`: how many bytes it may carry; `scope` ends both directions."""
        try:
            while data := await source.receive_some(_READ_BYTES):
                left_bytes -= len(data)
                if left_bytes < 0:
                    scope.cancel()
                    return
                self.relayed_bytes += len(data)
                await sink.send_all(data)
            await sink.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            scope.cancel()
