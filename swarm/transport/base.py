"""The one seam between the swarm and the network.

A transport knows peers by their Ed25519 public key (32 bytes), proves who is at the other end, and gives byte streams.
Streams are trio's own `HalfCloseableStream` and a little more (`Stream`), so everything that trio ships to test streams
applies. Deadlines are the caller's: wrap awaits on a peer in `trio.fail_after`.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import trio

from codec.errors import SwarmError
from swarm.guard import Source, guarded

__all__ = ["Accept", "Lane", "PathKind", "PeerKey", "Stream", "Traffic", "Transport", "Unreachable", "attend"]

PeerKey = bytes
"""A peer's raw Ed25519 public key, 32 bytes."""


class Unreachable(SwarmError):
    """No address of this peer answered, or the connection ended: the text says which and why."""


class Lane(Enum):
    """What a stream carries. Control never waits behind bulk: the two lanes use different connections."""

    CONTROL = "control"
    BULK = "bulk"


class PathKind(Enum):
    """How a peer is reached."""

    DIALED = "direct"
    """We dialed it."""
    ACCEPTED = "dialed us"
    PUNCHED = "punched"
    """Both dialed at once, through what shields them."""
    CIRCUIT = "circuit"
    """Through a relay, which sees ciphertext only."""


@dataclass
class Traffic:
    """Bytes that crossed this transport's sockets, counted below encryption and framing (TCP payload bytes)."""

    sent: int = 0
    received: int = 0
    departed: int = 0
    """Of connections that are closed: bytes of IP packets (see `Transport.departed_bytes`), so not TCP payload only."""


class Stream(trio.abc.HalfCloseableStream):
    """What a transport gives: trio's stream, and two things that spare turns of the loop, which cost more than bytes
    do. A transport that can neither leaves them as they are."""

    async def receive_at_least(self, least: int, max_bytes: int | None = None) -> bytes:
        """As `receive_some`; where it can be waited for, not before `least` bytes are there, or as many as the stream
        holds at a time, or its end."""
        return bytes(await self.receive_some(max_bytes))

    def send_now(self, data: bytes | bytearray | memoryview) -> bool:
        """Send it if that needs no waiting: True, and it is queued. False: nothing was done."""
        return False


Accept = Callable[[PeerKey, Lane, Stream], Awaitable[None]]
"""Called in a task of its own for each stream that a peer opens; the stream is closed when it returns.

A `PeerError` that leaves it drops the peer; a stream that breaks or is found closed ends quietly. Anything else is our
own bug, found by this peer: it is dropped, too (`swarm.guard`).
"""


class Transport(ABC):
    """Dial, serve, streams, peer id. Implementations: `libp2p` (sockets) and `memory` (tests)."""

    key: PeerKey
    """Our own identity."""

    traffic: Traffic

    @abstractmethod
    async def serve(
        self, accept: Accept, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run until cancelled. `started()` gives the addresses listened on (multiaddr text, without the peer id).

        Cancelling closes every connection. Raises `UsageError` when a port is taken.
        """

    @abstractmethod
    async def connect(self, peer: PeerKey, addrs: Sequence[str]) -> None:
        """Have a connection to `peer`: returns at once if there is one. Raises `Unreachable`."""

    @abstractmethod
    async def open_stream(self, peer: PeerKey, lane: Lane) -> Stream:
        """A new stream to a connected peer on the given lane (the transport dials more connections if it needs them).

        Raises `Unreachable`.
        """

    @abstractmethod
    async def disconnect(self, peer: PeerKey) -> None:
        """Close every connection to `peer`; its streams break. Never raises."""

    @abstractmethod
    def remote_address(self, peer: PeerKey) -> str | None:
        """The address the peer is seen at (multiaddr text), or None when it is not connected."""

    @abstractmethod
    async def probe(self, peer: PeerKey, address: str) -> bool:
        """Whether `peer` itself answers at `address`, dialed anew whatever connections there are. Never raises.

        Where only a circuit leads to the peer so far, what was found may take its place.
        """

    @abstractmethod
    def path_kind(self, peer: PeerKey) -> PathKind | None:
        """How the peer is reached; None when it is not connected."""

    @abstractmethod
    def peers(self) -> list[PeerKey]:
        """The peers with a live connection. One that falls silent leaves this list within the transport's own limit."""

    def departed_bytes(self) -> int | None:
        """What has left by all connections so far in bytes of IP packets: headers, acknowledgements and what was sent
        again included. None where nobody counts them."""
        return None

    def target_connections(self, peer: PeerKey) -> int:
        """How many bulk streams at once fill the path to `peer`; each gets a connection of its own. 1 on short paths.

        Depends on the measured round trip, so ask when there is something to send. More streams than this are allowed
        and gain nothing; fewer may leave a long path half empty.
        """
        return 1


async def attend(transport: Transport, accept: Accept, peer: PeerKey, lane: Lane, stream: Stream) -> None:
    """Run `accept` on one stream by the rules of `Accept`: this ring's one place that decides what an error means."""
    with guarded(Source.STREAM, peer) as outcome:
        async with stream:
            await accept(peer, lane, stream)
    if outcome.is_rule_broken:
        await transport.disconnect(peer)
